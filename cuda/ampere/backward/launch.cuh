// Host side of the backward: the tile of a plan's GPU, and what is launched with it (call.cuh; in
// fp32 f32/launch_backward.cuh).
#pragma once

#include <cuda_runtime.h>

#include "ampere/backward/call.cuh"
#include "ampere/f32/launch_backward.cuh"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask, SharedClass kShared>
Status run_backward_tile(const BackwardCall& call) {
  constexpr BackwardTile kTile = backward_tile(kHeadDim, kShared);
  using Config = BackwardConfig<kHeadDim, kHeadDimV, kTile>;
  static_assert(backward_shared_bytes(kTile, kHeadDim, kHeadDimV) <= shared_class_bytes(kShared));
  static_assert(sizeof(BackwardStorage<Config>) ==
                backward_shared_bytes(kTile, kHeadDim, kHeadDimV));
  return call.run<Config, kDType, kMask>();
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                       void* stream) {
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  if constexpr (kDType == DType::f32) {
    const BackwardCallF32 call(plan, tensors, workspace, static_cast<cudaStream_t>(stream));
    return plan.problem.forward.float32_precision == Float32Precision::highest
               ? launch_backward_f32<kHeadDim, Float32Precision::highest>(call, plan.device)
               : launch_backward_f32<kHeadDim, Float32Precision::tf32>(call, plan.device);
  } else {
    static VariantKernels kernels;
    const BackwardCall call(plan, tensors, workspace, kernels, static_cast<cudaStream_t>(stream));
    switch (compiled_class(plan.device.smem_optin_bytes)) {
      case SharedClass::small:
        return run_backward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::small>(call);
      case SharedClass::medium:
        return run_backward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::medium>(call);
      case SharedClass::large:
        if constexpr (kAmpereLargeTiles) {
          return run_backward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::large>(call);
        }
        break;  // compiled_class() never says so
    }
    return Status::error(StatusCode::unavailable, "%s has no tiles for 227 KB of shared memory",
                         plan.kernel->name);
  }
}

}  // namespace pantile::ampere
