// From packed words to weights: shared by the forms of quantized_matmul.
//
// An octet is 8 weights in a row, BITS bytes of it. Its weights come out as pairs of 16-bit floats in one word, by
// masks and shifts alone: an integer q below 1024 is the half number q 2^-24 (a denormal, exact), E2M1 and E4M3 codes
// are halves with another exponent bias. The power of two goes into the scale. No conversion from integers is needed.

enum quantized_mode { AFFINE, NVFP4, MXFP4, MXFP8, FP8 };

template <typename T> METAL_FUNC uint4 load_16_bytes(const device T* p) {
  return *reinterpret_cast<const device uint4*>(p);
}

template <typename T> METAL_FUNC uint4 load_16_bytes(const constant T* p) {
  return *reinterpret_cast<const constant uint4*>(p);
}

template <typename T> METAL_FUNC uint2 load_8_bytes(const device T* p) { return *reinterpret_cast<const device uint2*>(p); }
template <typename T> METAL_FUNC uint2 load_8_bytes(const constant T* p) {
  return *reinterpret_cast<const constant uint2*>(p);
}

// Bytes, for words that need not be aligned (2, 3, 5, 6 bits).
METAL_FUNC const device uchar* bytes_of(const device uint* p) { return reinterpret_cast<const device uchar*>(p); }
METAL_FUNC const constant uchar* bytes_of(const constant uint* p) { return reinterpret_cast<const constant uchar*>(p); }

// Element i (0..7) of 16 bytes of type T.
METAL_FUNC float element(bfloat16_t, uint4 v, int i) {
  return as_type<float>(i % 2 ? v[i / 2] & 0xFFFF0000u : v[i / 2] << 16);
}
METAL_FUNC float element(half, uint4 v, int i) { return float(as_type<half>(ushort(v[i / 2] >> (16 * (i % 2)) & 0xFFFF))); }

// The numbers of type T in the low and the high half of a word.
METAL_FUNC float2 halves_of(bfloat16_t, uint word) {
  return float2(as_type<float>(word << 16), as_type<float>(word & 0xFFFF0000u));
}
METAL_FUNC float2 halves_of(half, uint word) {
  return float2(float(as_type<half>(ushort(word & 0xFFFF))), float(as_type<half>(ushort(word >> 16))));
}

// Weights of a row that one lane keeps of a block: a 16-byte granule where a whole number of weights fills it.
template <int BITS> constexpr int slot_weights() { return BITS == 4 || BITS == 8 ? 128 / BITS : 32; }

// 32 bits that begin at a bit of an array; what lies behind the array reads as zero.
template <int WORDS> METAL_FUNC uint bits_at(thread const uint* words, int bit) {
  uint low = words[bit / 32] >> (bit % 32);
  return bit % 32 && bit / 32 + 1 < WORDS ? low | (words[bit / 32 + 1] << (32 - bit % 32)) : low;
}

// Octet `o` of an array of words, its first 4 weights and its last 4 apart where both don't fit two half words.
template <int BITS, int WORDS> METAL_FUNC uint2 octet_of(thread const uint* words, int o) {
  if constexpr (BITS == 4) {
    return uint2(words[o], 0);
  } else if constexpr (BITS == 8) {
    return uint2(words[2 * o], words[2 * o + 1]);
  } else if constexpr (BITS < 4) {
    uint packed = bits_at<WORDS>(words, 8 * BITS * o);
    uint low = (1u << (4 * BITS)) - 1;
    return uint2((packed & low) | ((packed >> (4 * BITS) & low) << 16), 0);
  } else {
    return uint2(bits_at<WORDS>(words, 8 * BITS * o), bits_at<WORDS>(words, 8 * BITS * o + 4 * BITS));
  }
}

// Pair p (0..3) of an octet holds weights first_of_pair and second_of_pair.
template <int BITS> constexpr int first_of_pair(int p) { return BITS == 8 ? 4 * (p / 2) + p % 2 : p; }
template <int BITS> constexpr int second_of_pair(int p) { return first_of_pair<BITS>(p) + (BITS == 8 ? 2 : 4); }

