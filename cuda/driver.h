// The one driver function the library needs, looked up through the CUDA runtime so that nothing
// links to libcuda, and other small services for code that launches kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "jit/loaded_kernel.h"
#include "pantile/status.h"

namespace pantile::cuda {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// Null, with the reason in `status`, when there is no driver or it is too old. Cached.
TensorMapEncoder tensor_map_encoder(Status* status);

// Ok, or "what: name: text of the error"; clears the error unless it is sticky.
Status check(cudaError_t error, const char* what);

using pantile::PreparedDevices;

// A kernel's launch, without its arguments.
struct Launch {
  dim3 grid, block;
  int shared_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
  bool early = true;  // may start while the kernel before it drains (prim/grid_dependency.cuh)
  // More than 48 KB of shared memory are asked for first, once a device: `prepared` is the kernel's
  // own, `device` the current one.
  PreparedDevices* prepared = nullptr;
  int device = 0;
};

// Starts a kernel: the address of one that nvcc compiled, or the handle of one that was compiled at
// run time (jit/kernel.h). `params` points to its parameters. Ok, or "name: " and what CUDA says.
Status launch(const char* name, const Launch& how, const void* kernel, void** params);

// The same with the kernel's parameters checked by the compiler.
template <class... Params>
Status launch(const char* name, const Launch& how, void (*kernel)(Params...),
              const Params&... params) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return launch(name, how, reinterpret_cast<const void*>(kernel), pointers);
}

// Makes a device current for its lifetime. Costs one query when it already is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    status_ = check(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_.ok() && before_ != device_) {
      status_ = check(cudaSetDevice(device_), "cudaSetDevice");
      changed_ = status_.ok();
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      static_cast<void>(cudaSetDevice(before_));
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  const Status& status() const { return status_; }

 private:
  int device_;
  int before_ = 0;
  bool changed_ = false;
  Status status_;
};

}  // namespace pantile::cuda
