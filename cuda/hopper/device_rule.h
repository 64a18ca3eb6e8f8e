// Which GPUs the kernels of the family run on, forward, backward and quantiser alike.
#pragma once

#include "hopper/limits.h"
#include "pantile/device.h"
#include "pantile/status.h"

namespace pantile::hopper {

// Machine code for sm_90a runs on 9.0 only.
inline Status device_rule(const DeviceProps& device) {
  constexpr StatusCode kUnsupported = StatusCode::unsupported;
  if (device.device.type != DeviceType::cuda) {
    return Status::error(kUnsupported, "needs a CUDA device");
  }
  if (device.compute_major != 9 || device.compute_minor != 0) {
    return Status::error(kUnsupported, "needs compute capability 9.0, device %d has %d.%d",
                         device.device.index, device.compute_major, device.compute_minor);
  }
  if (device.smem_optin_bytes < kSharedMemoryBytes) {
    return Status::error(kUnsupported, "needs %d bytes of shared memory a block, device %d has %d",
                         kSharedMemoryBytes, device.device.index, device.smem_optin_bytes);
  }
  return Status();
}

}  // namespace pantile::hopper
