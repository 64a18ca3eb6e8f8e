// Host side of the fp32 forward: from a plan and pointers to a launch.
#pragma once

#include <cuda_runtime.h>

#include "ampere/f32/config.h"
#include "ampere/f32/forward.cuh"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

template <int kHeadDim, Float32Precision kPrecision, SharedClass kShared>
Status launch_forward_tile_f32(ForwardParams params, const ForwardPlan& plan,
                               const ForwardTensors& tensors, cudaStream_t stream) {
  constexpr ForwardTileF32 kTile = forward_tile_f32(kHeadDim, kPrecision, kShared);
  constexpr int kSharedBytes = forward_shared_bytes(kTile, kHeadDim);
  using Config = ForwardConfigF32<kHeadDim, kTile>;
  static_assert(kSharedBytes <= shared_class_bytes(kShared));
  static_assert(sizeof(ForwardStorage<Config>) == kSharedBytes);
  const ForwardProblem& p = plan.problem;
  params.q = make_operand_f32(tensors.q, p.q, p.packed_q);
  params.k = make_operand_f32(tensors.k, p.k, p.packed_k);
  params.v = make_operand_f32(tensors.v, p.v, p.packed_k);
  params.o = make_operand_f32(tensors.o, p.o, p.packed_q);
  params.head_dim *= 2;
  params.head_dim_v *= 2;
  params.q_pass_bytes = params.q.seq * Config::QCopy::kPassRows * 2;
  params.k_pass_bytes = params.k.seq * Config::KCopy::kPassRows * 2;
  params.v_pass_bytes = params.v.seq * Config::VCopy::kPassRows * 2;
  params.k_tile_bytes = params.k.seq * kTile.tile_k * 2;
  params.v_tile_bytes = params.v.seq * kTile.tile_k * 2;
  static cuda::PreparedDevices prepared{0};
  return cuda::launch(
      "ampere forward f32",
      launch_of(plan, plan.blocks, Config::kThreads, kSharedBytes, stream, &prepared),
      forward_kernel_f32<Config, kPrecision>, params);
}

// `params` are those of a 16-bit forward.
template <int kHeadDim, Float32Precision kPrecision>
Status launch_forward_f32(const ForwardParams& params, const ForwardPlan& plan,
                          const ForwardTensors& tensors, cudaStream_t stream) {
  if (shared_class(plan.device.smem_optin_bytes) == SharedClass::large) {
    return launch_forward_tile_f32<kHeadDim, kPrecision, SharedClass::large>(params, plan, tensors,
                                                                             stream);
  }
  return launch_forward_tile_f32<kHeadDim, kPrecision, SharedClass::small>(params, plan, tensors,
                                                                           stream);
}

}  // namespace pantile::ampere
