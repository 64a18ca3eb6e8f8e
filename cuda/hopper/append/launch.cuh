// The family's rows of append.
#pragma once

#include "decode/launch_append.cuh"

namespace pantile::hopper {

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_append(const AppendPlan& plan, const KvTensors& tensors, void* workspace,
                     void* stream) {
  static_cast<void>(workspace);  // append needs none
  return decode::launch_append<kDType>(plan, tensors, static_cast<cudaStream_t>(stream));
}

}  // namespace pantile::hopper
