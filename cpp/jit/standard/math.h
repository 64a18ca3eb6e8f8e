// The functions are built into NVRTC; see cstdint.
