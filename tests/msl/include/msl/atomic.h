// Atomics: fibres never interrupt each other, so a read and a write are one step.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4, "atomics have 32 bits");
  T v;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
#define MSL_ATOMIC(space, cv)                                                                                   \
  template <typename T>                                                                                         \
  METAL_FUNC T atomic_load_explicit(const cv space atomic<T>* p, memory_order) {                                \
    msl_atomic(p, 4);                                                                                           \
    return as_type<T>(msl_atomic_get(p));                                                                       \
  }                                                                                                             \
  template <typename T>                                                                                         \
  METAL_FUNC T atomic_exchange_explicit(cv space atomic<T>* p, T x, memory_order) {                             \
    msl_atomic(p, 4);                                                                                           \
    T old = as_type<T>(msl_atomic_get(p));                                                                      \
    msl_atomic_set(p, as_type<uint>(x));                                                                        \
    return old;                                                                                                 \
  }                                                                                                             \
  template <typename T>                                                                                         \
  METAL_FUNC void atomic_store_explicit(cv space atomic<T>* p, T x, memory_order o) {                           \
    atomic_exchange_explicit(p, x, o);                                                                          \
  }                                                                                                             \
  template <typename T>                                                                                         \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(cv space atomic<T>* p, thread T* want, T x,             \
                                                        memory_order o, memory_order) {                         \
    T old = atomic_load_explicit(p, o);                                                                         \
    bool same = as_type<uint>(old) == as_type<uint>(*want);                                                     \
    if (same) msl_atomic_set(p, as_type<uint>(x));                                                              \
    *want = old;                                                                                                \
    return same;                                                                                                \
  }                                                                                                             \
  MSL_FETCH(space, cv, add, old + x)                                                                            \
  MSL_FETCH(space, cv, sub, old - x)                                                                            \
  MSL_FETCH(space, cv, min, min(old, x))                                                                        \
  MSL_FETCH(space, cv, max, max(old, x))                                                                        \
  MSL_FETCH(space, cv, or, old | x)                                                                             \
  MSL_FETCH(space, cv, and, old & x)                                                                            \
  MSL_FETCH(space, cv, xor, old ^ x)
#define MSL_FETCH(space, cv, name, e)                                                                           \
  template <typename T, typename U>                                                                             \
  METAL_FUNC T atomic_fetch_##name##_explicit(cv space atomic<T>* p, U u, memory_order o) {                     \
    T x = T(u), old = atomic_load_explicit(p, o);                                                               \
    msl_atomic_set(p, as_type<uint>(T(e)));                                                                     \
    return old;                                                                                                 \
  }
MSL_ATOMIC(device, volatile)
MSL_ATOMIC(threadgroup, volatile)

}  // namespace metal
