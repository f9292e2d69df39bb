// For the generated entry point.
#pragma once

template <typename T>
METAL_FUNC T msl_attribute(const thread uint* at) {
  if constexpr (metal::msl_vec<T>::n) {
    T v;
    for (int i = 0; i < metal::msl_vec<T>::n; i++) v[i] = at[i];
    return v;
  } else {
    return T(at[0]);
  }
}
struct msl_pointer {
  ulong at;
  template <typename T>
  operator device T*() const { return (device T*)at; }
  template <typename T>
  operator constant T*() const { return (constant T*)at; }
};
struct msl_reference {
  ulong at;
  template <typename T>
  operator constant T&() const { return *(constant T*)at; }
  template <typename T>
  operator device T&() const { return *(device T*)at; }
};
template <typename T, int variable>
METAL_FUNC threadgroup T& msl_variable() {
  return *(threadgroup T*)msl_threadgroup(sizeof(T), alignof(T), variable);
}
