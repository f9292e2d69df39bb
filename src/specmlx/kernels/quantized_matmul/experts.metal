// The M pairs of one expert from pair m0 on, M <= 8 TILES, times 32 rows of the expert's matrix.
template <
    typename T, int MODE, int BITS, int GROUP, int TILES, int SHARED, bool WHOLE, typename W, typename S, typename P, typename R,
    typename X>
METAL_FUNC void multiply_pairs(
    W w, S scales, S biases, size_t first_group, P tensor_scale, uint scale_count, R rows, X x, device T* out, uint m0, uint M,
    uint N, uint K, uint n0, threadgroup uint* shared, uint simdgroup, uint split, uint lane_index) {
  uint x_row[TILES];
  float2 y[4 * TILES];
#pragma clang loop unroll(full)
  for (uint m = 0; m < TILES; ++m) {
    x_row[m] = rows[m0 + min(8 * m + lane_map(lane_index).slot, M - 1)] * K;
  }
  multiply_rows<T, MODE, BITS, GROUP, TILES, SHARED, WHOLE, false, false>(
      y, w, scales, biases, w, scales, biases, x, x_row, N, K, n0, shared, simdgroup, split, lane_index, first_group);
  merge<T, TILES, false, false>(
      y, decoded_rest<MODE>(), tensor_scale, scale_count, tensor_scale, 1, out + m0 * N, x, M, N, n0, shared, simdgroup, split,
      lane_index);
}
