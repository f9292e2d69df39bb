// Math: half and bfloat through float; vectors element by element.
#pragma once

namespace metal {

#define MSL_VECTOR1(name)                                 \
  template <typename T, int N>                            \
  METAL_FUNC vec<T, N> name(vec<T, N> x) {                \
    vec<T, N> y;                                          \
    for (int i = 0; i < N; i++) y[i] = name(T(x[i]));     \
    return y;                                             \
  }
#define MSL_VECTOR2(name)                                           \
  template <typename T, int N>                                      \
  METAL_FUNC vec<T, N> name(vec<T, N> x, vec<T, N> z) {             \
    vec<T, N> y;                                                    \
    for (int i = 0; i < N; i++) y[i] = name(T(x[i]), T(z[i]));      \
    return y;                                                       \
  }
#define MSL_MATH1(name, e)                                                                  \
  METAL_FUNC float name(float x) { return e; }                                              \
  METAL_FUNC half name(half h) { float x = h; return half(e); }                              \
  METAL_FUNC bfloat name(bfloat h) { float x = h; return bfloat(e); }                        \
  MSL_VECTOR1(name)
#define MSL_MATH2(name, e)                                                                  \
  METAL_FUNC float name(float x, float y) { return e; }                                     \
  METAL_FUNC half name(half h, half k) { float x = h, y = k; return half(e); }               \
  METAL_FUNC bfloat name(bfloat h, bfloat k) { float x = h, y = k; return bfloat(e); }       \
  MSL_VECTOR2(name)
MSL_MATH1(exp, __builtin_expf(x))
MSL_MATH1(exp2, __builtin_exp2f(x))
MSL_MATH1(exp10, __builtin_exp10f(x))
MSL_MATH1(log, __builtin_logf(x))
MSL_MATH1(log2, __builtin_log2f(x))
MSL_MATH1(log10, __builtin_log10f(x))
MSL_MATH1(sqrt, __builtin_sqrtf(x))
MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_MATH1(sin, __builtin_sinf(x))
MSL_MATH1(cos, __builtin_cosf(x))
MSL_MATH1(tan, __builtin_tanf(x))
MSL_MATH1(asin, __builtin_asinf(x))
MSL_MATH1(acos, __builtin_acosf(x))
MSL_MATH1(atan, __builtin_atanf(x))
MSL_MATH1(sinh, __builtin_sinhf(x))
MSL_MATH1(cosh, __builtin_coshf(x))
MSL_MATH1(tanh, __builtin_tanhf(x))
MSL_MATH1(asinh, __builtin_asinhf(x))
MSL_MATH1(acosh, __builtin_acoshf(x))
MSL_MATH1(atanh, __builtin_atanhf(x))
MSL_MATH1(floor, __builtin_floorf(x))
MSL_MATH1(ceil, __builtin_ceilf(x))
MSL_MATH1(trunc, __builtin_truncf(x))
MSL_MATH1(round, __builtin_roundf(x))
MSL_MATH1(rint, __builtin_rintf(x))
MSL_MATH1(fabs, __builtin_fabsf(x))
MSL_MATH1(fract, x - __builtin_floorf(x))
MSL_MATH1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
MSL_MATH1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_MATH2(fmin, __builtin_fminf(x, y))
MSL_MATH2(fmax, __builtin_fmaxf(x, y))
MSL_MATH2(fmod, __builtin_fmodf(x, y))
MSL_MATH2(pow, __builtin_powf(x, y))
MSL_MATH2(powr, __builtin_powf(x, y))
MSL_MATH2(atan2, __builtin_atan2f(x, y))
MSL_MATH2(copysign, __builtin_copysignf(x, y))
MSL_MATH2(divide, x / y)
MSL_MATH2(fdim, x > y ? x - y : 0.0f)
MSL_MATH2(step, y < x ? 0.0f : 1.0f)

METAL_FUNC float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
METAL_FUNC half fma(half x, half y, half z) { return half(__builtin_fmaf(x, y, z)); }
METAL_FUNC bfloat fma(bfloat x, bfloat y, bfloat z) { return bfloat(__builtin_fmaf(x, y, z)); }
template <typename T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> x, vec<T, N> y, vec<T, N> z) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = fma(T(x[i]), T(y[i]), T(z[i]));
  return r;
}
METAL_FUNC float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
METAL_FUNC half ldexp(half x, int k) { return half(__builtin_ldexpf(x, k)); }
METAL_FUNC bfloat ldexp(bfloat x, int k) { return bfloat(__builtin_ldexpf(x, k)); }
METAL_FUNC bool isnan(float x) { return x != x; }
METAL_FUNC bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
METAL_FUNC bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
METAL_FUNC bool signbit(float x) { return as_type<int>(x) < 0; }

