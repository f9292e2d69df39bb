// Form A: y[m, n] = sum over k of x[m, k] w[n, k] on 8x8 simdgroup matrices; a packed word is read once for 8 TILES rows.
//
// x is the A operand (8 rows x 8 slots of k), the weights are B (8 slots x 8 columns n), decoded in registers. A lane
// holds one slot of B for columns `pair` and `pair + 1` of four column tiles, so 8 rows of w: column c of tile t is row
// 8 t + 4 (c % 2) + c / 2, so that a load takes neighbouring rows, which share lines. Of a block of K it loads,
// for each of these rows, the 16-byte granule number `slot` of a 128-byte line; step j multiplies weight j of every slot.

struct Lane {
  ushort slot;  // row of its two elements in an 8x8 simdgroup matrix
  ushort pair;  // their first column
};

METAL_FUNC Lane lane_map(uint lane) {
  uint quad = lane / 4;
  return {ushort((quad & 4) + lane / 2 % 4), ushort((quad & 2) * 2 + lane % 2 * 2)};
}

METAL_FUNC void multiply(thread float2& c, float2 a, float2 b) {
  simdgroup_matrix<float, 8, 8> A, B, C;
  reinterpret_cast<thread float2&>(A.thread_elements()) = a;
  reinterpret_cast<thread float2&>(B.thread_elements()) = b;
  reinterpret_cast<thread float2&>(C.thread_elements()) = c;
  simdgroup_multiply_accumulate(C, A, B, C);
  c = reinterpret_cast<thread float2&>(C.thread_elements());
}

template <int MODE> METAL_FUNC float2 dequantize(float2 q, float2 scale) {
  if constexpr (MODE == AFFINE) {
    return float2(fma(q.x, scale.x, scale.y), fma(q.y, scale.x, scale.y));
  } else if constexpr (MODE == FP8) {
    return q;
  } else {
    return q * scale.x;
  }
}

// One octet of every slot: 8 steps on TILES row tiles and four column tiles.
template <typename T, int MODE, int BITS, int TILES, bool SCALED = true>
METAL_FUNC void multiply_octets(
    thread float2* y, thread const uint4* x, thread const uint2* w, thread const float2* scale) {
#pragma clang loop unroll(full)
  for (int p = 0; p < 4; ++p) {
    const int first = first_of_pair<BITS>(p), second = second_of_pair<BITS>(p);
    float2 x_first[TILES], x_second[TILES];
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
      x_first[m] = float2(element(T(0), x[2 * m], first), element(T(0), x[2 * m + 1], first));
      x_second[m] = float2(element(T(0), x[2 * m], second), element(T(0), x[2 * m + 1], second));
    }
#pragma clang loop unroll(full)
    for (int t = 0; t < 4; ++t) {
      float2 left = decode<MODE, BITS>(w[2 * t], p), right = decode<MODE, BITS>(w[2 * t + 1], p);
      if constexpr (SCALED) {
        left = dequantize<MODE>(left, scale[2 * t]);
        right = dequantize<MODE>(right, scale[2 * t + 1]);
      }
#pragma clang loop unroll(full)
      for (int m = 0; m < TILES; ++m) {
        multiply(y[4 * m + t], x_first[m], float2(left.x, right.x));
        multiply(y[4 * m + t], x_second[m], float2(left.y, right.y));
      }
    }
  }
}

// x for one octet of slots `lane.pair` + e of the block at k: from rows of x, or from x laid out in the order of the lanes
// (order.metal), where the 8 rows of a tile follow each other in every block and a load covers 512 bytes.
template <bool ORDERED, int SLOT, typename X> METAL_FUNC uint4 load_x(X x, uint row, uint k, Lane lane, uint e, uint o) {
  if constexpr (ORDERED) {
    return load_16_bytes(x + row + 8 * (k + 32 * (2 * o + e) + 4 * lane.slot + lane.pair / 2));
  } else {
    return load_16_bytes(x + row + k + (lane.pair + e) * SLOT + 8 * o);
  }
}

