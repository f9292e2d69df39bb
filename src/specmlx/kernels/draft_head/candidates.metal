// A simdgroup's K <= 32 best of what it has seen, best first: lane i < K holds the i-th.

inline Best shuffled(Best best, ushort lane) {
    Best other;
    other.value = simd_shuffle(best.value, lane);
    other.id = simd_shuffle(best.id, lane);
    return other;
}

// Take in one value from every lane; `least` is the K-th best so far. Few get past it, so the list takes them one at a
// time.
template <int K>
inline void offer(thread Best& list, thread Best& least, Best mine, int lane) {
    while (simd_any(better(mine, least))) {
        const int from = simd_min(better(mine, least) ? lane : 32);
        const Best next = shuffled(mine, ushort(from));
        if (lane == from) {
            mine = nothing();
        }
        const Best above = shuffled(list, ushort(max(lane - 1, 0)));
        if (!better(list, next)) {
            list = lane == 0 || better(above, next) ? next : above;
        }
        least = shuffled(list, K - 1);
    }
}
