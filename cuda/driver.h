// The one driver function the library needs, looked up through the CUDA runtime so that nothing
// links to libcuda, and other small services for code that launches kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pantile/status.h"

namespace pantile::cuda {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// Null, with the reason in `status`, when there is no driver or it is too old. Cached.
TensorMapEncoder tensor_map_encoder(Status* status);

// Ok, or "what: name: text of the error"; clears the error unless it is sticky.
Status check(cudaError_t error, const char* what);

// Lets `kernel` have `bytes` of dynamic shared memory on the current device, `device`. `prepared`
// belongs to the kernel and has one bit a device; setting it twice is harmless.
inline Status allow_shared_memory(const void* kernel, int bytes, int device,
                                  std::atomic<std::uint64_t>& prepared) {
  const std::uint64_t bit = std::uint64_t{1} << (device & 63);
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return Status();
  }
  const Status status =
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "cudaFuncSetAttribute");
  if (status.ok()) {
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  return status;
}

// Devices on which a kernel may have the shared memory that it needs: allow_shared_memory().
using PreparedDevices = std::atomic<std::uint64_t>;

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

// Ok, or "name: " and what CUDA says.
template <class... Params>
Status launch(const char* name, const Launch& how, void (*kernel)(Params...),
              const Params&... params) {
  if (how.prepared != nullptr) {
    const Status status = allow_shared_memory(reinterpret_cast<const void*>(kernel),
                                              how.shared_bytes, how.device, *how.prepared);
    if (!status.ok()) {
      return status;
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(how.shared_bytes);
  config.stream = how.stream;
  config.attrs = &attribute;
  config.numAttrs = how.early ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, kernel, params...), name);
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
