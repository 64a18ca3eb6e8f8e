// The family's rows of the FP8 quantiser. No kernel starts early: PTX for
// compute capability 8.9, which later GPUs compile, has nothing to wait for the one before with.
#pragma once

#include "common/quantize_launch.cuh"

namespace pantile::ampere {

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                       void* stream) {
  if (plan.blocks == 0) {
    return Status();  // no rows
  }
  return common::QuantizeCall(plan, tensors, workspace, static_cast<cudaStream_t>(stream), false)
      .run<kDType, kHeadDim>();
}

}  // namespace pantile::ampere
