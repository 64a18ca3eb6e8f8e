// What cpp/jit needs of CUDA: load_cuda.cc by the runtime API, load_stub.cc in a build without
// CUDA.
#pragma once

#include <functional>
#include <string>

#include "pantile/status.h"

namespace pantile::jit {

// Makes the machine code known to the driver for every device, and loads it on the current one, so
// that a launch that is captured into a CUDA graph need not. The kernel stays until the process
// ends: launches, graphs and other threads refer to it.
Status load_code(const std::string& code, const std::string& symbol, const void** handle);

// Calls `work` while the device is the current one.
Status on_device(int index, const std::function<Status()>& work);

// Whether work on the stream is recorded into a CUDA graph instead of being done.
bool is_capturing(void* stream);

// The newest CUDA that the driver knows, major * 100 + minor; 0 without a driver.
int driver_version();

}  // namespace pantile::jit
