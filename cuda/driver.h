// The one driver function the library needs, looked up through the CUDA runtime so that nothing
// links to libcuda, and other small services for code that launches kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "pantile/status.h"

namespace pantile::cuda {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// Null, with the reason in `status`, when there is no driver or it is too old. Cached.
TensorMapEncoder tensor_map_encoder(Status* status);

// Ok, or "what: name: text of the error"; clears the error unless it is sticky.
Status check(cudaError_t error, const char* what);

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
