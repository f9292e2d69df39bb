// 8 x 8 matrices: lane l holds row (l/4 & 4) + l/2 % 4 and two columns from (l/4 & 2) * 2 + l % 2 * 2.
#pragma once

namespace metal {

METAL_FUNC ushort msl_row() { return ushort(((msl_lane() / 4) & 4) + (msl_lane() / 2) % 4); }
METAL_FUNC ushort msl_column() { return ushort(((msl_lane() / 4) & 2) * 2 + (msl_lane() % 2) * 2); }
template <typename T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup matrices are 8 x 8");
  vec<T, 2> e;
  simdgroup_matrix() thread {}
  explicit simdgroup_matrix(T d) thread {
    e[0] = msl_row() == msl_column() ? d : T(0);
    e[1] = msl_row() == msl_column() + 1 ? d : T(0);
  }
  thread vec<T, 2>& thread_elements() thread { return e; }
  const thread vec<T, 2>& thread_elements() const thread { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> m;
  m.e = (vec<T, 2>)(x, x);
  return m;
}
#define MSL_LOAD(space)                                                                                          \
  template <typename T>                                                                                          \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p, ulong row = 8,           \
                                 ulong2 origin = 0, bool transpose = false) {                                    \
    msl_meet(nullptr, 0, MSL_SITE, 1, 0);                                                                        \
    for (ushort i = 0; i < 2; i++) {                                                                             \
      ulong r = transpose ? msl_column() + i : msl_row(), c = transpose ? msl_row() : msl_column() + i;          \
      m.e[i] = p[(origin.y + r) * row + origin.x + c];                                                           \
    }                                                                                                            \
  }
#define MSL_STORE(space)                                                                                         \
  template <typename T>                                                                                          \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* p, ulong row = 8, ulong2 origin = 0,     \
                                  bool transpose = false) {                                                      \
    msl_meet(nullptr, 0, MSL_SITE, 1, 0);                                                                        \
    for (ushort i = 0; i < 2; i++) {                                                                             \
      ulong r = transpose ? msl_column() + i : msl_row(), c = transpose ? msl_row() : msl_column() + i;          \
      p[(origin.y + r) * row + origin.x + c] = m.e[i];                                                           \
    }                                                                                                            \
  }
MSL_LOAD(device)
MSL_LOAD(threadgroup)
MSL_LOAD(constant)
MSL_STORE(device)
MSL_STORE(threadgroup)
template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                                              thread simdgroup_matrix<B, 8, 8>& b, thread simdgroup_matrix<C, 8, 8>& c) {
  float mine[6] = {float(a.e[0]), float(a.e[1]), float(b.e[0]), float(b.e[1]), float(c.e[0]), float(c.e[1])}, r[2];
  msl_matrix(mine, r, MSL_SITE);
  d.e[0] = D(r[0]), d.e[1] = D(r[1]);
}
template <typename D, typename A, typename B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                                   thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero);
}

}  // namespace metal
