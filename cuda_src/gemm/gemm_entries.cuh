// Entry points of gemm.cu and rmsnorm_gemm.cu: the same kernels without and with a norm before the
// product. choose_config in engine/kernels/gemm/config.py selects one of them.
#pragma once

#include "gemm/gemm_tile.cuh"
#include "gemm/gemv.cuh"
#include "gemm/resident_rows.cuh"
#include "gemm/skinny_direct.cuh"
#include "gemm/skinny_ring.cuh"

// `...` is the device function template with its arguments; its parameter is the Problem.
#define ENGINE_GEMM_ENTRY(name, threads, min_blocks, ...)           \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ GemmParams p) {                  \
    __VA_ARGS__(make_problem(p));                                   \
  }

// `...` is the device function template with its arguments; its parameter is SkinnyParams.
#define ENGINE_SKINNY_ENTRY(name, threads, min_blocks, ...)         \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ SkinnyParams p) {                \
    __VA_ARGS__(p);                                                 \
  }

// Define every entry point of an op: ENGINE_GEMM_ENTRIES(op, norm), ENGINE_SKINNY_ENTRIES(op,
// norm).
#if ENGINE_DTYPE != 0
#include "gemm/gemm_entries_mma.cuh"
#else
#include "gemm/gemm_entries_simt.cuh"
#endif
