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
