// A threadgroup's scales (and biases) in threadgroup memory: each read once, 16 bytes a lane.
//
// Affine: one word a group, the scale below and the bias above. Others: one byte a group.

template <int MODE, typename P> METAL_FUNC void stage_group(P scales, P biases, size_t from, threadgroup uint* staged, uint to) {
  if constexpr (MODE == AFFINE) {
    staged[to] = as_type<ushort>(scales[from]) | uint(as_type<ushort>(biases[from])) << 16;
  } else {
    reinterpret_cast<threadgroup uchar*>(staged)[to] = scales[from];
  }
}

// Consecutive groups from..from + count to staged to..to + count.
template <int MODE, typename P>
METAL_FUNC void stage_load(P scales, P biases, size_t from, threadgroup uint* staged, uint to, uint count) {
  constexpr uint load = MODE == AFFINE ? 8 : 16;
  if (count < load || from % load != 0 || (MODE != AFFINE && to % 4 != 0)) {
    for (uint i = 0; i < min(count, load); ++i) {
      stage_group<MODE>(scales, biases, from + i, staged, to + i);
    }
    return;
  }
  uint4 s = load_16_bytes(scales + from);
  if constexpr (MODE == AFFINE) {
    uint4 b = load_16_bytes(biases + from);
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
      staged[to + 2 * i] = (s[i] & 0xFFFF) | b[i] << 16;
      staged[to + 2 * i + 1] = s[i] >> 16 | (b[i] & 0xFFFF0000u);
    }
  } else {
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
      staged[to / 4 + i] = s[i];
    }
  }
}

// Groups first..first + count of each of `rows` rows of `groups`, as rows `at`.. of a table of `stride` groups a row.
template <int MODE, typename P>
METAL_FUNC void stage(
    P scales, P biases, size_t start, uint rows, uint groups, uint first, uint count, threadgroup uint* staged, uint at,
    uint stride, uint thread_index, uint threads) {
  constexpr uint load = MODE == AFFINE ? 8 : 16;
  if (stride == groups) {
    for (uint i = thread_index * load; i < rows * groups; i += threads * load) {
      stage_load<MODE>(scales, biases, start + i, staged, at * stride + i, rows * groups - i);
    }
  } else {
    const uint loads = (count + load - 1) / load;
    for (uint i = thread_index; i < rows * loads; i += threads) {
      const uint row = i / loads, group = i % loads * load;
      stage_load<MODE>(scales, biases, start + row * groups + first + group, staged, (at + row) * stride + group, count - group);
    }
  }
}

// A group's scale (with decode's unit) and bias.
template <typename T, int MODE> METAL_FUNC float2 staged_scale(threadgroup const uint* staged, uint index) {
  if constexpr (MODE == AFFINE) {
    float2 pair = halves_of(T(0), staged[index]);
    return float2(pair.x * decoded_unit<MODE>(), pair.y);
  } else {
    return float2(scale_of_byte<MODE>(reinterpret_cast<threadgroup const uchar*>(staged)[index]), 0);
  }
}