// Where the rows of x that a lane reads begin: rows m0..m0 + M of [rows, K], or their tiles in the order of the lanes.
template <bool ORDERED, int TILES>
METAL_FUNC void find_rows(thread uint* x_row, uint m0, uint M, uint rows, uint K, uint lane_index) {
#pragma clang loop unroll(full)
  for (uint m = 0; m < TILES; ++m) {
    if constexpr (ORDERED) {
      x_row[m] = min(m0 + 8 * m, (rows - 1) / 8 * 8) * ((K + 63) / 64 * 64);
    } else {
      x_row[m] = (m0 + min(8 * m + lane_map(lane_index).slot, M - 1)) * K;
    }
  }
}

// 32 rows of w [N, K] from row n0 times 8 TILES rows of x, whose elements begin at x_row; `split` simdgroups share K.
// PAIRED: 16 rows of w and the same 16 of up_w; else up_w and what belongs to it aren't read. The scales of w's first row
// begin at `first_group`, which tells where 16 bytes are aligned.
// In which order a row's products are added follows from the format, K and split alone.
template <
    typename T, int MODE, int BITS, int GROUP, int TILES, int SHARED, bool WHOLE, bool ORDERED, bool PAIRED, typename W,
    typename S, typename X>
METAL_FUNC void multiply_rows(
    thread float2* y, W w, S scales, S biases, W up_w, S up_scales, S up_biases, X x, thread const uint* x_row, uint N,
    uint K, uint n0, threadgroup uint* shared, uint simdgroup, uint split, uint lane_index, size_t first_group = 0) {
  constexpr uint ROWS = PAIRED ? 16 : 32;
  constexpr uint SLOT = slot_weights<BITS>(), BLOCK = 8 * SLOT, WORDS = SLOT * BITS / 32;
  constexpr uint STAGED = SHARED / (MODE == AFFINE ? 32 : 8), CHUNK = MODE == FP8 ? 0 : STAGED * GROUP / BLOCK * BLOCK;
  const uint groups = MODE == FP8 ? 0 : K / GROUP, chunk = MODE == FP8 || groups <= STAGED ? K : CHUNK;
  const uint stride = MODE == FP8 ? 0 : chunk / GROUP, row_words = K / 16 * BITS / 2;
  const Lane lane = lane_map(lane_index);

  uint row[8], staged_row[8];
  float2 scale[8];
#pragma clang loop unroll(full)
  for (uint i = 0; i < 8; ++i) {
    row[i] = min(4 * i % ROWS + lane.pair / 2, N - 1 - n0);
    staged_row[i] = (row[i] + (i >= ROWS / 4 ? ROWS : 0)) * stride;
    row[i] *= row_words;
    scale[i] = 0;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < 4 * TILES; ++i) {
    y[i] = 0;
  }
  w += size_t(n0) * row_words;
  up_w += size_t(n0) * row_words;

  for (uint start = 0; start < K; start += chunk) {
    const uint end = min(start + chunk, K), blocks = (end - start) / BLOCK;
    if constexpr (MODE != FP8) {
      if (start > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
#pragma clang loop unroll(full)
      for (uint i = 0; i < 32 / ROWS; ++i) {
        stage<MODE>(
            i == 0 ? scales : up_scales, i == 0 ? biases : up_biases, first_group + size_t(n0) * groups, min(ROWS, N - n0),
            groups, start / GROUP, (end - start) / GROUP, shared, ROWS * i, stride, 32 * simdgroup + lane_index, 32 * split);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

#pragma clang loop unroll(disable)
    for (uint block = simdgroup * blocks / split; block < (simdgroup + 1) * blocks / split; ++block) {
      const uint k = start + block * BLOCK;
      uint words[8 * WORDS];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 8; ++i) {
        load_slot<WORDS, WHOLE>((i < ROWS / 4 ? w : up_w) + row[i] + (k + lane.slot * SLOT) / 8 * BITS / 4, words + WORDS * i);
      }
#pragma clang loop unroll(full)
      for (uint o = 0; o < SLOT / 8; ++o) {
        uint4 x_octet[2 * TILES];
#pragma clang loop unroll(full)
        for (int i = 0; i < 2 * TILES; ++i) {
          x_octet[i] = load_x<ORDERED, SLOT>(x, x_row[i / 2], k, lane, i % 2, o);
        }
        uint2 octets[8];
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
          octets[i] = octet_of<BITS, WORDS>(words + WORDS * i, o);
          if (MODE != FP8 && 8 * o % GROUP == 0) {
            scale[i] = staged_scale<T, MODE>(shared, staged_row[i] + (k - start + lane.slot * SLOT + 8 * o) / GROUP);
          }
        }
        multiply_octets<T, MODE, BITS, TILES>(y, x_octet, octets, scale);
      }
    }

    // What K leaves behind whole blocks, 64 at a time, an octet a slot; behind K's end x counts as zero.
    for (uint k = start + blocks * BLOCK; simdgroup == 0 && k < end; k += 64) {
      const uint k_w = min(k + 8 * lane.slot, K - 8);
      uint4 x_octet[2 * TILES];
#pragma clang loop unroll(full)
      for (int i = 0; i < 2 * TILES; ++i) {
        if constexpr (ORDERED) {
          x_octet[i] = load_x<true, 8>(x, x_row[i / 2], k, lane, i % 2, 0);
        } else {
          const uint k_x = k + 8 * (lane.pair + i % 2);  // clamped, since Apple's compiler may hoist a masked load
          x_octet[i] = load_16_bytes(x + x_row[i / 2] + min(k_x, K - 8));
          x_octet[i] = k_x < K ? x_octet[i] : uint4(0);
        }
      }
      uint2 octets[8];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 8; ++i) {
        octets[i] = load_octet<BITS>(i < ROWS / 4 ? w : up_w, row[i], k_w);
        if (MODE != FP8) {
          scale[i] = staged_scale<T, MODE>(shared, staged_row[i] + (k_w - start) / GROUP);
        }
      }
      multiply_octets<T, MODE, BITS, TILES>(y, x_octet, octets, scale);
    }
  }
}

