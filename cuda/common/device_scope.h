// Makes a device current for a scope: launches must happen on the device that owns the stream.
#pragma once

#include <cuda_runtime.h>

namespace pantile::common {

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) {
      cudaSetDevice(previous_);
    }
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

}  // namespace pantile::common
