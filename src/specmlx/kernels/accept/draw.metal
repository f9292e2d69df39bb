// Rejection's own token, from the segments' bests: grid (32, B). Without residual p itself is the limit.

const int lane = thread_index_in_simdgroup;
const int b = threadgroup_position_in_grid.y;
const int segments = values_shape[2];

Best residual = nothing(), whole = nothing();
for (int i = lane; i < segments; i += 32) {
    const int at = 2 * b * segments + i;
    take(residual, values[at], ids[at]);
    take(whole, values[at + segments], ids[at + segments]);
}
residual = simd_best(residual);
whole = simd_best(whole);
if (lane == 0) {
    next_anchor[b] = min(residual.value > -INFINITY ? residual.id : whole.id, V - 1);
}
