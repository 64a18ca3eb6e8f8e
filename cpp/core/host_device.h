// PANTILE_HD marks functions that the CPU backend and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define PANTILE_HD __host__ __device__ __forceinline__
#else
#define PANTILE_HD inline
#endif
