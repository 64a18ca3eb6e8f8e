// Host side of the backward: from a plan, pointers and lent memory to launches of
//
//   1 bound_keys         (deterministic only) maxima of K and V, for the integer scales of dQ; or a
//                        copy of those that the caller gives
//   2 prepare_rows       row terms, zeros in the sums of dQ, means of keys
//   - sum_sink_gradients (where wanted) gradients of the sinks
//   3 backward_kernel    dK, dV, the sums of dQ
//   4 finish_rows        dQ
//   - sum_slopes, sum_bias (where wanted) gradients of ALiBi's slopes; of a shared bias, if
//                        deterministic
//
// on one stream. Nothing waits for the GPU or allocates, and all that changes from call to call is
// passed by value, so that a CUDA graph can capture it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ampere/backward/kernel.cuh"
#include "ampere/backward/rows.cuh"
#include "ampere/backward/workspace.h"
#include "ampere/launch.cuh"
#include "ampere/order.h"
#include "ampere/row_kernels.h"
#include "ampere/variant.h"
#include "common/bias.h"
#include "common/expressions.h"
#include "common/key_statistics.cuh"
#include "core/softmax_state.h"
#include "driver.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

// Everything about one call that is not a template parameter.
class BackwardCall {
 public:
  BackwardCall(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
               VariantKernels& kernels, cudaStream_t stream)
      : plan_(plan),
        problem_(plan.problem),
        forward_(plan.problem.forward),
        tensors_(tensors),
        offsets_(backward_workspace(
            plan.problem, plan.kernel->head_dim,
            backward_tile(plan.kernel->head_dim, compiled_class(plan.device.smem_optin_bytes)))),
        workspace_(static_cast<std::uint8_t*>(workspace)),
        kernels_(kernels),
        stream_(stream),
        queries_(query_side(forward_, tensors.forward)),
        keys_(key_side(forward_, tensors.forward)),
        mask_(core::make_mask(0, 0, forward_.window_left, forward_.window_right)) {}

  template <class Config, DType kDType, MaskKind kMask>
  Status run() const {
    if (problem_.key_statistics == KeyStatistics::written) {
      return write_key_statistics<Config, kDType>();
    }
    const int row_blocks = static_cast<int>(offsets_.row_tiles * forward_.heads_q);
    const bool has_rows = row_blocks > 0;
    const bool has_keys = plan_.blocks > 0;
    Status status;
    if (has_rows && has_keys && problem_.deterministic) {
      status = bound_keys<kDType>();
    }
    if (status.ok() && has_rows) {
      const PrepareParams params = prepare_params();
      status = cuda::launch("ampere prepare_rows",
                            launch_of(params.key_mean_blocks + row_blocks, kRowThreads),
                            prepare_rows<Config, kDType>, params);
    }
    if (status.ok() && problem_.wants_grad_alibi) {
      status = cuda::check(cudaMemsetAsync(at<void>(offsets_.slope_parts), 0,
                                           slope_bytes(Config::kThreads), stream_),
                           "cudaMemsetAsync");
    }
    if (status.ok()) {
      status = clear_gradients();
    }
    if (status.ok() && problem_.wants_grad_sinks) {
      status = launch_sum_sink_gradients<Config::kTileQ>(
          launch_of(static_cast<int>(forward_.heads_q), kSinkThreads), sink_params());
    }
    if (status.ok() && has_keys) {
      status = run_main<Config, kDType, kMask>(false);
    }
    if (status.ok() && has_rows && has_keys && problem_.deterministic) {
      status = repeat_measured<Config, kDType, kMask>(row_blocks);
    }
    if (status.ok() && has_rows) {
      status = cuda::launch("ampere finish_rows", launch_of(row_blocks, kRowThreads),
                            finish_rows<Config, kDType>, finish_params());
    }
    if (status.ok() && problem_.wants_grad_alibi) {
      status = sum_slopes(Config::kTileK, Config::kThreads / 32);
    }
    return status.ok() ? sum_bias_parts() : status;
  }

