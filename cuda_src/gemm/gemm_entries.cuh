// The entry points of gemm.cu and rmsnorm_gemm.cu: the same kernels without and with a norm before
// the product. choose_config in engine/kernels/gemm/config.py chooses among them.
#pragma once

#include "gemm/gemm_tile.cuh"
#include "gemm/gemv.cuh"
#include "gemm/skinny_direct.cuh"
#include "gemm/skinny_ring.cuh"

// `...` is the device function: `function<...>(problem)`.
#define ENGINE_GEMM_ENTRY(name, threads, min_blocks, ...)           \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ GemmParams p) {                  \
    __VA_ARGS__(make_problem(p));                                   \
  }

// `...` is the device function: `function<...>(params)`.
#define ENGINE_SKINNY_ENTRY(name, threads, min_blocks, ...)         \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ SkinnyParams p) {                \
    __VA_ARGS__(p);                                                 \
  }

// ENGINE_GEMM_ENTRIES(op, norm) and ENGINE_SKINNY_ENTRIES(op, norm): every entry point of an op.
#if ENGINE_DTYPE != 0
#include "gemm/gemm_entries_mma.cuh"
#else
#include "gemm/gemm_entries_simt.cuh"
#endif
