// Greedy and coupled: grid (32 L, B), a simdgroup a row. The proposal stands as far as it equals the rows' own tokens.

const int lane = thread_index_in_simdgroup;
const int row = simdgroup_index_in_threadgroup;
const int b = threadgroup_position_in_grid.y;
const int segments = values_shape[1];
threadgroup int own[L];

Best best = nothing();
for (int i = lane; i < segments; i += 32) {
    const int at = (b * L + row) * segments + i;
    take(best, values[at], ids[at]);
}
best = simd_best(best);
if (lane == 0) {
    own[row] = min(best.id, V - 1);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_position_in_threadgroup.x == 0) {
    int n = 0;
    while (n < L - 1 && tokens[b * (L - 1) + n] == own[n]) {
        n++;
    }
    accepted[b] = n;
    next_anchor[b] = own[n];
}
