// What cpp/jit needs of CUDA: load_cuda.cc by the runtime API, load_stub.cc in a build without
// CUDA.
#pragma once

#include <string>

#include "pantile/status.h"

namespace pantile::jit {

// Makes the machine code known to the driver, for every device. The kernel stays until the process
// ends: launches, CUDA graphs and function handles of others refer to it.
Status load_code(const std::string& code, const std::string& symbol, const void** handle);

// Whether work on the stream is recorded into a CUDA graph instead of being done.
bool is_capturing(void* stream);

// The newest CUDA that the driver knows, major * 100 + minor; 0 without a driver.
int driver_version();

}  // namespace pantile::jit
