// The family's rows of decode: two blocks on a multiprocessor, or one with all of its shared
// memory.
#pragma once

#include "decode/launch.cuh"
#include "hopper/decode/codes.h"

namespace pantile::hopper {

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace,
                     void* stream) {
  if (plan.blocks == 0) {
    return Status();
  }
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  const decode::DecodeParams params = decode::decode_params(plan, tensors, workspace);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if constexpr (kHasCodes<kHeadDim>) {
    if (plan.problem.format != CacheFormat::plain) {
      return launch_decode_codes<kHeadDim>(plan, params, cuda_stream);
    }
  }
  constexpr bool kLatent = kHeadDimV > 256;
  constexpr decode::Shape kShape{kHeadDim, kHeadDimV, CacheFormat::plain, kLatent};
  return decode::launch_shape<kShape, kDType, decode::SharedClass::large>(plan, params,
                                                                          cuda_stream);
}

}  // namespace pantile::hopper
