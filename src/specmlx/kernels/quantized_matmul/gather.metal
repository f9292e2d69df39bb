threadgroup uint shared[SHARED];
const uint N = w_shape[1], K = x_shape[1], pairs = experts_shape[0];
const uint m0 = threadgroup_position_in_grid.y, n0 = 32 * threadgroup_position_in_grid.z;
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
const size_t first = size_t(expert) * N, groups = K / GROUP;
const auto own_w = w + first * (K / 16 * BITS / 2);
const uint count = tensor_scale_shape[0];
const auto own_tensor_scale = tensor_scale + (count == 1 ? 0 : first);
// Most experts of a decoding pass have a row or two: no second tile of 8 for them.
if (TILES == 1 || M <= 8) {
  multiply_pairs<T, MODE, BITS, GROUP, 1, SHARED, WHOLE>(
      own_w, scales, biases, first * groups, own_tensor_scale, count, rows, x, out, m0, M, N, K, n0, shared,
      simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup);
} else {
  multiply_pairs<T, MODE, BITS, GROUP, TILES, SHARED, WHOLE>(
      own_w, scales, biases, first * groups, own_tensor_scale, count, rows, x, out, m0, M, N, K, n0, shared,
      simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup);
}