 private:
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }

  common::TileNumbers row_tiles() const {
    return common::TileNumbers{
        plan_.tile_q, static_cast<int>(forward_.batch),
        static_cast<int>(core::ceil_div<std::int64_t>(forward_.seqlen_q, plan_.tile_q)),
        queries_.cu_seqlens};
  }

  // Of dQ and dK. With dropout the kernels leave keep_scale out of dS.
  float gradient_scale() const { return forward_.scale * keep_scale(forward_); }

  // Whether it is known what every row of dS, as the kernels have it, sums to: not behind a softcap
  // or a score that is not s plus something.
  bool sums_are_known() const {
    return problem_.has_o_low && forward_.variant.softcap == 0.0f &&
           !common::has_raw_score(forward_.variant);
  }

  // Zeros where the main kernel adds, or leaves out what has no rows.
  Status clear_gradients() const {
    const CapturedTensor* const captured = tensors_.forward.variant.score_captured;
    const std::size_t bias = problem_.wants_grad_bias ? common::grad_bias_bytes(problem_) : 0;
    Status status;
    if (bias > 0) {
      status = cuda::check(cudaMemsetAsync(bias_gradient(), 0, bias, stream_), "cudaMemsetAsync");
    }
    for (int i = 0; i < kMaxCaptured && status.ok(); ++i) {
      const auto bytes = (problem_.wants_grad_captured >> i & 1u) != 0
                             ? static_cast<std::size_t>(captured_elements(captured[i])) * 4
                             : 0;
      if (bytes > 0) {
        status = cuda::check(cudaMemsetAsync(tensors_.variant.captured[i], 0, bytes, stream_),
                             "cudaMemsetAsync");
      }
    }
    return status;
  }

  // Where the main kernel leaves the gradient of the bias.
  float* bias_gradient() const {
    return common::has_bias_parts(problem_) ? at<float>(offsets_.bias_parts)
                                            : tensors_.variant.bias;
  }

  Status sum_bias_parts() const {
    if (!common::has_bias_parts(problem_)) {
      return Status();
    }
    const common::BiasParams params =
        common::bias_params(problem_, bias_gradient(), tensors_.variant.bias);
    const int blocks = params.blocks();
    return blocks == 0 ? Status()
                       : launch_sum_bias(launch_of(blocks, common::kBiasThreads), params);
  }

  int group() const { return static_cast<int>(forward_.heads_q / forward_.heads_k); }

  common::RowPass row_pass() const {
    common::RowPass pass{};
    pass.queries = queries_;
    pass.keys = keys_;
    pass.row_tiles = row_tiles();
    pass.row_tile_count = static_cast<int>(offsets_.row_tiles);
    pass.heads_q = static_cast<int>(forward_.heads_q);
    pass.group = group();
    pass.window_left = mask_.left;
    pass.window_right = mask_.right;
    pass.tile_floats = plan_.tile_q * plan_.kernel->head_dim;
    pass.scale = gradient_scale();
    pass.delta_factor = 1.0f / keep_scale(forward_);
    pass.sinks = forward_.variant.has_sinks ? tensors_.forward.variant.sinks : nullptr;
    pass.dq_sum = at<float>(offsets_.dq_sum);
    if (sums_are_known()) {
      pass.large_means = at<int>(offsets_.large_means);
      pass.key_means = at<float>(offsets_.key_means);
      pass.key_mean_columns = plan_.kernel->head_dim;
      pass.row_sums = at<float>(offsets_.row_sums);
    }
    if (problem_.deterministic) {
      pass.key_bounds = at<core::KeyBounds>(offsets_.key_bounds);
      pass.measured = at<int>(offsets_.measured);
      pass.row_max = at<std::uint32_t>(offsets_.row_max);
    }
    return pass;
  }

  PrepareParams prepare_params() const {
    PrepareParams params;
    params.pass = row_pass();
    params.o = make_operand(tensors_.forward.o, forward_.o, forward_.packed_q);
    params.grad_o = make_operand(tensors_.grad_o, problem_.grad_o, forward_.packed_q);
    params.keys.k = tensors_.forward.k;
    params.keys.k_layout = forward_.k;
    params.keys.head_dim = static_cast<int>(forward_.head_dim);
    params.key_mean_blocks = params.pass.key_means != nullptr && !gives_statistics()
                                 ? static_cast<int>(forward_.batch * forward_.heads_k)
                                 : 0;
    params.o_low = problem_.has_o_low ? tensors_.o_low : nullptr;
    params.o_low_batch_stride = forward_.packed_q ? 0 : forward_.seqlen_q;
    params.head_dim_v = static_cast<int>(forward_.head_dim_v);
    params.lse = tensors_.forward.lse;
    params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
    params.lse_head_stride = lse_head_stride();
    params.lse_batch_stride = lse_batch_stride();
    params.row_terms = at<float>(offsets_.row_terms);
    return params;
  }

  SinkParams sink_params() const {
    const PrepareParams rows = prepare_params();
    SinkParams params;
    params.pass = rows.pass;
    params.grad_sinks = tensors_.variant.sinks;
    params.row_terms = rows.row_terms;
    params.grad_lse = rows.grad_lse;
    params.lse_head_stride = rows.lse_head_stride;
    params.lse_batch_stride = rows.lse_batch_stride;
    return params;
  }

  std::int64_t lse_head_stride() const {
    return forward_.packed_q ? forward_.total_q : forward_.seqlen_q;
  }
  std::int64_t lse_batch_stride() const {
    return forward_.packed_q ? 0 : forward_.seqlen_q * forward_.heads_q;
  }

  BackwardParams main_params(bool repeats) const {
    BackwardParams params;
    params.q = make_operand(tensors_.forward.q, forward_.q, forward_.packed_q);
    params.k = make_operand(tensors_.forward.k, forward_.k, forward_.packed_k);
    params.v = make_operand(tensors_.forward.v, forward_.v, forward_.packed_k);
    params.grad_o = make_operand(tensors_.grad_o, problem_.grad_o, forward_.packed_q);
    params.grad_k = make_operand(tensors_.grad_k, problem_.grad_k, forward_.packed_k);
    params.grad_v = make_operand(tensors_.grad_v, problem_.grad_v, forward_.packed_k);
    params.queries = queries_;
    params.keys = keys_;
    params.order = backward_order(forward_, plan_.device, plan_.tile_k);
    params.row_tiles = row_tiles();
    params.row_tile_count = offsets_.row_tiles;
    params.heads_k = static_cast<int>(forward_.heads_k);
    params.group = group();
    params.window_left = mask_.left;
    params.window_right = mask_.right;
    params.head_dim = static_cast<int>(forward_.head_dim);
    params.head_dim_v = static_cast<int>(forward_.head_dim_v);
    params.q_columns = forward_.scale == 0.0f ? 0 : params.head_dim;
    params.scale = gradient_scale();
    params.scale_log2 = forward_.scale * core::kLog2E;
    params.integer_sums = problem_.deterministic;
    const common::RowPass pass = row_pass();
    params.row_max = pass.row_max;
    params.key_bounds = pass.key_bounds;
    params.measured = pass.measured;
    params.repeats = repeats;
    params.large_means = pass.large_means;
    params.row_sums = pass.row_sums;
    params.dq_sum = at<float>(offsets_.dq_sum);
    params.row_terms = at<float>(offsets_.row_terms);
    return params;
  }

  FinishParams finish_params() const {
    FinishParams params;
    params.pass = row_pass();
    params.grad_q = make_operand(tensors_.grad_q, problem_.grad_q, forward_.packed_q);
    params.head_dim = static_cast<int>(forward_.head_dim);
    params.integer_sums = problem_.deterministic;
    params.row_terms = at<float>(offsets_.row_terms);
    params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
    params.lse_head_stride = lse_head_stride();
    params.lse_batch_stride = lse_batch_stride();
    return params;
  }

  // Heads with keys too loud for a bound, again (core/integer_unit.h). Nearly always there is none,
  // and both kernels end at once.
  template <class Config, DType kDType, MaskKind kMask>
  Status repeat_measured(int row_blocks) const {
    const int blocks = core::min_of(row_blocks, 2 * core::max_of(plan_.device.multiprocessors, 1));
    const SettleParams<Config::kTileQ> params{row_pass(), plan_.tile_k, nullptr,
                                              at<float>(offsets_.row_terms)};
    const Status status = launch_settle_units(launch_of(blocks, common::kSettleThreads), params);
    return status.ok() ? run_main<Config, kDType, kMask>(true) : status;
  }

  template <class Config, DType kDType, MaskKind kMask>
  Status run_main(bool repeats) const {
    static cuda::PreparedDevices prepared{0};
    constexpr int kBytes = static_cast<int>(sizeof(BackwardStorage<Config>));
    const VariantHooks hooks = variant_hooks(problem_);
    if (hooks.any()) {
      return run_variant(Config::kThreads, variant_bytes(hooks, kBytes), repeats);
    }
    return cuda::launch(
        "ampere backward",
        ampere::launch_of(plan_, plan_.blocks, Config::kThreads, kBytes, stream_, &prepared),
        backward_kernel<Config, kDType, kMask>, main_params(repeats));
  }

  // Shared memory of a kernel with hooks; without a bias that it copies, `plain`.
  int variant_bytes(const VariantHooks& hooks, int plain) const {
    const int dims[] = {plan_.kernel->head_dim, plan_.kernel->head_dim_v};
    const SharedClass shared = compiled_class(plan_.device.smem_optin_bytes);
    const BackwardTile tile =
        with_bias_tile(backward_tile(dims[0], shared), dims[0], dims[1], shared);
    return copies_bias(hooks, tile, dims[0], dims[1], shared)
               ? backward_shared_bytes(tile, dims[0], dims[1]) +
                     bias_tile_bytes(tile.tile_q, tile.tile_k)
               : plain;
  }

  // With hooks: a kernel that is compiled at run time, for the same tile.
  Status run_variant(int threads, int bytes, bool repeats) const {
    const jit::LoadedKernel* kernel = nullptr;
    const Status status = kernels_.find(plan_, stream_, &kernel);
    if (!status.ok()) {
      return status;
    }
    BackwardParams params = main_params(repeats);
    attn::VariantParams variant = backward_variant_params(forward_, tensors_.forward.variant);
    variant.grad_alibi_parts = at<float>(offsets_.slope_parts);
    variant.key_tile_count = offsets_.key_tiles;
    if (problem_.wants_grad_bias) {
      common::add_bias_gradient(problem_, bias_gradient(), &variant);
    }
    for (int i = 0; i < kMaxCaptured && problem_.wants_grad_captured != 0; ++i) {
      variant.grad_captured[i] = tensors_.variant.captured[i];
    }
    void* pointers[] = {&params, &variant};
    return cuda::launch(
        "ampere backward with a variant",
        ampere::launch_of(plan_, plan_.blocks, threads, bytes, stream_, &kernel->prepared),
        kernel->handle, pointers);
  }

  std::size_t slope_bytes(int threads) const {
    return static_cast<std::size_t>(offsets_.key_tiles * forward_.heads_q * (threads / 32)) * 4;
  }

  Status sum_slopes(int tile_k, int warps) const {
    common::SlopeParams params;
    params.parts = at<float>(offsets_.slope_parts);
    params.key_tiles = key_tile_numbers(tile_k);
    params.tiles = static_cast<int>(offsets_.key_tiles);
    params.parts_per_tile = warps;
    params.heads = static_cast<int>(forward_.heads_q);
    params.batch = static_cast<int>(forward_.batch);
    params.by_batch = forward_.variant.alibi_by_batch;
    params.keep_scale = keep_scale(forward_);
    params.grad_slopes = tensors_.variant.alibi_slopes;
    const int slopes = params.heads * (params.by_batch ? params.batch : 1);
    return launch_sum_slopes(launch_of(slopes, common::kVariantThreads), params);
  }

  common::TileNumbers key_tile_numbers(int tile_k) const {
    return common::TileNumbers{
        tile_k, static_cast<int>(forward_.batch),
        static_cast<int>(core::ceil_div<std::int64_t>(forward_.seqlen_k, tile_k)),
        keys_.cu_seqlens};
  }

  bool gives_statistics() const { return problem_.key_statistics == KeyStatistics::given; }

  common::KeyStatisticsCopy key_statistics() const {
    return common::KeyStatisticsCopy(forward_, row_pass(), tensors_.key_statistics, stream_);
  }

  // Of the keys of this call, which has no other result.
  template <class Config, DType kDType>
  Status write_key_statistics() const {
    Status status = bound_keys<kDType>();
    const PrepareParams params = prepare_params();
    if (status.ok() && params.key_mean_blocks > 0) {
      status = cuda::launch("ampere prepare_rows", launch_of(params.key_mean_blocks, kRowThreads),
                            prepare_rows<Config, kDType>, params);
    }
    return status.ok() ? key_statistics().give() : status;
  }

  template <DType kDType>
  Status bound_keys() const {
    const Status status =
        cuda::check(cudaMemsetAsync(at<void>(offsets_.measured), 0,
                                    offsets_.zeroed_end - offsets_.measured, stream_),
                    "cudaMemsetAsync");
    if (!status.ok() || gives_statistics()) {
      return status.ok() ? key_statistics().take() : status;
    }
    const std::int64_t counted = forward_.packed_k ? forward_.total_k : forward_.seqlen_k;
    const std::int64_t tiles =
        common::tile_numbers(forward_.packed_k, counted, forward_.batch, plan_.tile_k);
    if (tiles * forward_.heads_k == 0) {
      return status;
    }
    return launch_bound_keys<kDType>(
        launch_of(static_cast<int>(tiles * forward_.heads_k), common::kBoundThreads),
        common::key_bounds_params(forward_, tensors_.forward, row_pass(),
                                  key_tile_numbers(plan_.tile_k)));
  }

  cuda::Launch launch_of(int blocks, int threads) const {
    return ampere::launch_of(plan_, blocks, threads, stream_);
  }

  const BackwardPlan& plan_;
  const BackwardProblem& problem_;
  const ForwardProblem& forward_;
  const BackwardTensors& tensors_;
  const BackwardWorkspace offsets_;
  std::uint8_t* const workspace_;
  VariantKernels& kernels_;  // of the row
  const cudaStream_t stream_;
  const core::SequenceSide queries_, keys_;
  const core::Mask mask_;  // only its window
};

}  // namespace pantile::ampere
