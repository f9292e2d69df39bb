// Form V: for few rows of x, one multiply-add a weight and row; a simdgroup reads 4 x RUNS rows of w.
//
// 8 lanes share a row of w: of a block of K each loads its granule of a 128-byte line, so that a load covers the lines of
// 4 rows. Each lane sums its own k in ascending order; then 8 lanes, then `split` simdgroups are added in a fixed order.

constant constexpr int RUNS = 4;

// A group's scale (with decode's unit) and bias.
template <typename T, int MODE, typename P> METAL_FUNC float2 scale_at(P scales, P biases, size_t index) {
  if constexpr (MODE == AFFINE) {
    return float2(float(scales[index]) * decoded_unit<MODE>(), float(biases[index]));
  } else if constexpr (MODE == FP8) {
    return float2(1, 0);
  } else {
    return float2(scale_of_byte<MODE>(scales[index]), 0);
  }
}

// The 8 weights of one octet of RUNS rows of w times those of ROWS rows of x.
template <typename T, int MODE, int BITS, int ROWS>
METAL_FUNC void add_octets(thread float* y, thread const uint4* x, thread const uint2* w, thread const float2* scale) {
#pragma clang loop unroll(full)
  for (int p = 0; p < 4; ++p) {
    const int first = first_of_pair<BITS>(p), second = second_of_pair<BITS>(p);
    float2 pair[RUNS];
#pragma clang loop unroll(full)
    for (int i = 0; i < RUNS; ++i) {
      pair[i] = dequantize<MODE>(decode<MODE, BITS>(w[i], p), scale[i]);
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < ROWS; ++m) {
      const float x_first = element(T(0), x[m], first), x_second = element(T(0), x[m], second);
#pragma clang loop unroll(full)
      for (int i = 0; i < RUNS; ++i) {
        y[RUNS * m + i] = fma(x_second, pair[i].y, fma(x_first, pair[i].x, y[RUNS * m + i]));
      }
    }
  }
}

template <typename T, int MODE, int BITS, int GROUP, int ROWS, bool WHOLE, typename W, typename S, typename X>
METAL_FUNC void multiply_vectors(
    thread float* y, W w, S scales, S biases, X x, thread const uint* x_row, uint N, uint K, uint n0, uint simdgroup,
    uint split, uint lane) {
  constexpr uint SLOT = slot_weights<BITS>(), BLOCK = 8 * SLOT, WORDS = SLOT * BITS / 32;
  const uint row_words = K / 16 * BITS / 2, groups = K / GROUP, blocks = K / BLOCK, slot = lane % 8;

  uint row[RUNS];
  float2 scale[RUNS];
#pragma clang loop unroll(full)
  for (uint i = 0; i < RUNS; ++i) {
    row[i] = min(4 * i + lane / 8, N - 1 - n0);
    scale[i] = 0;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS * ROWS; ++i) {
    y[i] = 0;
  }
  w += size_t(n0) * row_words;
  scales += size_t(n0) * groups;
  biases += size_t(n0) * groups;

#pragma clang loop unroll(disable)
  for (uint block = simdgroup * blocks / split; block < (simdgroup + 1) * blocks / split; ++block) {
    const uint k = block * BLOCK + slot * SLOT;
    uint words[RUNS * WORDS];
#pragma clang loop unroll(full)
    for (int i = 0; i < RUNS; ++i) {
      load_slot<WORDS, WHOLE>(w + row[i] * row_words + k / 8 * BITS / 4, words + WORDS * i);
    }
#pragma clang loop unroll(full)
    for (uint o = 0; o < SLOT / 8; ++o) {
      uint4 x_octet[ROWS];
      uint2 octets[RUNS];
#pragma clang loop unroll(full)
      for (int m = 0; m < ROWS; ++m) {
        x_octet[m] = load_16_bytes(x + x_row[m] + k + 8 * o);
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < RUNS; ++i) {
        octets[i] = octet_of<BITS, WORDS>(words + WORDS * i, o);
        if (8 * o % GROUP == 0) {
          scale[i] = scale_at<T, MODE>(scales, biases, row[i] * groups + (k + 8 * o) / GROUP);
        }
      }
      add_octets<T, MODE, BITS, ROWS>(y, x_octet, octets, scale);
    }
  }

  // What K leaves behind whole blocks, 64 at a time, an octet a lane; behind K's end x counts as zero.
  for (uint start = blocks * BLOCK; simdgroup == 0 && start < K; start += 64) {
    const uint k = min(start + 8 * slot, K - 8);
    uint4 x_octet[ROWS];
    uint2 octets[RUNS];
#pragma clang loop unroll(full)
    for (int m = 0; m < ROWS; ++m) {
      x_octet[m] = load_16_bytes(x + x_row[m] + k);
      x_octet[m] = start + 8 * slot < K ? x_octet[m] : uint4(0);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < RUNS; ++i) {
      octets[i] = load_octet<BITS>(w, row[i] * row_words, k);
      scale[i] = scale_at<T, MODE>(scales, biases, row[i] * groups + k / GROUP);
    }
    add_octets<T, MODE, BITS, ROWS>(y, x_octet, octets, scale);
  }
}

// The sums of 8 lanes, then of the simdgroups in ascending order, times `unit` and the tensor's scale.
template <typename T, int ROWS, typename P>
METAL_FUNC void merge_vectors(
    thread float* y, float unit, P scales, uint scale_count, device T* out, uint M, uint N, uint n0,
    threadgroup float* sums, uint simdgroup, uint split, uint lane) {
#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS * ROWS; ++i) {
    y[i] += simd_shuffle_xor(y[i], 1);
    y[i] += simd_shuffle_xor(y[i], 2);
    y[i] += simd_shuffle_xor(y[i], 4);
    if (lane % 8 == 0) {
      sums[(simdgroup * ROWS + i / RUNS) * 4 * RUNS + i % RUNS * 4 + lane / 8] = y[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 32 * simdgroup + lane; i < 4 * RUNS * ROWS; i += 32 * split) {
    float sum = sums[i];
    for (uint s = 1; s < split; ++s) {
      sum += sums[4 * RUNS * ROWS * s + i];
    }
    const uint m = i / (4 * RUNS), n = n0 + i % (4 * RUNS);
    if (m < M && n < N) {
      out[m * N + n] = T(sum * (scale_of_row(scales, scale_count, n) * unit));
    }
  }
}