METAL_FUNC float total(threadgroup const float* sums, uint at, uint split) {
  float total = sums[at];
  for (uint s = 1; s < split; ++s) {
    total += sums[256 * s + at];
  }
  return total;
}

// The scale of row n: the tensor's, or one of `count` for each row.
template <typename P> METAL_FUNC float scale_of_row(P scales, uint count, uint n) { return scales[count == 1 ? 0 : n]; }

// The simdgroups' sums, added in ascending order, times `unit` and the tensor's scale, to rows of out [.., N].
// ADDED: plus `residual` [.., N]. PAIRED: silu(16 columns) times the 16 columns of up_w. Each operation rounds to T.
template <typename T, int TILES, bool ADDED, bool PAIRED, typename P, typename Q, typename R>
METAL_FUNC void merge(
    thread const float2* y, float unit, P scales, uint scale_count, Q up_scales, uint up_count, device T* out, R residual,
    uint M, uint N, uint n0, threadgroup uint* shared, uint simdgroup, uint split, uint lane_index) {
  constexpr uint COLUMNS = PAIRED ? 16 : 32;
  threadgroup float* sums = reinterpret_cast<threadgroup float*>(shared);
  const Lane lane = lane_map(lane_index);
#pragma clang loop unroll(full)
  for (int m = 0; m < TILES; ++m) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (int t = 0; t < 4; ++t) {
      const uint at = (8 * simdgroup + lane.slot) * 32 + 8 * t + lane.pair / 2;
      sums[at] = y[4 * m + t].x;
      sums[at + 4] = y[4 * m + t].y;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 32 * simdgroup + lane_index; i < 8 * COLUMNS; i += 32 * split) {
      const uint row = i / COLUMNS, column = i % COLUMNS, at = 32 * row + column, to = (8 * m + row) * N + n0 + column;
      if (8 * m + row < M && n0 + column < N) {
        const uint n = n0 + column;
        T sum = T(total(sums, at, split) * (scale_of_row(scales, scale_count, n) * unit));
        if constexpr (PAIRED) {
          const T up = T(total(sums, at + 16, split) * (scale_of_row(up_scales, up_count, n) * unit));
          const T sigmoid = T(1 / (1 + precise::exp(-float(sum))));
          sum = T(float(T(float(sum) * float(sigmoid))) * float(up));
        } else if constexpr (ADDED) {
          sum = T(float(sum) + float(residual[to]));
        }
        out[to] = sum;
      }
    }
  }
}
