// Host side of the forward kernel: from a plan and pointers to a launch.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ampere/f32/launch_forward.cuh"
#include "ampere/forward/kernel.cuh"
#include "ampere/forward/softmax_choice.h"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "ampere/variant.h"
#include "core/softmax_state.h"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

inline ReferenceRules reference_rules(const SoftmaxOptions& softmax, const ForwardProblem& p) {
  const float limit = softmax.rescale_threshold + softmax.p_max_offset;
  const bool always = softmax.rescale_threshold == 0.0f && !p.wants_max_logit;
  ReferenceRules rules;
  rules.look_limit = always ? -INFINITY : limit;
  rules.raise_limit = limit;
  rules.p_offset = softmax.p_max_offset;
  rules.shared_reach = shared_reach(softmax, p.dtype);
  return rules;
}

inline ForwardParams forward_params(const ForwardPlan& plan, const ForwardTensors& tensors) {
  const ForwardProblem& p = plan.problem;
  ForwardParams params;
  params.q = make_operand(tensors.q, p.q, p.packed_q);
  params.k = make_operand(tensors.k, p.k, p.packed_k);
  params.v = make_operand(tensors.v, p.v, p.packed_k);
  params.o = make_operand(tensors.o, p.o, p.packed_q);
  params.lse = p.wants_lse ? tensors.lse : nullptr;
  params.o_low = p.wants_o_low ? tensors.o_low : nullptr;
  params.max_logit = tensors.max_logit;
  params.sinks = p.variant.has_sinks ? tensors.variant.sinks : nullptr;
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
  params.k_begin = tensors.k_begin;
  params.mask_shift = tensors.mask_shift;
  params.block_table = tensors.block_table;
  params.table_stride = p.table_stride;
  params.page_size = core::FastDivmod(static_cast<int>(p.page_size > 0 ? p.page_size : 1));
  params.negate_q = p.scale < 0.0f;
  params.zero_q = p.scale == 0.0f;
  params.references = reference_rules(plan.softmax, p);
  return params;
}

