// PANTILE_HD marks functions that the CPU backend and the CUDA kernels share.
//
// PANTILE_HD_ANY_CALLABLE stands before a shared template that calls a parameter: the callable may
// then be for one side only, such as a kernel's MUFU exponential, without nvcc warning that the
// template's other side could not call it.
#pragma once

#if defined(__CUDACC__)
#define PANTILE_HD __host__ __device__ __forceinline__
#define PANTILE_HD_ANY_CALLABLE _Pragma("nv_exec_check_disable")
#else
#define PANTILE_HD_ANY_CALLABLE
#if defined(PANTILE_ISA)
// Code for one CPU instruction set must leave no copy behind that the linker could pick for others.
#define PANTILE_HD inline __attribute__((always_inline))
#else
#define PANTILE_HD inline
#endif
#endif
