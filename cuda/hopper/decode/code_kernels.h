// Decode over 8-bit caches. Their products are those of f16 whatever the dtype of Q, so rows share
// the kernels: explicit instances in code_kernels.cu.
#pragma once

#include <cuda_runtime.h>

#include "decode/params.cuh"
#include "pantile/kv.h"
#include "pantile/status.h"

namespace pantile::hopper {

// head_dim: that of the row, of K and V.
Status launch_decode_codes(const DecodePlan& plan, const decode::DecodeParams& params, int head_dim,
                           cudaStream_t stream);

}  // namespace pantile::hopper
