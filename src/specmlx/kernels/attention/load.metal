// Loads and decoding of keys and values, and one step of the 8 x 8 matrix unit, in registers.

template <int BYTES>
struct Words {
    uint at[(BYTES + 3) / 4];
};

enum Format {
    PLAIN = 0,   // T as it is
    INT8 = 1,    // one scale for a token and head: it is applied to the score, or to the value's weight
    AFFINE = 2,  // mlx's layout: low bits first, a scale and a bias for GROUP elements along the head
};

// The absolute position where chunk c begins, whatever rows and keys a call has: a position's result does not depend on
// them. Later chunks are longer, since there are enough of them by then.
inline int chunk_start(int c, int size, int many, int rest) {
    return c < many ? c * size : many * size + (c - many) * rest;
}

inline int chunk_of(int position, int size, int many, int rest) {
    return position < many * size ? position / size : many + (position - many * size) / rest;
}

// Whether the row at a position sees a key: causally, in a window if there is one, and not before FIRST but itself.
template <int FIRST, int WINDOW>
inline bool sees(int position, int key) {
    return key <= position && (key >= FIRST || key == position) && (WINDOW == 0 || position - key < WINDOW);
}

// BYTES from an address that is a multiple of them (of 16 where there are more), in one load of at most 16 bytes each.
template <int BYTES>
inline Words<BYTES> load_words(const device uchar* address) {
    Words<BYTES> words;
    if (BYTES >= 16) {
        MLX_MTL_PRAGMA_UNROLL
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 four = ((const device uint4*)address)[i];
            words.at[4 * i] = four.x;
            words.at[4 * i + 1] = four.y;
            words.at[4 * i + 2] = four.z;
            words.at[4 * i + 3] = four.w;
        }
    } else if (BYTES == 8) {
        const uint2 two = *(const device uint2*)address;
        words.at[0] = two.x;
        words.at[1] = two.y;
    } else if (BYTES == 4) {
        words.at[0] = *(const device uint*)address;
    } else {
        words.at[0] = *(const device ushort*)address;
    }
    return words;
}

inline float as_float(uint bits, float) { return as_type<float>(bits); }
inline float as_float(uint bits, half) { return float(as_type<half>(ushort(bits))); }
inline float as_float(uint bits, bfloat) { return float(as_type<bfloat>(ushort(bits))); }

// Element i of what `load_words` read; a code of the affine format still lacks its scale and bias.
template <int FORMAT, int BITS, typename T, int BYTES>
inline float element(thread const Words<BYTES>& words, int i) {
    const uint bits = words.at[i * BITS / 32] >> (i * BITS % 32);
    if (FORMAT == PLAIN) {
        return as_float(bits, T(0));
    }
    if (FORMAT == INT8) {
        return float(int(bits << 24) >> 24);
    }
    return float(bits & ((1u << (BITS % 32)) - 1));
}

// sum += A B on 8 x 8 matrices, of which a lane holds the two elements (row, column) and (row, column + 1).
inline void multiply_add(thread float2& sum, float2 a, float2 b) {
    simdgroup_matrix<float, 8, 8> A, B, C;
    reinterpret_cast<thread float2&>(A.thread_elements()) = a;
    reinterpret_cast<thread float2&>(B.thread_elements()) = b;
    reinterpret_cast<thread float2&>(C.thread_elements()) = sum;
    simdgroup_multiply_accumulate(C, A, B, C);
    sum = reinterpret_cast<thread float2&>(C.thread_elements());
}
