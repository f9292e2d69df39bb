// Types, what the runtime offers, type traits, casts and constructors.
#pragma once

#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL__ 1
#define __METAL_VERSION__ 310
#define MSL_SITE 0x5eed517e  // instrument.py puts the call's own number here
#define MSL_EACH_INT(F) F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong)
#define MSL_EACH(F) MSL_EACH_INT(F) F(half) F(bfloat) F(float)

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __bf16 bfloat;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;

#define MSL_VECTORS(T)                               \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_EACH(MSL_VECTORS)
typedef int bool2 __attribute__((ext_vector_type(2)));
typedef int bool3 __attribute__((ext_vector_type(3)));
typedef int bool4 __attribute__((ext_vector_type(4)));

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define HALF_MAX 65504.0h
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159274101257324219f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LN2_F 0.69314718246459960938f
#define M_SQRT2_F 1.41421353816986083984f

extern "C" {
void msl_meet(const __private void* mine, uint size, uint site, uint needs, uint flags);
uint msl_active(void);
uint msl_lane(void);
const __private void* msl_box(uint lane);
__private void* msl_result(__private bool* first);
void msl_bad_shuffle(uint site);
void msl_matrix(const __private float* mine, __private float* d, uint site);
void msl_barrier(uint flags, uint site);
__local void* msl_threadgroup(ulong size, ulong align, uint variable);
void msl_atomic(const volatile void* p, uint size);
uint msl_atomic_get(const volatile void* p);
void msl_atomic_set(volatile void* p, uint v);
void msl_escape(const void* p);
}

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// ---- Type traits ----
template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <typename A, typename B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <typename A, typename B>
constexpr constant bool is_same_v = __is_same(A, B);
template <typename A, typename B>
constexpr constant bool is_convertible_v = __is_convertible(A, B);
template <typename A, typename B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename U>
struct conditional {
  using type = T;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  using type = U;
};
template <bool B, typename T, typename U>
using conditional_t = typename conditional<B, T, U>::type;
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
struct msl_bare {
  using type = T;
};
#define MSL_BARE(space)          \
  template <typename T>          \
  struct msl_bare<space T> {     \
    using type = T;              \
  };
MSL_BARE(device)
MSL_BARE(constant)
MSL_BARE(threadgroup)
MSL_BARE(thread)
template <typename T>
using remove_addrspace_t = __remove_cv(typename msl_bare<__remove_reference_t(T)>::type);
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
constexpr constant bool is_integral_v = __is_integral(T);
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
constexpr constant bool is_floating_point_v = __is_floating_point(T) || __is_same(T, bfloat);
template <typename T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T>
constexpr constant bool is_unsigned_v = __is_unsigned(T);
template <typename T>
constexpr constant bool is_signed_v = __is_signed(T);
template <typename T>
struct make_unsigned {
  using type = __make_unsigned(T);
};
template <typename T>
using make_unsigned_t = __make_unsigned(T);
template <typename T>
struct msl_vec {
  static constexpr constant int n = 0;
};
template <typename T, int N>
struct msl_vec<vec<T, N>> {
  static constexpr constant int n = N;
  using type = T;
};

template <typename T>
struct numeric_limits {
  static constexpr T max() { return T(__is_signed(T) ? ~(1ul << (8 * sizeof(T) - 1)) & (~0ul >> (64 - 8 * sizeof(T))) : ~0ul); }
  static constexpr T min() { return __is_signed(T) ? T(1ul << (8 * sizeof(T) - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};
#define MSL_LIMITS(T, MAX, MIN, EPS)                              \
  template <>                                                     \
  struct numeric_limits<T> {                                      \
    static constexpr T max() { return T(MAX); }                   \
    static constexpr T min() { return T(MIN); }                   \
    static constexpr T lowest() { return T(-(MAX)); }             \
    static constexpr T epsilon() { return T(EPS); }               \
    static constexpr T infinity() { return T(__builtin_inff()); } \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } \
  };
MSL_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
MSL_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
MSL_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)

// ---- Casts and constructors ----
template <typename To, typename From>
METAL_FUNC constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, x);
}
// static_cast<To>(x), which between vectors converts every element (rewrite.py calls it).
template <typename To, typename From>
METAL_FUNC constexpr To msl_cast(From x) {
  if constexpr (msl_vec<To>::n && msl_vec<From>::n) return __builtin_convertvector(x, To);
  else if constexpr (is_floating_point_v<To> && is_floating_point_v<From>) return (To)(float)x;  // clang knows no half to bfloat
  else return (To)x;
}
template <typename V, typename E, typename A>
METAL_FUNC void msl_fill(V thread& v, int thread& at, A a) {
  if constexpr (msl_vec<A>::n) {
    for (int i = 0; i < msl_vec<A>::n; i++) v[at++] = static_cast<E>(a[i]);
  } else {
    v[at++] = static_cast<E>(a);
  }
}
// float4(a, b, ...), where arguments may be vectors and one scalar fills all (rewrite.py calls it). Not constexpr:
// clang 22 crashes on writes to elements of a constant vector.
template <typename V, typename... A>
METAL_FUNC V msl_make(A... a) {
  using E = typename msl_vec<V>::type;
  if constexpr (sizeof...(A) == 0) {
    return V{};
  } else if constexpr (sizeof...(A) == 1 && (msl_vec<A>::n + ...) == 0) {
    V v;
    for (int i = 0; i < msl_vec<V>::n; i++) v[i] = (static_cast<E>(a), ...);
    return v;
  } else {
    V v;
    int at = 0;
    (msl_fill<V, E>(v, at, a), ...);
    return v;
  }
}

#define MSL_PACKED(T)                                                            \
  template <int N>                                                               \
  struct msl_packed_##T {                                                        \
    T v[N];                                                                      \
    msl_packed_##T() {}                                                          \
    msl_packed_##T(vec<T, N> x) { for (int i = 0; i < N; i++) v[i] = x[i]; }      \
    operator vec<T, N>() const {                                                 \
      vec<T, N> x;                                                               \
      for (int i = 0; i < N; i++) x[i] = v[i];                                   \
      return x;                                                                  \
    }                                                                            \
  };                                                                             \
  typedef msl_packed_##T<2> packed_##T##2;                                       \
  typedef msl_packed_##T<3> packed_##T##3;                                       \
  typedef msl_packed_##T<4> packed_##T##4;
MSL_EACH(MSL_PACKED)

}  // namespace metal
