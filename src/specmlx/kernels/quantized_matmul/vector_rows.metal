threadgroup float sums[8 * ROWS * 4 * RUNS];
const uint N = w_shape[0], K = x_shape[1];
const uint m0 = ROWS * threadgroup_position_in_grid.y, n0 = 4 * RUNS * threadgroup_position_in_grid.z;
const uint M = min(uint(x_shape[0]) - m0, uint(ROWS));
uint x_row[ROWS];
for (uint m = 0; m < ROWS; ++m) {
  x_row[m] = (m0 + min(m, M - 1)) * K;
}
float y[RUNS * ROWS];
multiply_vectors<T, MODE, BITS, GROUP, ROWS, WHOLE>(
    y, w, scales, biases, x, x_row, N, K, n0, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
    thread_index_in_simdgroup);
merge_vectors<T, ROWS>(
    y, decoded_rest<MODE>(), tensor_scale, tensor_scale_shape[0], out + m0 * N, M, N, n0, sums, simdgroup_index_in_threadgroup,
    simdgroups_per_threadgroup, thread_index_in_simdgroup);
