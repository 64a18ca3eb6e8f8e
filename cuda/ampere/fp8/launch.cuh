// Host side of the ampere FP8 forward: from a plan and pointers to a launch. Allocates nothing and
// waits for nothing; may be captured into a CUDA graph.
#pragma once

#include "ampere/fp8/kernel.cuh"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "core/scaling.h"
#include "driver.h"
#include "pantile/quantize.h"

namespace pantile::ampere {

inline Fp8ForwardParams fp8_params(const ForwardPlan& plan, const ForwardTensors& t) {
  const ForwardProblem& p = plan.problem;
  const QuantizedSizes sizes = quantized_sizes(p);
  const core::Mask bounds = core::make_mask(0, 0, p.window_left, p.window_right);
  const auto dim = static_cast<int>(p.head_dim);
  const float limit = core::score_code_limit(dim);
  const auto codes = [](const void* x) { return static_cast<const std::uint8_t*>(x); };
  Fp8ForwardParams params{};
  params.q = codes(t.q);
  params.k = codes(t.k);
  params.v = codes(t.v);
  params.row_bytes = core::round_up(dim, core::kCodeAlign);
  params.head_dim = dim;
  params.q_blocks = static_cast<int>(sizes.blocks_q);
  params.k_blocks = static_cast<int>(sizes.blocks_k);
  params.q_scale_shift = p.fp8.block_q == 1 ? 0 : p.fp8.block_q == 64 ? 6 : 7;
  params.q_scale = t.fp8.scale_q;
  params.kv_scale = reinterpret_cast<const float2*>(t.fp8.scale_kv);
  params.v_nonfinite = reinterpret_cast<const uint4*>(t.fp8.nonfinite_v);
  params.q_dot_mean = p.fp8.smooth_k ? t.fp8.q_dot_mean : nullptr;
  params.scale = p.scale;
  params.scale_log2 = p.scale * core::kLog2E;
  params.score_bound = limit * limit * static_cast<float>(dim);
  params.o = make_operand(t.o, p.o, p.packed_q);
  params.o_is_f16 = p.fp8.output == DType::f16;
  params.lse = p.wants_lse ? t.lse : nullptr;
  params.lse_head_stride = p.packed_q ? p.total_q : p.seqlen_q;
  params.lse_packed = p.packed_q;
  params.queries = query_side(p, t);
  params.keys = key_side(p, t);
  params.group = core::FastDivmod(static_cast<int>(p.heads_q / p.heads_k));
  params.heads_q = static_cast<int>(p.heads_q);
  params.order = forward_order(p, plan.device, plan.tile_q);
  params.window_left = bounds.left;
  params.window_right = bounds.right;
  return params;
}

template <class Config>
void set_fp8_steps(Fp8ForwardParams& params) {
  using Layouts = Fp8Layouts<Config>;
  const std::int64_t row_bytes = params.row_bytes;
  params.q_pass_bytes = row_bytes * Layouts::QCopy::kPassRows;
  params.k_pass_bytes = row_bytes * Layouts::KCopy::kPassRows;
  params.k_tile_bytes = row_bytes * Config::kTileK;
  params.v_block_bytes = std::int64_t{params.head_dim} * core::kBlockedRows;
}

template <class Config>
Status launch_fp8_kernel(const ForwardPlan& plan, const ForwardTensors& tensors,
                         cudaStream_t stream) {
  constexpr int kSharedBytes = Config::kTile.shared_bytes();
  static_assert(sizeof(Fp8Storage<Config>) == kSharedBytes);
  Fp8ForwardParams params = fp8_params(plan, tensors);
  set_fp8_steps<Config>(params);
  static cuda::PreparedDevices prepared{0};
  return cuda::launch(
      "ampere FP8 forward",
      launch_of(plan, plan.blocks, Config::kThreads, kSharedBytes, stream, &prepared),
      forward_fp8_kernel<Config>, params);
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                          void* stream) {
  static_assert(kDType == DType::e4m3 && kHeadDim == kHeadDimV && kMask == MaskKind::any);
  static_cast<void>(workspace);  // none is needed
  if (plan.blocks == 0) {
    return Status();
  }
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return plan.problem.fp8.exp == Fp8Exp::exp2
             ? launch_fp8_kernel<Fp8Config<kHeadDim, Fp8Exp::exp2>>(plan, tensors, cuda_stream)
             : launch_fp8_kernel<Fp8Config<kHeadDim, Fp8Exp::code>>(plan, tensors, cuda_stream);
}

}  // namespace pantile::ampere
