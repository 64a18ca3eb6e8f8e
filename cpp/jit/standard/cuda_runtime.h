// What kernels use of the CUDA runtime is built into NVRTC; see cstdint.
