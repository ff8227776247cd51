// Vectors of scalar_t as they are kept while others are loaded.
//
// Elements of two bytes that are kept one by one take a register each; as words they share.
#pragma once

#include "common/types.cuh"

template <int kWidth>
struct Packed {
  Vec<scalar_t, kWidth> v;
};
template <>
struct Packed<kVec> {
  Vec<uint32_t, kVecBytes / 4> v;
};

template <int kWidth>
__device__ __forceinline__ Packed<kWidth> load_packed(const scalar_t* p) {
  return *reinterpret_cast<const Packed<kWidth>*>(p);
}

template <int kWidth>
__device__ __forceinline__ Packed<kWidth> pack(const Vec<scalar_t, kWidth>& x) {
  return reinterpret_cast<const Packed<kWidth>&>(x);
}

template <int kWidth>
__device__ __forceinline__ Vec<scalar_t, kWidth> unpack(const Packed<kWidth>& x) {
  return reinterpret_cast<const Vec<scalar_t, kWidth>&>(x);
}

// As store_vec; with `is_streamed` L2 gives the line up first: for results larger than L2, which
// would push out what is read next and be pushed out themselves before anyone reads them.
template <typename T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& x, bool is_streamed) {
  if constexpr (sizeof(x) == kVecBytes) {
    if (is_streamed) {
      __stcs(reinterpret_cast<int4*>(p), reinterpret_cast<const int4&>(x));
      return;
    }
  }
  store_vec(p, x);
}

// As load_packed; with `is_streamed` as store_vec above, for what is not read again.
template <int kWidth>
__device__ __forceinline__ Packed<kWidth> load_packed(const scalar_t* p, bool is_streamed) {
  if constexpr (kWidth == kVec) {
    if (is_streamed) {
      const int4 x = __ldcs(reinterpret_cast<const int4*>(p));
      return reinterpret_cast<const Packed<kWidth>&>(x);
    }
  }
  return load_packed<kWidth>(p);
}
