threadgroup uint shared[SHARED];
const uint rows = x_shape[0], K = x_shape[1], N = w_shape[0], n0 = 32 * threadgroup_position_in_grid.z;
const uint m0 = 8 * TILES * threadgroup_position_in_grid.y, M = min(rows - m0, uint(8 * TILES));
uint x_row[TILES];
find_rows<ORDERED, TILES>(x_row, m0, M, rows, K, thread_index_in_simdgroup);
float2 y[4 * TILES];
multiply_rows<T, MODE, BITS, GROUP, TILES, SHARED, WHOLE, ORDERED, false>(
    y, w, scales, biases, w, scales, biases, ordered_x, x_row, N, K, n0, shared, simdgroup_index_in_threadgroup,
    simdgroups_per_threadgroup, thread_index_in_simdgroup);
merge<T, TILES, ADDED, false>(
    y, decoded_rest<MODE>(), tensor_scale, tensor_scale_shape[0], tensor_scale, 1, out + m0 * N,
    residual + (ADDED ? m0 * N : 0), M, N, n0, shared, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
    thread_index_in_simdgroup);
