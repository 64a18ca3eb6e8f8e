// Host side of the forward kernel: from a plan and pointers to a launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ampere/forward.cuh"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "core/softmax_state.h"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

inline ForwardParams forward_params(const ForwardPlan& plan, const ForwardTensors& tensors) {
  const ForwardProblem& p = plan.problem;
  ForwardParams params;
  params.q = make_operand(tensors.q, p.q, p.packed_q);
  params.k = make_operand(tensors.k, p.k, p.packed_k);
  params.v = make_operand(tensors.v, p.v, p.packed_k);
  params.o = make_operand(tensors.o, p.o, p.packed_q);
  params.lse = p.wants_lse ? tensors.lse : nullptr;
  params.max_logit = tensors.max_logit;
  params.output_f32 = p.output_f32;
  params.lse_packed = p.packed_q;
  params.lse_head_stride = p.packed_q ? p.total_q : p.seqlen_q;
  params.queries = query_side(p, tensors);
  params.keys = key_side(p, tensors);
  params.group = core::FastDivmod(static_cast<int>(p.heads_q / p.heads_k));
  params.heads_q = static_cast<int>(p.heads_q);
  params.order = forward_order(p, plan.device, plan.tile_q);
  const core::Mask mask = core::make_mask(0, 0, p.window_left, p.window_right);
  params.window_left = mask.left;
  params.window_right = mask.right;
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.scale = logit_scale(p.scale);
  params.stale_limit = p.wants_max_logit ? 0.0f : kStaleLimit;
  params.negate_q = p.scale < 0.0f;
  return params;
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask, SharedClass kShared>
Status launch_forward_tile(ForwardParams params, int blocks, cudaStream_t stream) {
  constexpr ForwardTile kTile = forward_tile(kHeadDim, kHeadDimV, kMask, kShared);
  constexpr int kSharedBytes = forward_shared_bytes(kTile, kHeadDim, kHeadDimV);
  using Config = ForwardConfig<kHeadDim, kHeadDimV, kTile>;
  static_assert(kSharedBytes <= shared_class_bytes(kShared));
  static_assert(sizeof(ForwardStorage<Config>) == kSharedBytes);
  params.q_pass_bytes = params.q.seq * Config::QCopy::kPassRows * 2;
  params.k_pass_bytes = params.k.seq * Config::KCopy::kPassRows * 2;
  params.v_pass_bytes = params.v.seq * Config::VCopy::kPassRows * 2;
  params.k_tile_bytes = params.k.seq * kTile.tile_k * 2;
  params.v_tile_bytes = params.v.seq * kTile.tile_k * 2;
  return launch("ampere forward", forward_kernel<Config, kDType, kMask>, blocks, Config::kThreads,
                kSharedBytes, stream, params);
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                      void* stream) {
  static_cast<void>(workspace);  // the forward needs none
  if (plan.blocks == 0) {
    return Status();
  }
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  const ForwardParams params = forward_params(plan, tensors);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  switch (shared_class(plan.device.smem_optin_bytes)) {
    case SharedClass::small:
      return launch_forward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::small>(
          params, plan.blocks, cuda_stream);
    case SharedClass::medium:
      return launch_forward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::medium>(
          params, plan.blocks, cuda_stream);
    case SharedClass::large:
      return launch_forward_tile<kDType, kHeadDim, kHeadDimV, kMask, SharedClass::large>(
          params, plan.blocks, cuda_stream);
  }
  return Status();
}

}  // namespace pantile::ampere
