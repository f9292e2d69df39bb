// x [M, K] laid out for form A: tiles of 8 rows, in them blocks of 8 SLOT columns, in them the 16 bytes that each lane
// loads, load by load. Rows behind M repeat the last, columns behind K (a multiple of 64) are zero.
const uint M = x_shape[0], K = x_shape[1], columns = (K + 63) / 64 * 64;
const uint tile = thread_position_in_grid.x / columns, at = thread_position_in_grid.x % columns;
const uint blocked = K / (8 * SLOT) * (8 * SLOT), block = at < blocked ? 8 * SLOT : 64, slot = block / 8;
const uint start = at - (at < blocked ? at : at - blocked) % block, load = (at - start) / 32, lane = (at - start) % 32;
const uint row = min(8 * tile + lane / 4, M - 1), k = start + (lane % 4 * 2 + load % 2) * slot + load / 2 * 8;
for (uint i = 0; i < 8; ++i) {
  out[8 * thread_position_in_grid.x + i] = k < K ? x[row * K + k + i] : T(0);
}
