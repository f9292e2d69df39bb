// x [M, K] laid out for form B (order.metal with an octet a slot), and the sums of every 64 columns [tiles, K / 64, 8].
const uint M = x_shape[0], K = x_shape[1], tile = thread_position_in_grid.y, row = thread_position_in_grid.x % 8;
const uint k = thread_position_in_grid.x / 8 * 64, from = min(8 * tile + row, M - 1) * K + k, to = 8 * (tile * K + k);
float sum = 0;
for (uint i = 0; i < 64; ++i) {
  const T value = x[from + i];
  sum += float(value);
  out[to + 8 * (i / 8 % 2 * 32 + 4 * row + i / 16) + i % 8] = value;
}
x_sums[K / 8 * tile + thread_position_in_grid.x] = sum;
