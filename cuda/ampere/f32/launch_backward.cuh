// Host side of the fp32 backward: from a plan, pointers and lent memory to launches of
//
//   1 row_terms_f32         minus LSE, dLSE - rowsum(dO * O)
//   2 backward_kernel_f32   dQ
//   3 backward_kernel_f32   dK and dV, by two launches where registers hold one of them
//
// on one stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ampere/f32/backward.cuh"
#include "ampere/f32/config.h"
#include "ampere/f32/row_terms.cuh"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "core/softmax_state.h"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

class BackwardCallF32 {
 public:
  BackwardCallF32(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                  cudaStream_t stream)
      : plan_(plan),
        problem_(plan.problem),
        forward_(plan.problem.forward),
        tensors_(tensors),
        row_terms_(static_cast<float2*>(workspace)),
        stream_(stream) {}

  template <int kHeadDim, Float32Precision kPrecision, SharedClass kShared>
  Status run() const {
    constexpr BackwardTileF32 kTile = backward_tile_f32(kHeadDim, kPrecision, kShared);
    using Config = BackwardConfigF32<kHeadDim, kTile>;
    static_assert(sizeof(BackwardStorageF32<Config>) == backward_shared_bytes(kTile, kHeadDim));
    static_assert(backward_shared_bytes(kTile, kHeadDim) <= shared_class_bytes(kShared));
    Status status;
    if (forward_.batch * forward_.heads_q * counted_rows(forward_) > 0) {
      status = compute_row_terms<kHeadDim>();
    }
    const BackwardParamsF32 params = main_params();
    if (status.ok()) {
      status = launch_gradients<Config, kPrecision, GradientsF32::queries>(params);
    }
    if constexpr (Config::kSplitsKeys) {
      if (status.ok()) {
        status = launch_gradients<Config, kPrecision, GradientsF32::keys>(params);
      }
      return status.ok() ? launch_gradients<Config, kPrecision, GradientsF32::values>(params)
                         : status;
    } else {
      return status.ok()
                 ? launch_gradients<Config, kPrecision, GradientsF32::keys_and_values>(params)
                 : status;
    }
  }

 private:
  template <class Config, Float32Precision kPrecision, GradientsF32 kGradients>
  Status launch_gradients(const BackwardParamsF32& params) const {
    const bool queries = kGradients == GradientsF32::queries;
    const int blocks = (queries ? params.query_order : params.key_order).count();
    if (blocks == 0) {
      return Status();
    }
    static cuda::PreparedDevices prepared{0};
    return cuda::launch(
        "ampere backward f32",
        launch_of(plan_, blocks, Config::kThreads,
                  static_cast<int>(sizeof(BackwardStorageF32<Config>)), stream_, &prepared),
        backward_kernel_f32<Config, kPrecision, kGradients>, params);
  }

  std::int64_t term_rows() const {
    return forward_.packed_q ? forward_.total_q : forward_.batch * forward_.seqlen_q;
  }

  template <int kHeadDim>
  Status compute_row_terms() const {
    RowTermsParamsF32 params;
    params.o = make_operand(tensors_.forward.o, forward_.o, forward_.packed_q);
    params.grad_o = make_operand(tensors_.grad_o, problem_.grad_o, forward_.packed_q);
    params.queries = query_side(forward_, tensors_.forward);
    params.heads_q = static_cast<int>(forward_.heads_q);
    params.head_dim_v = static_cast<int>(forward_.head_dim_v);
    params.lse = tensors_.forward.lse;
    params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
    params.lse_head_stride = forward_.packed_q ? forward_.total_q : forward_.seqlen_q;
    params.lse_batch_stride = forward_.packed_q ? 0 : forward_.seqlen_q * forward_.heads_q;
    params.rows = term_rows();
    params.row_terms = row_terms_;
    const std::int64_t warps = params.rows * params.heads_q;
    const auto blocks = static_cast<int>(core::ceil_div<std::int64_t>(warps, kTermThreadsF32 / 32));
    return cuda::launch("row_terms_f32", launch_of(plan_, blocks, kTermThreadsF32, stream_),
                        row_terms_f32<kHeadDim>, params);
  }

  BackwardParamsF32 main_params() const {
    BackwardParamsF32 params;
    const auto queries = [&](const void* data, const Layout& layout) {
      return make_operand_f32(data, layout, forward_.packed_q);
    };
    const auto keys = [&](const void* data, const Layout& layout) {
      return make_operand_f32(data, layout, forward_.packed_k);
    };
    params.q = queries(tensors_.forward.q, forward_.q);
    params.k = keys(tensors_.forward.k, forward_.k);
    params.v = keys(tensors_.forward.v, forward_.v);
    params.grad_o = queries(tensors_.grad_o, problem_.grad_o);
    params.grad_q = queries(tensors_.grad_q, problem_.grad_q);
    params.grad_k = keys(tensors_.grad_k, problem_.grad_k);
    params.grad_v = keys(tensors_.grad_v, problem_.grad_v);
    params.queries = query_side(forward_, tensors_.forward);
    params.keys = key_side(forward_, tensors_.forward);
    params.query_order = forward_order(forward_, plan_.device, plan_.tile_q);
    params.key_order = backward_order(forward_, plan_.device, plan_.tile_k);
    params.group = static_cast<int>(forward_.heads_k > 0 ? forward_.heads_q / forward_.heads_k : 1);
    const core::Mask mask = core::make_mask(0, 0, forward_.window_left, forward_.window_right);
    params.window_left = mask.left;
    params.window_right = mask.right;
    params.head_dim = static_cast<int>(2 * forward_.head_dim);
    params.head_dim_v = static_cast<int>(2 * forward_.head_dim_v);
    params.q_columns = forward_.scale == 0.0f ? 0 : params.head_dim;
    params.scale = forward_.scale;
    params.scale_log2 = forward_.scale * core::kLog2E;
    params.row_terms = row_terms_;
    params.term_rows = term_rows();
    return params;
  }

  const BackwardPlan& plan_;
  const BackwardProblem& problem_;
  const ForwardProblem& forward_;
  const BackwardTensors& tensors_;
  float2* const row_terms_;
  const cudaStream_t stream_;
};

template <int kHeadDim, Float32Precision kPrecision>
Status launch_backward_f32(const BackwardCallF32& call, const DeviceProps& device) {
  return shared_class(device.smem_optin_bytes) == SharedClass::large
             ? call.run<kHeadDim, kPrecision, SharedClass::large>()
             : call.run<kHeadDim, kPrecision, SharedClass::small>();
}

}  // namespace pantile::ampere
