threadgroup uint shared[SHARED];
const uint N = w_shape[0], K = x_shape[1], n0 = 32 * threadgroup_position_in_grid.z;
const uint rows = x_shape[0], m0 = 8 * TILES * threadgroup_position_in_grid.y, M = min(rows - m0, uint(8 * TILES));
uint tile[TILES];
for (uint m = 0; m < TILES; ++m) {
  tile[m] = min(m0 / 8 + m, (rows - 1) / 8);
}
float2 y[4 * TILES];
multiply_groups<T, BITS, GROUP, TILES, SHARED>(
    y, w, scales, biases, ordered_x, x_sums, tile, N, K, n0, shared, simdgroup_index_in_threadgroup,
    simdgroups_per_threadgroup, thread_index_in_simdgroup);
merge<T, TILES, false, false>(
    y, decoded_unit<AFFINE>(), tensor_scale, 1, tensor_scale, 1, out + m0 * N, x, M, N, n0, shared,
    simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup);
