// Decode over 8-bit caches. Their products are those of f16 whatever the dtype of Q, so rows of a
// head dim share the kernels: explicit instances in codes_d<head dim>.cu.
#pragma once

#include <cuda_runtime.h>

#include "decode/params.cuh"
#include "pantile/kv.h"
#include "pantile/status.h"

namespace pantile::hopper {

template <int kHeadDim>
inline constexpr bool kHasCodes =
    kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256 || kHeadDim == 576;

// kHeadDim: that of the row, of K and V; 576: a latent cache, V is the first 512 channels.
template <int kHeadDim>
Status launch_decode_codes(const DecodePlan& plan, const decode::DecodeParams& params,
                           cudaStream_t stream);

}  // namespace pantile::hopper
