// Vectors of scalar_t that stay in registers while other loads are in flight.
//
// As single elements, 16-bit values would occupy one register each; as 32-bit words, two share one.
//
// Public: sm_80 up.
#pragma once

#include "common/types.cuh"

// kWidth values of scalar_t, as 32-bit words if they fill 16 bytes.
template <int kWidth>
struct Packed {
  Vec<scalar_t, kWidth> v;
};
template <>
struct Packed<kVec> {
  Vec<uint32_t, kVecBytes / 4> v;
};

// Loads kWidth values in one access; `p` must be aligned to it.
template <int kWidth>
__device__ __forceinline__ Packed<kWidth> load_packed(const scalar_t* p) {
  return *reinterpret_cast<const Packed<kWidth>*>(p);
}

// Stores kWidth values in one access; `p` must be aligned to it. The compiler may split a store_vec
// of 16-bit values into four.
template <int kWidth>
__device__ __forceinline__ void store_packed(scalar_t* p, const Packed<kWidth>& x) {
  if constexpr (kWidth == kVec) {
    __stwb(reinterpret_cast<int4*>(p), reinterpret_cast<const int4&>(x));
  } else {
    *reinterpret_cast<Packed<kWidth>*>(p) = x;
  }
}

// Converts from and to a vector; the values stay in their registers.
template <int kWidth>
__device__ __forceinline__ Packed<kWidth> pack(const Vec<scalar_t, kWidth>& x) {
  return reinterpret_cast<const Packed<kWidth>&>(x);
}
template <int kWidth>
__device__ __forceinline__ Vec<scalar_t, kWidth> unpack(const Packed<kWidth>& x) {
  return reinterpret_cast<const Vec<scalar_t, kWidth>&>(x);
}

// store_vec; `is_streamed` marks the line evict-first in L2. Use it for results larger than L2:
// they would evict the inputs to be read next, and be evicted themselves before they are read.
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

// load_packed; `is_streamed` marks the line, which is not read again, evict-first in L2.
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
