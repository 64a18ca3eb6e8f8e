// The family's rows of the FP8 quantiser.
#pragma once

#include "common/quantize_launch.cuh"

namespace pantile::hopper {

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                       void* stream) {
  if (plan.blocks == 0) {
    return Status();  // no rows
  }
  return common::QuantizeCall(plan, tensors, workspace, static_cast<cudaStream_t>(stream), true)
      .run<kDType, kHeadDim>();
}

}  // namespace pantile::hopper
