// Barriers, and operations that meet in the lanes of a simdgroup.
#pragma once

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3 };
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags f) { msl_barrier(uint(f), MSL_SITE); }
METAL_FUNC void simdgroup_barrier(mem_flags f) { msl_meet(nullptr, 0, MSL_SITE, 0, uint(f)); }

typedef ulong simd_vote_t;
class simd_vote {
  ulong v;

 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(ulong v = 0) : v(v) {}
  explicit constexpr operator ulong() const { return v; }
  bool all() const { return v == 0xffffffff; }
  bool any() const { return v != 0; }
};

template <typename T>
METAL_FUNC T msl_exchange(T mine, uint from, uint site) {
  msl_meet(&mine, sizeof(T), site, 0, 0);
  if (from >= 32 || !(msl_active() >> from & 1)) {
    msl_bad_shuffle(site);
    return mine;
  }
  return *(const thread T*)msl_box(from);
}
// The same for all lanes: the first one to come computes it.  Lanes are folded in pairs, quads, ... (a fixed tree).
template <typename T, typename F>
METAL_FUNC T msl_reduce(T mine, F f, T neutral, uint site) {
  msl_meet(&mine, sizeof(T), site, 0, 0);
  bool first;
  thread T* result = (thread T*)msl_result(&first);
  if (first) {
    T part[32];
    for (uint i = 0; i < 32; i++) part[i] = msl_active() >> i & 1 ? *(const thread T*)msl_box(i) : neutral;
    for (uint step = 1; step < 32; step *= 2)
      for (uint i = 0; i < 32; i += 2 * step) part[i] = f(part[i], part[i + step]);
    *result = part[0];
  }
  return *result;
}
template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane) { return msl_exchange(x, lane, MSL_SITE); }
template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) { return msl_exchange(x, msl_lane() ^ mask, MSL_SITE); }
template <typename T>
METAL_FUNC T simd_shuffle_down(T x, ushort d) {
  uint lane = msl_lane();
  return msl_exchange(x, lane + d < 32 ? lane + d : lane, MSL_SITE);
}
template <typename T>
METAL_FUNC T simd_shuffle_up(T x, ushort d) {
  uint lane = msl_lane();
  return msl_exchange(x, lane >= d ? lane - d : lane, MSL_SITE);
}
template <typename T>
METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort d) {
  uint lane = msl_lane();
  T y = msl_exchange(x, lane + d < 32 ? lane + d : lane, MSL_SITE), z = msl_exchange(fill, (lane + d) % 32, MSL_SITE);
  return lane + d < 32 ? y : z;
}
template <typename T>
METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort d) {
  uint lane = msl_lane();
  T y = msl_exchange(x, lane >= d ? lane - d : lane, MSL_SITE), z = msl_exchange(fill, (lane - d) % 32, MSL_SITE);
  return lane >= d ? y : z;
}
template <typename T>
METAL_FUNC T simd_shuffle_rotate_down(T x, ushort d) { return msl_exchange(x, (msl_lane() + d) % 32, MSL_SITE); }
template <typename T>
METAL_FUNC T simd_shuffle_rotate_up(T x, ushort d) { return msl_exchange(x, (msl_lane() - d) % 32, MSL_SITE); }
template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane) { return msl_exchange(x, lane, MSL_SITE); }
template <typename T>
METAL_FUNC T simd_broadcast_first(T x) {
  msl_meet(&x, sizeof(T), MSL_SITE, 0, 0);
  return *(const thread T*)msl_box(uint(__builtin_ctz(msl_active())));
}
#define MSL_REDUCE(name, neutral, e)                                                  \
  template <typename T>                                                               \
  METAL_FUNC T simd_##name(T x) {                                                     \
    return msl_reduce(x, [](T a, T b) -> T { return e; }, T(neutral), MSL_SITE);      \
  }                                                                                   \
  template <typename T>                                                               \
  METAL_FUNC T quad_##name(T x) {                                                     \
    auto f = [](T a, T b) -> T { return e; };                                         \
    x = f(x, simd_shuffle_xor(x, 1));                                                 \
    return f(x, simd_shuffle_xor(x, 2));                                              \
  }
MSL_REDUCE(sum, 0, a + b)
MSL_REDUCE(product, 1, a * b)
MSL_REDUCE(min, numeric_limits<T>::max(), min(a, b))
MSL_REDUCE(max, numeric_limits<T>::lowest(), max(a, b))
MSL_REDUCE(and, ~T(0), a & b)
MSL_REDUCE(or, 0, a | b)
MSL_REDUCE(xor, 0, a ^ b)
template <typename T>
METAL_FUNC T simd_prefix_inclusive_sum(T x) {
  msl_meet(&x, sizeof(T), MSL_SITE, 0, 0);
  T sum = T(0);
  for (uint i = 0; i <= msl_lane(); i++)
    if (msl_active() >> i & 1) sum = T(sum + *(const thread T*)msl_box(i));
  return sum;
}
template <typename T>
METAL_FUNC T simd_prefix_exclusive_sum(T x) {
  msl_meet(&x, sizeof(T), MSL_SITE, 0, 0);
  T sum = T(0);
  for (uint i = 0; i < msl_lane(); i++)
    if (msl_active() >> i & 1) sum = T(sum + *(const thread T*)msl_box(i));
  return sum;
}
METAL_FUNC simd_vote simd_ballot(bool x) {
  uint bit = uint(x) << msl_lane();
  return simd_vote(msl_reduce(bit, [](uint a, uint b) -> uint { return a | b; }, 0u, MSL_SITE));
}
METAL_FUNC bool simd_any(bool x) { return msl_reduce(uint(x), [](uint a, uint b) -> uint { return a | b; }, 0u, MSL_SITE); }
METAL_FUNC bool simd_all(bool x) { return msl_reduce(uint(x), [](uint a, uint b) -> uint { return a & b; }, 1u, MSL_SITE); }
METAL_FUNC bool simd_is_first() {
  msl_meet(nullptr, 0, MSL_SITE, 0, 0);
  return uint(__builtin_ctz(msl_active())) == msl_lane();
}
template <typename T>
METAL_FUNC T quad_shuffle(T x, ushort lane) { return msl_exchange(x, (msl_lane() & ~3u) + lane, MSL_SITE); }
template <typename T>
METAL_FUNC T quad_broadcast(T x, ushort lane) { return msl_exchange(x, (msl_lane() & ~3u) + lane, MSL_SITE); }
template <typename T>
METAL_FUNC T quad_shuffle_xor(T x, ushort mask) { return msl_exchange(x, msl_lane() ^ mask, MSL_SITE); }
template <typename T>
METAL_FUNC T quad_shuffle_down(T x, ushort d) {
  uint lane = msl_lane();
  return msl_exchange(x, lane % 4 + d < 4 ? lane + d : lane, MSL_SITE);
}
template <typename T>
METAL_FUNC T quad_shuffle_up(T x, ushort d) {
  uint lane = msl_lane();
  return msl_exchange(x, lane % 4 >= d ? lane - d : lane, MSL_SITE);
}

}  // namespace metal
