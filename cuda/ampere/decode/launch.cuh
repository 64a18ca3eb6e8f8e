// The family's rows of decode: tiles that fit every GPU from compute capability 8.0 on.
#pragma once

#include "decode/launch.cuh"

namespace pantile::ampere {

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
  constexpr bool kLatent = kHeadDimV > 256;
  constexpr decode::Shape kShape{kHeadDim, kHeadDimV, CacheFormat::plain, kLatent};
  return decode::launch_shape<kShape, kDType, decode::SharedClass::small>(plan, params,
                                                                          cuda_stream);
}

}  // namespace pantile::ampere
