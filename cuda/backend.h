// What the host core needs of CUDA. Defined in cuda/backend.cc with CUDA and in
// cpp/host/cuda_stub.cc without, so that the core itself includes no CUDA header.
#pragma once

#include "pantile/device.h"

namespace pantile::cuda {

// Reads and caches the properties of CUDA device `index`.
Status query_device(int index, DeviceProps* props);

// Number of devices; 0 with the driver's or the build's reason in `status`.
int device_count(Status* status);

}  // namespace pantile::cuda