// The power of two by which decode's numbers are too small.
template <int MODE> constexpr float decoded_unit() {
  return MODE == AFFINE ? 16777216.0f : MODE == NVFP4 || MODE == MXFP4 ? 16384.0f : 256.0f;
}

template <int MODE, int BITS> METAL_FUNC float2 decode(uint2 octet, int p) {
  uint pair;
  if constexpr (MODE == AFFINE) {
    if constexpr (BITS == 8) {
      pair = (p < 2 ? octet.x : octet.y) >> (8 * (p % 2)) & 0x00FF00FFu;
    } else if constexpr (BITS <= 4) {
      pair = octet.x >> (BITS * p) & ((1u << BITS) - 1) * 0x00010001u;
    } else {
      uint mask = (1u << BITS) - 1;
      pair = (octet.x >> (BITS * p) & mask) | (octet.y >> (BITS * p) & mask) << 16;
    }
  } else if constexpr (BITS == 4) {
    uint magnitude = p == 3 ? octet.x >> 3 : octet.x << (9 - 4 * p);
    pair = (octet.x << (12 - 4 * p) & 0x80008000u) | (magnitude & 0x0E000E00u);
  } else {
    uint word = p < 2 ? octet.x : octet.y;
    pair = p % 2 ? (word & 0x80008000u) | (word >> 1 & 0x3F803F80u) : (word << 8 & 0x80008000u) | (word << 7 & 0x3F803F80u);
  }
  half2 weights = as_type<half2>(pair);
  return float2(float(weights.x), float(weights.y));
}

// A group's scale byte: E8M0 times decode's unit, E4M3 as the half number of the same bits, 2^-8 of it.
template <int MODE> METAL_FUNC float scale_of_byte(uint byte) {
  if constexpr (MODE == NVFP4) {
    return float(as_type<half>(ushort((byte & 127) << 7 | (byte & 128) << 8)));
  }
  // 2^(e - 127): a bfloat16 of the same exponent; e = 0 would be denormal in 32 bits, so the unit enters the exponent.
  constexpr uint unit = MODE == MXFP4 ? 14 : 8;
  return as_type<float>(min(byte + unit, 255u) << 23);
}

// A lane's words of a row: 16 bytes at once where the rows allow it.
template <int WORDS, bool WHOLE, typename P> METAL_FUNC void load_slot(P w, thread uint* words) {
  if constexpr (WHOLE) {
    uint4 granule = load_16_bytes(w);
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
      words[i] = granule[i];
    }
  } else {
#pragma clang loop unroll(full)
    for (int i = 0; i < WORDS; ++i) {
      words[i] = w[i];
    }
  }
}

// The octet that begins at weight k (a multiple of 8) of a row that begins at word `row`: no byte behind it is read.
template <int BITS, typename P> METAL_FUNC uint2 load_octet(P w, uint row, uint k) {
  if constexpr (BITS == 4) {
    return uint2(w[row + k / 8], 0);
  } else if constexpr (BITS == 8) {
    return load_8_bytes(w + row + k / 4);
  } else {
    auto bytes = bytes_of(w) + 4 * row + k / 8 * BITS;
    uint words[2] = {0, 0};
#pragma clang loop unroll(full)
    for (int i = 0; i < BITS; ++i) {
      words[i / 4] |= uint(bytes[i]) << (8 * (i % 4));
    }
    return octet_of<BITS, 2>(words, 0);
  }
}

// Powers of two that would cost a multiplication a group or, as FP8 has no scales, a weight: the sums take them.
template <int MODE> constexpr float decoded_rest() {
  return MODE == NVFP4 ? 256.0f * decoded_unit<MODE>() : MODE == FP8 ? decoded_unit<MODE>() : 1.0f;
}
