// The token before a slot, the best of the last slot's segments, in every lane. Before slot 0 that is the anchor alone.
template <typename P, typename Q>
inline int chosen(P values, Q ids, int b, int segments, int V, int lane) {
    Best best = nothing();
    for (int i = lane; i < segments; i += 32) {
        take(best, values[b * segments + i], ids[b * segments + i]);
    }
    return clamp(simd_best(best).id, 0, V - 1);
}

// Eight neighbouring weights: 16 bytes in one load where they are 16-bit.
template <typename T>
inline void load_eight(const device T* at, thread float4& low, thread float4& high) {
    low = load_values<4>(at);
    high = load_values<4>(at + 4);
}

inline void load_eight(const device bfloat* at, thread float4& low, thread float4& high) {
    const uint4 words = *(const device uint4*)at;
    const uint4 even = words << 16, odd = words & 0xffff0000u;
    low = float4(as_type<float>(even.x), as_type<float>(odd.x), as_type<float>(even.y), as_type<float>(odd.y));
    high = float4(as_type<float>(even.z), as_type<float>(odd.z), as_type<float>(even.w), as_type<float>(odd.w));
}

inline void load_eight(const device half* at, thread float4& low, thread float4& high) {
    const uint4 words = *(const device uint4*)at;
    const half2 a = as_type<half2>(words.x), b = as_type<half2>(words.y);
    const half2 c = as_type<half2>(words.z), d = as_type<half2>(words.w);
    low = float4(float(a.x), float(a.y), float(b.x), float(b.y));
    high = float4(float(c.x), float(c.y), float(d.x), float(d.y));
}
