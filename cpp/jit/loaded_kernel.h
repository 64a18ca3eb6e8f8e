// What launchers see of a kernel that was compiled at run time. Every .cu reads this file, so it
// includes no standard header with code: <atomic> alone takes nvcc 0.9 s a file.
#pragma once

#include <cstdint>

namespace pantile {

// The devices on which a kernel may have the shared memory that it needs, one bit each. Only
// cuda::launch reads and writes it, atomically; a kernel has one.
struct PreparedDevices {
  std::uint64_t bits = 0;
};

namespace jit {

struct LoadedKernel {
  const void* handle = nullptr;      // a cudaKernel_t: cuda::launch(name, how, handle, parameters)
  mutable PreparedDevices prepared;  // for Launch::prepared
};

}  // namespace jit
}  // namespace pantile