template <class Config>
void set_steps(ForwardParams& params) {
  params.q_pass_bytes = params.q.seq * Config::QCopy::kPassRows * 2;
  params.k_pass_bytes = params.k.seq * Config::KCopy::kPassRows * 2;
  params.v_pass_bytes = params.v.seq * Config::VCopy::kPassRows * 2;
  params.k_tile_bytes = params.k.seq * Config::kTileK * 2;
  params.v_tile_bytes = params.v.seq * Config::kTileK * 2;
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask, ForwardTile kTile,
          ForwardSoftmax kSoftmax, bool kLongRows>
Status launch_forward_tile(ForwardParams params, const ForwardPlan& plan, cudaStream_t stream) {
  constexpr int kSharedBytes = forward_shared_bytes(kTile, kHeadDim, kHeadDimV);
  using Config = ForwardConfig<kHeadDim, kHeadDimV, kTile, softmax_kind(kSoftmax), kLongRows>;
  static_assert(sizeof(SummedStorage<Config>) == kSharedBytes);
  set_steps<Config>(params);
  const auto kernel = [] {
    if constexpr (kLongRows) {
      return long_forward_kernel<Config, kDType, kMask>;
    } else if constexpr (kSoftmax == ForwardSoftmax::vector) {
      return forward_kernel<Config, kDType, kMask>;
    } else if constexpr (kSoftmax == ForwardSoftmax::tensor) {
      return tensor_forward_kernel<Config, kDType, kMask>;
    } else {
      return trial_forward_kernel<Config, kDType, kMask>;
    }
  }();
  static cuda::PreparedDevices prepared{0};
  return cuda::launch(
      "ampere forward",
      launch_of(plan, plan.blocks, Config::kThreads, kSharedBytes, stream, &prepared), kernel,
      params);
}

// One kernel for all masks and GPUs: full and causal masks are windows too, and differ from them at
// the edges of a row only.
template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_long_rows(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
  constexpr ForwardSoftmax kSoftmax = ForwardSoftmax::vector;
  constexpr SharedClass kShared = forward_tile_class(SharedClass::large, kSoftmax, true);
  constexpr MaskKind kLong = kMask == MaskKind::any ? kMask : MaskKind::window;
  constexpr ForwardTile kTile = forward_tile(kHeadDim, kHeadDimV, kLong, kShared);
  static_assert(kTile.tile_q == forward_tile(kHeadDim, kHeadDimV, kMask, kShared).tile_q,
                "the plan counts tiles of this many rows");
  return launch_forward_tile<kDType, kHeadDim, kHeadDimV, kLong, kTile, kSoftmax, true>(
      params, plan, stream);
}

// The kernel of one kind of softmax, if the row and this build have it.
template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask, ForwardSoftmax kSoftmax>
Status launch_softmax(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
  if constexpr (has_softmax(kDType, kHeadDim, kHeadDimV, kMask, kSoftmax) &&
                softmax_is_built(kSoftmax)) {
    if constexpr (kSoftmax == ForwardSoftmax::vector) {
      if (plan.problem.seqlen_k > kLongRowKeys) {
        return launch_long_rows<kDType, kHeadDim, kHeadDimV, kMask>(params, plan, stream);
      }
    }
    const auto launch_for = [&](auto compiled) {
      constexpr SharedClass kCompiled = decltype(compiled)::value;
      constexpr SharedClass kShared = forward_tile_class(kCompiled, kSoftmax, false);
      constexpr ForwardTile kTile = forward_tile(kHeadDim, kHeadDimV, kMask, kShared);
      static_assert(forward_shared_bytes(kTile, kHeadDim, kHeadDimV) <=
                    shared_class_bytes(kCompiled));
      return launch_forward_tile<kDType, kHeadDim, kHeadDimV, kMask, kTile, kSoftmax, false>(
          params, plan, stream);
    };
    switch (compiled_class(plan.device.smem_optin_bytes)) {
      case SharedClass::small:
        return launch_for(std::integral_constant<SharedClass, SharedClass::small>());
      case SharedClass::medium:
        return launch_for(std::integral_constant<SharedClass, SharedClass::medium>());
      case SharedClass::large:
        if constexpr (kAmpereLargeTiles) {
          return launch_for(std::integral_constant<SharedClass, SharedClass::large>());
        }
        break;  // compiled_class() never says so
    }
  }
  return Status::error(StatusCode::unavailable, "%s is not built with softmax kind %d",
                       plan.kernel->name, static_cast<int>(kSoftmax));
}

// With hooks: a kernel that is compiled at run time, for the same tile.
template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_variant(ForwardParams params, const ForwardPlan& plan, const VariantTensors& tensors,
                      cudaStream_t stream) {
  static VariantKernels kernels;  // of the row
  const jit::LoadedKernel* kernel = nullptr;
  const Status status = kernels.find(plan, stream, &kernel);
  if (!status.ok()) {
    return status;
  }
  attn::VariantParams variant = forward_variant_params(plan.problem, tensors);
  void* pointers[] = {&params, &variant};
  const VariantHooks hooks = variant_hooks(plan.problem);
  const SharedClass device = shared_class(plan.device.smem_optin_bytes);
  const auto launch_for = [&](auto shared) {
    constexpr ForwardTile kTile = forward_tile(kHeadDim, kHeadDimV, kMask, decltype(shared)::value);
    using Config = ForwardConfig<kHeadDim, kHeadDimV, kTile, SoftmaxKind{}>;
    set_steps<Config>(params);
    const int bias_bytes = copies_bias(hooks, kTile, kHeadDim, kHeadDimV, device)
                               ? bias_tile_bytes(kTile.tile_q, kTile.tile_k)
                               : 0;
    return cuda::launch("ampere forward with a variant",
                        launch_of(plan, plan.blocks, Config::kThreads,
                                  forward_shared_bytes(kTile, kHeadDim, kHeadDimV) + bias_bytes,
                                  stream, &kernel->prepared),
                        kernel->handle, pointers);
  };
  switch (variant_tile_class(hooks, device)) {
    case SharedClass::small:
      return launch_for(std::integral_constant<SharedClass, SharedClass::small>());
    case SharedClass::medium:
      return launch_for(std::integral_constant<SharedClass, SharedClass::medium>());
    case SharedClass::large:
      return launch_for(std::integral_constant<SharedClass, SharedClass::large>());
  }
  return Status();
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
  if constexpr (kDType == DType::f32) {
    return plan.problem.float32_precision == Float32Precision::highest
               ? launch_forward_f32<kHeadDim, Float32Precision::highest>(params, plan, tensors,
                                                                         cuda_stream)
               : launch_forward_f32<kHeadDim, Float32Precision::tf32>(params, plan, tensors,
                                                                      cuda_stream);
  } else {
    if (variant_hooks(plan.problem).any()) {
      return launch_variant<kDType, kHeadDim, kHeadDimV, kMask>(params, plan, tensors.variant,
                                                                cuda_stream);
    }
    switch (forward_softmax(plan.softmax)) {
#define PANTILE_SOFTMAX(kind)                                                                     \
  case ForwardSoftmax::kind:                                                                      \
    return launch_softmax<kDType, kHeadDim, kHeadDimV, kMask, ForwardSoftmax::kind>(params, plan, \
                                                                                    cuda_stream);
      PANTILE_SOFTMAX(vector)
      PANTILE_SOFTMAX(tensor)
      PANTILE_SOFTMAX(quarter_share)
      PANTILE_SOFTMAX(half_share)
      PANTILE_SOFTMAX(full_share)
      PANTILE_SOFTMAX(row_share)
      PANTILE_SOFTMAX(surrogate)
      PANTILE_SOFTMAX(fast_scale)
#undef PANTILE_SOFTMAX
    }
    return Status();
  }
}

}  // namespace pantile::ampere
