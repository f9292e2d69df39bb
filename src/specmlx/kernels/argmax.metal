// The best of many values and where it is: the larger value, at equal values the smaller index, as mx.argmax has it.
// NaN never wins.

struct Best {
    float value;
    int id;
};

inline Best nothing() {
    Best best;
    best.value = -INFINITY;
    best.id = 0x7fffffff;
    return best;
}

inline bool better(Best a, Best b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

inline void take(thread Best& best, float value, int id) {
    Best other;
    other.value = value;
    other.id = id;
    if (better(other, best)) {
        best = other;
    }
}

// The best of a simdgroup, in every lane.
inline Best simd_best(Best best) {
    for (ushort offset = 1; offset < 32; offset *= 2) {
        take(best, simd_shuffle_xor(best.value, offset), simd_shuffle_xor(best.id, offset));
    }
    return best;
}

// The best of a threadgroup, in every thread; `scratch` has an element for each simdgroup and is free afterwards.
inline Best threadgroup_best(Best best, threadgroup Best* scratch, int lane, int simd, int simds) {
    best = simd_best(best);
    if (lane == 0) {
        scratch[simd] = best;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = nothing();
    if (lane < simds) {
        best = scratch[lane];
    }
    best = simd_best(best);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return best;
}

// W (4 or 1) neighbouring values; four in one load, for rows that are a multiple of four long.
template <int W, typename T>
inline float4 load_values(const device T* at) {
    if (W == 4) {
        const vec<T, 4> four = *(const device vec<T, 4>*)at;
        return float4(float(four.x), float(four.y), float(four.z), float(four.w));
    }
    return float4(float(at[0]), 0, 0, 0);
}