// min, max, abs, clamp: integers and floats, scalars and vectors.
template <typename T, enable_if_t<__is_scalar(T), int> = 0>
METAL_FUNC constexpr T min(T a, T b) {
  if constexpr (is_floating_point_v<T>) return fmin(a, b);
  else return b < a ? b : a;
}
template <typename T, enable_if_t<__is_scalar(T), int> = 0>
METAL_FUNC constexpr T max(T a, T b) {
  if constexpr (is_floating_point_v<T>) return fmax(a, b);
  else return a < b ? b : a;
}
MSL_VECTOR2(min)
MSL_VECTOR2(max)
template <typename T>
METAL_FUNC T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <typename T>
METAL_FUNC T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <typename T, enable_if_t<__is_scalar(T), int> = 0>
METAL_FUNC constexpr T abs(T x) {
  if constexpr (is_floating_point_v<T>) return fabs(x);
  else return x < T(0) ? T(-x) : x;
}
MSL_VECTOR1(abs)
template <typename T>
METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T>
METAL_FUNC T mix(T x, T y, T a) { return x + (y - x) * a; }
template <typename T, enable_if_t<__is_scalar(T), int> = 0>
METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
template <typename T, int N, typename C>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <typename T, int N>
METAL_FUNC bool any(vec<T, N> x) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || x[i];
  return r;
}
template <typename T, int N>
METAL_FUNC bool all(vec<T, N> x) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && x[i];
  return r;
}
template <typename T, int N>
METAL_FUNC T dot(vec<T, N> x, vec<T, N> y) {
  T r = x[0] * y[0];
  for (int i = 1; i < N; i++) r = fma(T(x[i]), T(y[i]), r);
  return r;
}
template <typename T, int N>
METAL_FUNC T length(vec<T, N> x) { return sqrt(dot(x, x)); }

// Bits.
template <typename T>
METAL_FUNC T popcount(T x) { return T(__builtin_popcountl(as_type<make_unsigned_t<T>>(x))); }
template <typename T>
METAL_FUNC T clz(T x) { return x ? T(__builtin_clzl(as_type<make_unsigned_t<T>>(x)) - (64 - 8 * int(sizeof(T)))) : T(8 * sizeof(T)); }
template <typename T>
METAL_FUNC T ctz(T x) { return x ? T(__builtin_ctzl(as_type<make_unsigned_t<T>>(x))) : T(8 * sizeof(T)); }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
template <typename T>
METAL_FUNC T extract_bits(T x, uint offset, uint bits) {
  return bits == 0 ? T(0) : T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits));
}
template <typename T>
METAL_FUNC T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = T((bits >= 8 * sizeof(T) ? T(~T(0)) : T((T(1) << bits) - 1)) << offset);
  return T((base & ~mask) | (T(insert << offset) & mask));
}
METAL_FUNC uint mulhi(uint x, uint y) { return uint((ulong(x) * y) >> 32); }
METAL_FUNC uint rotate(uint x, uint n) { return (x << (n & 31)) | (x >> (-n & 31)); }

namespace fast {
using metal::cos, metal::divide, metal::exp, metal::exp2, metal::fma, metal::log, metal::log2, metal::log10, metal::pow,
    metal::rsqrt, metal::sin, metal::sqrt, metal::tan, metal::tanh, metal::fmax, metal::fmin, metal::max, metal::min,
    metal::clamp, metal::exp10, metal::powr, metal::abs, metal::fabs;
}
namespace precise {
using namespace metal::fast;
}

}  // namespace metal
