// Launches one row of the Hopper forward: encodes the tensor maps, fills the parameters, starts the
// kernel. Allocates nothing and waits for nothing; may be captured into a CUDA graph.
#pragma once

#include <cstdint>

#include "attn/softmax.cuh"
#include "core/softmax_state.h"
#include "driver.h"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/order.h"
#include "hopper/mask_lists.h"
#include "hopper/tensor_map.h"
#include "hopper/variant.h"
#include "pantile/plan.h"

namespace pantile::hopper {

inline MapSteps map_steps(const Layout& layout, std::int64_t heads, std::int64_t batch,
                          bool packed) {
  return MapSteps{is_expanded(heads, layout.head) ? 0 : 1,
                  packed || is_expanded(batch, layout.batch) ? 0 : 1};
}

inline Strides strides_of(const Layout& layout, bool packed) {
  return Strides{packed ? 0 : layout.batch, layout.seq, layout.head};
}

inline Status forward_maps(const ForwardConfig& config, const ForwardProblem& p,
                           const ForwardTensors& t, ForwardMaps* maps) {
  const std::int64_t batch_q = p.packed_q ? 1 : p.batch;
  const bool paged = p.page_size > 0;
  const std::int64_t batch_k = paged ? p.pages : p.packed_k ? 1 : p.batch;
  const std::int64_t rows_q = p.packed_q ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = paged ? p.page_size : p.packed_k ? p.total_k : p.seqlen_k;
  const MappedTensor q{"q", t.q, p.dtype, batch_q, rows_q, p.heads_q, p.head_dim, p.q};
  const MappedTensor o{"o", t.o, p.dtype, batch_q, rows_q, p.heads_q, p.head_dim_v, p.o};
  const MappedTensor k{"k", t.k, p.dtype, batch_k, rows_k, p.heads_k, p.head_dim, p.k};
  const MappedTensor v{"v", t.v, p.dtype, batch_k, rows_k, p.heads_k, p.head_dim_v, p.v};
  Status status = encode_tensor_map(q, config.q_tile(), &maps->q);
  if (status.ok() && !p.output_f32) {
    status = encode_tensor_map(o, config.o_tile(), &maps->o);
  }
  if (rows_k == 0 || batch_k == 0) {
    return status;  // nothing to read: ForwardParams::no_keys
  }
  const tile::PanelTile chunk{page_chunk(p.page_size, config.tile_k), tile::kPanelColumns};
  if (status.ok()) {
    status = encode_tensor_map(k, paged ? chunk : config.k_tile(), &maps->k);
  }
  if (status.ok()) {
    status = encode_tensor_map(v, paged ? chunk : config.v_tile(), &maps->v);
  }
  return status;
}

inline ForwardParams forward_params(const ForwardConfig& config, const ForwardPlan& plan,
                                    const ForwardTensors& t, void* workspace) {
  const ForwardProblem& p = plan.problem;
  const MaskKind mask = mask_kind(p);
  const core::Mask bounds = core::make_mask(0, 0, p.window_left, p.window_right);
  const bool paged = p.page_size > 0;
  const std::int64_t rows_k = paged || p.packed_k ? p.total_k : p.seqlen_k;
  ForwardParams params{};
  params.order = forward_order(p, mask, config.tile_q());
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
  params.q_steps = map_steps(p.q, p.heads_q, p.batch, p.packed_q);
  params.k_steps = map_steps(p.k, p.heads_k, p.batch, p.packed_k);
  params.o_steps = map_steps(p.o, p.heads_q, p.batch, p.packed_q);
  params.qk_panels = panels_per_copy(p.head_dim, config.k_tile().panels() * tile::kPanelColumns);
  params.v_panels = panels_per_copy(p.head_dim_v, config.v_tile().panels() * tile::kPanelColumns);
  params.scale = p.scale;
  params.scale_log2 = p.scale * core::kLog2E;  // positive: a masked score stays -inf
  params.lse = p.wants_lse ? t.lse : nullptr;
  params.lse_head = p.packed_q ? p.total_q : p.seqlen_q;
  params.lse_batch = p.packed_q ? 0 : p.heads_q * p.seqlen_q;
  params.max_logit = t.max_logit;
  params.output_f32 = p.output_f32;
  params.counter =
      plan.workspace.zeroed_bytes != 0 ? static_cast<std::int32_t*>(workspace) : nullptr;
  params.no_keys = rows_k == 0;
  params.zero_tail = p.packed_k || p.has_seqused_k || params.no_keys;
  params.clipped = !p.packed_q && !p.has_seqused_q;
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.o = t.o;
  params.o_low = p.wants_o_low ? t.o_low : nullptr;
  params.v = t.v;
  params.o_strides = strides_of(p.o, p.packed_q);
  params.v_strides = strides_of(p.v, p.packed_k);
  const std::int64_t low_row = p.heads_q * p.head_dim_v;
  params.low_strides = Strides{p.packed_q ? 0 : p.seqlen_q * low_row, low_row, p.head_dim_v};
  params.sinks = p.variant.has_sinks ? t.variant.sinks : nullptr;
  params.k_begin = t.k_begin;
  params.mask_shift = t.mask_shift;
  params.block_table = t.block_table;
  params.table_stride = p.table_stride;
  params.page_size = core::FastDivmod(static_cast<int>(paged ? p.page_size : 1));
  params.page_chunk = page_chunk(p.page_size, config.tile_k);
  params.pages = static_cast<int>(p.pages);
  return params;
}

// Launches a kernel of `config` whose tensors are those of a plan: `kernel` is the address of one
// that is in the library, or the handle of one with hooks. It takes `variant`, if not null.
inline Status launch_forward_kernel(const ForwardConfig& config, const void* kernel,
                                    cuda::PreparedDevices& prepared, const ForwardPlan& plan,
                                    const ForwardTensors& tensors,
                                    const attn::VariantParams* variant, void* workspace,
                                    cudaStream_t stream) {
  const int device = plan.device.device.index;
  const cuda::DeviceGuard guard(device);
  if (!guard.status().ok()) {
    return guard.status();
  }
  ForwardMaps maps;
  const Status status = forward_maps(config, plan.problem, tensors, &maps);
  if (!status.ok()) {
    return status;
  }
  ForwardParams params = forward_params(config, plan, tensors, workspace);
  cuda::Launch how{dim3(static_cast<unsigned>(plan.blocks)),
                   dim3(static_cast<unsigned>(config.threads())), config.shared_bytes(), stream};
  how.prepared = &prepared;
  how.device = device;
  void* pointers[] = {&maps, &params, const_cast<attn::VariantParams*>(variant)};
  return cuda::launch("launching the Hopper forward", how, kernel, pointers);
}

template <class Shape, DType kDType>
Status launch_forward_shape(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                            cudaStream_t stream) {
  static cuda::PreparedDevices prepared{0};
  const auto kernel = forward_kernel<Shape, kDType>;
  return launch_forward_kernel(Shape::kConfig, reinterpret_cast<const void*>(kernel), prepared,
                               plan, tensors, nullptr, workspace, stream);
}

// A kernel with hooks, compiled at its first use. `kernels`: those of the row, by their hooks.
inline Status launch_forward_hooks(const ForwardShapes& shapes, const ForwardPlan& plan,
                                   const ForwardTensors& tensors, void* workspace,
                                   cudaStream_t stream, VariantKernels& kernels) {
  const bool main = plan.tile_q == shapes.main.tile_q() && plan.tile_k == shapes.main.tile_k;
  const jit::LoadedKernel* kernel = nullptr;
  const Status status = kernels.find(plan, main ? 0 : 1, stream, &kernel);
  if (!status.ok()) {
    return status;
  }
  attn::VariantParams variant = variant_params(plan.problem, tensors.variant);
  if (variant_hooks(plan.problem).mask_forms != 0) {
    const ListLayout lists = forward_lists(plan);
    const ListedWork work{forward_order(plan.problem, plan.kernel->mask, plan.tile_q)};
    const cuda::DeviceGuard guard(plan.device.device.index);
    const Status made = guard.status().ok()
                            ? make_lists(false, plan.problem, tensors, lists, plan.tile_q,
                                         plan.tile_k, work, workspace, stream)
                            : guard.status();
    if (!made.ok()) {
      return made;
    }
    variant.lists = lists.at(workspace);
  }
  return launch_forward_kernel(forward_config(plan), kernel->handle, kernel->prepared, plan,
                               tensors, &variant, workspace, stream);
}

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                      void* stream) {
  if (plan.blocks == 0) {
    return Status();  // no rows
  }
  constexpr ForwardShapes kShapes = forward_shapes(kHeadDim, kHeadDimV, kMask);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  using Main = ForwardVariant<kHeadDim, kHeadDimV, kMask, false>;
  using Other = ForwardVariant<kHeadDim, kHeadDimV, kMask, true>;
  if (variant_hooks(plan.problem).any()) {
    static VariantKernels kernels;
    return launch_forward_hooks(kShapes, plan, tensors, workspace, cuda_stream, kernels);
  }
  if constexpr (kShapes.has_other) {
    if (plan.tile_q == Other::kConfig.tile_q() && plan.tile_k == Other::kConfig.tile_k) {
      return launch_forward_shape<Other, kDType>(plan, tensors, workspace, cuda_stream);
    }
  }
  return launch_forward_shape<Main, kDType>(plan, tensors, workspace, cuda_stream);
}

}  // namespace pantile::hopper
