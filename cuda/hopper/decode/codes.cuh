// What codes_d<head dim>.cu instantiates.
#pragma once

#include "decode/launch.cuh"
#include "hopper/decode/codes.h"

namespace pantile::hopper {

template <int kHeadDim>
Status launch_decode_codes(const DecodePlan& plan, const decode::DecodeParams& params,
                           cudaStream_t stream) {
  using decode::SharedClass;
  constexpr bool kLatent = kHeadDim == 576;
  constexpr int kHeadDimV = kLatent ? 512 : kHeadDim;
  constexpr decode::Shape kE4m3{kHeadDim, kHeadDimV, CacheFormat::e4m3, kLatent};
  constexpr decode::Shape kInt8{kHeadDim, kHeadDimV, CacheFormat::int8, kLatent};
  return plan.problem.format == CacheFormat::e4m3
             ? decode::launch_shape<kE4m3, DType::f16, SharedClass::large>(plan, params, stream)
             : decode::launch_shape<kInt8, DType::f16, SharedClass::large>(plan, params, stream);
}

}  // namespace pantile::hopper
