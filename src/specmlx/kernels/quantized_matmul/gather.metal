threadgroup uint shared[SHARED];
const uint N = w_shape[1], K = x_shape[1], pairs = experts_shape[0], m0 = threadgroup_position_in_grid.y, n0 = 32 * threadgroup_position_in_grid.z;
// Pairs are sorted by expert: the threadgroup of every 8 TILES-th pair of an expert's run takes the pairs up to the next.
const uint expert = experts[m0];
uint before = 0, M = 1;
while (before < m0 && experts[m0 - before - 1] == expert) {
  ++before;
}
if (before % (8 * TILES) != 0) {
  return;
}
while (M < 8 * TILES && m0 + M < pairs && experts[m0 + M] == expert) {
  ++M;
}
const uint slot = lane_map(thread_index_in_simdgroup).slot;
uint x_row[TILES];
for (uint m = 0; m < TILES; ++m) {
  x_row[m] = rows[m0 + min(8 * m + slot, M - 1)] * K;
}
float2 y[4 * TILES];
const size_t first = size_t(expert) * N, groups = K / GROUP;
const auto expert_w = w + first * (K / 16 * BITS / 2);
const auto expert_scales = scales + first * groups, expert_biases = biases + first * groups;
multiply_rows<T, MODE, BITS, GROUP, TILES, SHARED, WHOLE, false, false>(
    y, expert_w, expert_scales, expert_biases, expert_w, expert_scales, expert_biases, x, x_row, N, K, n0, shared,
    simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup);
merge<T, TILES, false, false>(
    y, decoded_rest<MODE>(), tensor_scale + (tensor_scale_shape[0] == 1 ? 0 : first), tensor_scale_shape[0], tensor_scale, 1,
    out + m0 * N, x, M, N, n0, shared, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup);
