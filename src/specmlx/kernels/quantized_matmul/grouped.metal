// Form B: scales outside the matrix operations. y = sum over groups of scale (sum of x q) + bias (sum of x).
//
// The 8 slots of a step lie within 64 columns, so within one group of 64 or 128: an octet of each slot, decoded to plain
// integers, and two multiply-adds for 64 columns. The sums of x come with it (order_sums.metal); 8 of them and 8 biases
// are one more step. y comes out in decode's unit. A weight costs a mask, most of a shift and its conversion; a load
// takes 4 bytes a lane (8 in 8 bits).

template <typename T, int BITS, int GROUP, int TILES, int SHARED, typename W, typename S>
METAL_FUNC void multiply_groups(
    thread float2* y, W w, S scales, S biases, const device T* x, const device float* x_sums, thread const uint* tile, uint N,
    uint K, uint n0, threadgroup uint* shared, uint simdgroup, uint split, uint lane_index) {
  constexpr uint CHUNK = SHARED / 32 * GROUP / 512 * 512, AHEAD = 8 / BITS;
  const uint groups = K / GROUP, chunk = groups <= SHARED / 32 ? K : CHUNK, stride = chunk / GROUP, row_words = K / 32 * BITS;
  const Lane lane = lane_map(lane_index);

  uint row[8];
#pragma clang loop unroll(full)
  for (uint i = 0; i < 8; ++i) {
    row[i] = min(4 * i + lane.pair / 2, N - 1 - n0);
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < 4 * TILES; ++i) {
    y[i] = 0;
  }
  w += size_t(n0) * row_words;

  for (uint start = 0; start < K; start += chunk) {
    const uint end = min(start + chunk, K), count = (end - start) / 64;
    if (start > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    stage<AFFINE>(
        scales, biases, size_t(n0) * groups, min(32u, N - n0), groups, start / GROUP, (end - start) / GROUP, shared, 0, stride,
        32 * simdgroup + lane_index, 32 * split);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint first = start / 64 + simdgroup * count / split, last = start / 64 + (simdgroup + 1) * count / split;

#pragma clang loop unroll(disable)
    for (uint c = first; c < last; c += AHEAD) {
      uint2 octets[8 * AHEAD];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 8 * AHEAD; ++i) {
        octets[i] = load_octet<BITS>(w, row[i % 8] * row_words, 64 * min(c + i / 8, last - 1) + 8 * lane.slot);
      }
#pragma clang loop unroll(full)
      for (uint ahead = 0; ahead < AHEAD; ++ahead) {
        if (c + ahead < last) {
          const uint k = 64 * (c + ahead);
          uint4 x_octet[2 * TILES];
          float2 sums[4 * TILES], unscaled[8];
#pragma clang loop unroll(full)
          for (int i = 0; i < 2 * TILES; ++i) {
            x_octet[i] = load_x<true, 8>(x, 8 * K * tile[i / 2], k, lane, i % 2, 0);
          }
#pragma clang loop unroll(full)
          for (int i = 0; i < 4 * TILES; ++i) {
            sums[i] = 0;
          }
          multiply_octets<T, AFFINE, BITS, TILES, false>(sums, x_octet, octets + 8 * ahead, unscaled);
#pragma clang loop unroll(full)
          for (int t = 0; t < 4; ++t) {
            const float left = halves_of(T(0), shared[row[2 * t] * stride + (k - start) / GROUP]).x;
            const float right = halves_of(T(0), shared[row[2 * t + 1] * stride + (k - start) / GROUP]).x;
#pragma clang loop unroll(full)
            for (int m = 0; m < TILES; ++m) {
              y[4 * m + t].x = fma(sums[4 * m + t].x, left, y[4 * m + t].x);
              y[4 * m + t].y = fma(sums[4 * m + t].y, right, y[4 * m + t].y);
            }
          }
        }
      }
    }

    for (uint c = first; c < last; c += 8) {
      const uint group = (64 * min(c + lane.slot, last - 1) - start) / GROUP;
      float2 x_sum[TILES];
#pragma clang loop unroll(full)
      for (int m = 0; m < TILES; ++m) {
        const device float* sums = x_sums + 8 * (K / 64 * tile[m]) + lane.slot;
        const float left = sums[8 * min(c + lane.pair, last - 1)], right = sums[8 * min(c + lane.pair + 1, last - 1)];
        x_sum[m] = float2(c + lane.pair < last ? left : 0, c + lane.pair + 1 < last ? right : 0);
      }
#pragma clang loop unroll(full)
      for (int t = 0; t < 4; ++t) {
        const float2 bias = float2(
            halves_of(T(0), shared[row[2 * t] * stride + group]).y, halves_of(T(0), shared[row[2 * t + 1] * stride + group]).y);
#pragma clang loop unroll(full)
        for (int m = 0; m < TILES; ++m) {
          multiply(y[4 * m + t], x_sum[m], bias * (1 / decoded_unit<AFFINE>()));
        }
      }
    }
  }
}
