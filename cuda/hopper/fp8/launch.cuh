// Launches one row of the Hopper FP8 forward. Allocates nothing and waits for nothing; may be
// captured into a CUDA graph. The kernel is launched as a programmatic dependent: its blocks start
// while the kernel before it, usually the quantiser, drains.
#pragma once

#include "core/blocked.h"
#include "core/scaling.h"
#include "hopper/forward/launch.cuh"
#include "hopper/fp8/kernel.cuh"
#include "hopper/fp8/tensor_map.h"
#include "pantile/quantize.h"

namespace pantile::hopper {

inline Status fp8_maps(const Fp8Config& config, const ForwardProblem& p, const ForwardTensors& t,
                       Fp8Maps* maps) {
  const QuantizedSizes sizes = quantized_sizes(p);
  const std::int64_t columns = core::round_up<std::int64_t>(p.head_dim, core::kCodeAlign);
  const MappedTensor o{"o",
                       t.o,
                       p.fp8.output,
                       p.packed_q ? 1 : p.batch,
                       p.packed_q ? p.total_q : p.seqlen_q,
                       p.heads_q,
                       p.head_dim_v,
                       p.o};
  Status status = encode_tensor_map(o, config.o_tile(), &maps->o);
  if (status.ok()) {
    status = encode_code_map({"q", t.q, columns, p.heads_q * sizes.blocks_q * 128, 1},
                             config.panel_bytes(), kRowsPerWarpgroup, &maps->q);
  }
  if (sizes.blocks_k == 0) {
    return status;  // every tile is without keys: nothing loads K or V
  }
  if (status.ok()) {
    status = encode_code_map({"k", t.k, columns, p.heads_k * sizes.blocks_k * 128, 1},
                             config.panel_bytes(), Fp8Config::kTileK, &maps->k);
  }
  if (status.ok()) {
    status =
        encode_code_map({"v", t.v, Fp8Config::kTileK, p.head_dim_v, p.heads_k * sizes.blocks_k},
                        Fp8Config::kTileK, config.head_dim, &maps->v);
  }
  return status;
}

inline Fp8Params fp8_params(const Fp8Config& config, const ForwardPlan& plan,
                            const ForwardTensors& t, void* workspace) {
  const ForwardProblem& p = plan.problem;
  const QuantizedSizes sizes = quantized_sizes(p);
  const core::Mask bounds = core::make_mask(0, 0, p.window_left, p.window_right);
  const float limit = core::score_code_limit(static_cast<int>(p.head_dim));
  Fp8Params params{};
  params.order = forward_order(p, mask_kind(p), config.tile_q());
  params.heads_q = static_cast<int>(p.heads_q);
  params.group = static_cast<int>(p.heads_q / p.heads_k);
  params.batch = static_cast<int>(p.batch);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.window_left = bounds.left;
  params.window_right = bounds.right;
  params.cu_seqlens_q = t.cu_seqlens_q;
  params.cu_seqlens_k = t.cu_seqlens_k;
  params.seqused_q = t.seqused_q;
  params.seqused_k = t.seqused_k;
  params.q_blocks = static_cast<int>(sizes.blocks_q);
  params.k_blocks = static_cast<int>(sizes.blocks_k);
  params.q_scale_rows = p.fp8.block_q;
  params.q_scale = t.fp8.scale_q;
  params.kv_scale = reinterpret_cast<const float2*>(t.fp8.scale_kv);
  params.v_nonfinite = reinterpret_cast<const uint4*>(t.fp8.nonfinite_v);
  params.q_dot_mean = p.fp8.smooth_k ? t.fp8.q_dot_mean : nullptr;
  params.scale = p.scale;
  params.scale_log2 = p.scale * core::kLog2E;
  params.score_bound = limit * limit * static_cast<float>(p.head_dim);
  params.lse = p.wants_lse ? t.lse : nullptr;
  params.lse_head = p.packed_q ? p.total_q : p.seqlen_q;
  params.lse_batch = p.packed_q ? 0 : p.heads_q * p.seqlen_q;
  params.counter = static_cast<std::int32_t*>(workspace);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.o_is_f16 = p.fp8.output == DType::f16;
  params.clipped = !p.packed_q && !p.has_seqused_q;
  params.o_panels = panels_per_copy(p.head_dim_v, config.o_tile().panels() * tile::kPanelColumns);
  params.o_steps = map_steps(p.o, p.heads_q, p.batch, p.packed_q);
  params.o = t.o;
  params.o_strides = strides_of(p.o, p.packed_q);
  return params;
}

template <class Variant>
Status launch_fp8_variant(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                          cudaStream_t stream) {
  constexpr Fp8Config kConfig = Variant::kConfig;
  const auto kernel = [] {
    if constexpr (attn::is_trial(Variant::kExp)) {
      return trial_forward_fp8_kernel<Variant>;
    } else {
      return forward_fp8_kernel<Variant>;
    }
  }();
  const int device = plan.device.device.index;
  const cuda::DeviceGuard guard(device);
  if (!guard.status().ok()) {
    return guard.status();
  }
  Fp8Maps maps;
  const Status status = fp8_maps(kConfig, plan.problem, tensors, &maps);
  if (!status.ok()) {
    return status;
  }
  static cuda::PreparedDevices prepared{0};
  cuda::Launch how{dim3(static_cast<unsigned>(plan.blocks)), dim3(kConfig.threads()),
                   kConfig.shared_bytes(), stream};
  how.prepared = &prepared;
  how.device = device;
  return cuda::launch("launching the Hopper FP8 forward", how, kernel, maps,
                      fp8_params(kConfig, plan, tensors, workspace));
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                          void* stream) {
  static_assert(kDType == DType::e4m3 && kHeadDim == kHeadDimV);
  if (plan.blocks == 0) {
    return Status();  // no rows
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (plan.problem.fp8.exp) {
    case Fp8Exp::mixed:
      if constexpr (fp8_exp_is_built(Fp8Exp::mixed)) {
        return launch_fp8_variant<Fp8Variant<kHeadDim, kMask, Fp8Exp::mixed>>(
            plan, tensors, workspace, cuda_stream);
      }
      return Status::error(StatusCode::unavailable, "%s is not built with fp8_exp = mixed",
                           plan.kernel->name);
    case Fp8Exp::exp2:
      return launch_fp8_variant<Fp8Variant<kHeadDim, kMask, Fp8Exp::exp2>>(plan, tensors, workspace,
                                                                           cuda_stream);
    case Fp8Exp::code: break;
  }
  return launch_fp8_variant<Fp8Variant<kHeadDim, kMask, Fp8Exp::code>>(plan, tensors, workspace,
                                                                       cuda_stream);
}

}  // namespace pantile::hopper
