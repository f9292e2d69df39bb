// One row of the gated delta rule on a lane's part of S. Rows that are run and rows that are folded in later both
// come through here, and every multiply-add is an explicit fma, so that no compiler rounds the two differently.
//
// Eight lanes share a row of S (one Dv index): lane j holds the elements 32 c + 4 j .. + 3 of it, c < CHUNKS.
// A load of four such rows by a simdgroup covers four whole 128-byte lines.

template <int CHUNKS>
struct Part {
    float4 at[CHUNKS];
};

// The sum over the eight lanes of a row, in one fixed order; all eight get the same bits.
inline float row_sum(float x) {
    x += simd_shuffle_xor(x, 1);
    x += simd_shuffle_xor(x, 2);
    return x + simd_shuffle_xor(x, 4);
}

template <int CHUNKS>
inline float row_dot(thread const Part<CHUNKS>& s, thread const Part<CHUNKS>& x) {
    float sum = 0;
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        sum = fma(s.at[c].x, x.at[c].x, sum);
        sum = fma(s.at[c].y, x.at[c].y, sum);
        sum = fma(s.at[c].z, x.at[c].z, sum);
        sum = fma(s.at[c].w, x.at[c].w, sum);
    }
    return row_sum(sum);
}

// S <- g S, delta = (v - S k) beta unless it is GIVEN by a tape, S <- S + delta kT; returns delta.
template <int CHUNKS, bool GIVEN>
inline float delta_step(
    thread Part<CHUNKS>& s, thread const Part<CHUNKS>& k, float g, float v_or_delta, float beta) {
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        s.at[c] = s.at[c] * g;
    }
    const float delta = GIVEN ? v_or_delta : (v_or_delta - row_dot<CHUNKS>(s, k)) * beta;
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        s.at[c] = fma(k.at[c], float4(delta, delta, delta, delta), s.at[c]);
    }
    return delta;
}

// A lane's part of a row of k or q: the four rows of a simdgroup read the same 32 CHUNKS values.
template <int CHUNKS, typename T>
inline void load_row(const device T* row, int j, thread Part<CHUNKS>& x) {
    const device vec<T, 4>* parts = (const device vec<T, 4>*)row;
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        const vec<T, 4> part = parts[8 * c + j];
        x.at[c] = float4(float(part.x), float(part.y), float(part.z), float(part.w));
    }
}
