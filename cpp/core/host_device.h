// PANTILE_HD marks functions that the CPU backend and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define PANTILE_HD __host__ __device__ __forceinline__
#elif defined(PANTILE_ISA)
// Code for one CPU instruction set must leave no copy behind that the linker could pick for others.
#define PANTILE_HD inline __attribute__((always_inline))
#else
#define PANTILE_HD inline
#endif
