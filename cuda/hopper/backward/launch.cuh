// Host half of the backward: turns a plan and pointers into maps and parameters and launches
//
//   1 bound_keys         (deterministic only) maxima of K and V, for the integer units of dQ; or a
//                        copy of those that the caller gives
//   2 prepare_rows       row terms, zeros in the sum of dQ
//   3 backward_paired or backward_pipeline
//   4 finish_rows        dQ
//   5 settle_units, 3, 4 (deterministic only) again for heads with keys too loud for a bound;
//                        nearly always there is none, and none of them does anything
//
// on one stream. Nothing waits for the GPU or allocates, and all that changes from call to call is
// passed by value, so that a CUDA graph can capture it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/key_statistics.cuh"
#include "core/dropout.h"
#include "core/softmax_state.h"
#include "driver.h"
#include "hopper/backward/kernel_paired.cuh"
#include "hopper/backward/kernel_pipeline.cuh"
#include "hopper/backward/key_order.h"
#include "hopper/backward/variant.h"
#include "hopper/backward/workspace.h"
#include "hopper/mask_lists.h"
#include "hopper/row_kernels.h"
#include "hopper/sequence_map.h"
#include "hopper/variant.h"
#include "pantile/plan.h"
#include "pantile/problem.h"

namespace pantile::hopper {

// Everything about one call that is not a template parameter.
class BackwardCall {
 public:
  BackwardCall(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
               cudaStream_t stream)
      : plan_(plan),
        hooks_(variant_hooks(plan.problem)),
        problem_(plan.problem),
        forward_(plan.problem.forward),
        tensors_(tensors),
        offsets_(backward_workspace(plan.problem, plan.kernel->head_dim)),
        workspace_(static_cast<std::uint8_t*>(workspace)),
        stream_(stream),
        device_(plan.device.device.index),
        queries_(side(forward_.seqlen_q, tensors.forward.cu_seqlens_q, tensors.forward.seqused_q)),
        keys_(side(forward_.seqlen_k, tensors.forward.cu_seqlens_k, tensors.forward.seqused_k)),
        row_tiles_(numbers(counted_rows(forward_), plan.tile_q, queries_.cu_seqlens)),
        key_tiles_(numbers(counted_keys(forward_), plan.tile_k, keys_.cu_seqlens)),
        multiprocessors_(core::max_of(plan.device.multiprocessors, 1)),
        main_blocks_(plan.blocks),
        key_work_(static_cast<int>(key_work(forward_, plan.tile_k))),
        kernel_head_dim_(plan.kernel->head_dim),
        dq_tile_floats_(dq_tile_floats(plan.kernel->head_dim)),
        mask_(core::make_mask(0, 0, forward_.window_left, forward_.window_right)) {}

  template <class Config, MaskKind kMask, SumKind kSum>
  Status run() const {
    if (problem_.key_statistics == KeyStatistics::written) {
      return write_key_statistics<Config>();
    }
    Status status =
        hooks_.mask_forms != 0 && main_blocks_ > 0
            ? make_lists(true, forward_, tensors_.forward, backward_lists(plan_), Config::kTileQ,
                         Config::kTileK, listed_work<kMask>(), workspace_, stream_)
            : Status();
    if (status.ok()) {
      status = clear_variant_gradients(problem_, tensors_, offsets_, workspace_, stream_);
    }
    if (status.ok() && kSum == SumKind::integer && key_work_ > 0) {
      status = bound_keys<Config>();
    }
    if (status.ok()) {
      status = prepare<Config, kSum>(row_blocks());
    }
    if (status.ok() && main_blocks_ > 0) {
      status = run_main<Config, kMask, kSum>(false);
    }
    if (status.ok() && row_blocks() > 0) {
      status = finish<Config, kSum>(false);
    }
    if (kSum == SumKind::integer && status.ok() && main_blocks_ > 0 && row_blocks() > 0) {
      status = settle<Config>();
      if (status.ok()) {
        status = run_main<Config, kMask, kSum>(true);
      }
      if (status.ok()) {
        status = finish<Config, kSum>(true);
      }
    }
    return status.ok() ? finish_variant_gradients() : status;
  }

 private:
  static core::SequenceSide side(std::int64_t length, const std::int32_t* cu_seqlens,
                                 const std::int32_t* seqused) {
    core::SequenceSide result;
    result.max_length = static_cast<int>(length);
    result.cu_seqlens = cu_seqlens;
    result.seqused = seqused;
    return result;
  }

  common::TileNumbers numbers(std::int64_t rows, int tile, const std::int32_t* cu_seqlens) const {
    return common::TileNumbers{tile, static_cast<int>(forward_.batch),
                               static_cast<int>(core::ceil_div<std::int64_t>(rows, tile)),
                               cu_seqlens};
  }

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }

  // Of LSE and its gradient: [batch][heads_q][seqlen_q], packed [heads_q][total_q].
  std::int64_t lse_head_stride() const {
    return forward_.packed_q ? forward_.total_q : forward_.seqlen_q;
  }
  std::int64_t lse_batch_stride() const {
    return forward_.packed_q ? 0 : forward_.seqlen_q * forward_.heads_q;
  }

  int row_blocks() const { return static_cast<int>(offsets_.row_tile_count * forward_.heads_q); }

  common::RowPass row_pass(SumKind sum) const {
    common::RowPass pass;
    pass.queries = queries_;
    pass.keys = keys_;
    pass.row_tiles = row_tiles_;
    pass.row_tile_count = static_cast<int>(offsets_.row_tile_count);
    pass.heads_q = static_cast<int>(forward_.heads_q);
    pass.group = static_cast<int>(forward_.heads_q / forward_.heads_k);
    pass.window_left = mask_.left;
    pass.window_right = mask_.right;
    pass.tile_floats = dq_tile_floats_;
    pass.scale = forward_.scale;
    pass.delta_factor = 1.0f / core::dropout_scale(forward_.variant.dropout);
    pass.capped_lse = takes_raw_scores(forward_.variant);
    pass.sinks = forward_.variant.has_sinks ? tensors_.forward.variant.sinks : nullptr;
    pass.dq_sum = at<float>(offsets_.dq_sum);
    pass.lse_terms = at<uint4>(offsets_.lse_terms);
    pass.delta_terms = at<uint4>(offsets_.delta_terms);
    const bool integer = sum == SumKind::integer;
    pass.key_bounds = integer ? at<core::KeyBounds>(offsets_.key_bounds) : nullptr;
    pass.measured = integer ? at<int>(offsets_.measured) : nullptr;
    // Behind a softcap and its like, rows of what dQ is made of do not sum to a known number.
    const bool leak = problem_.has_o_low && !pass.capped_lse;
    pass.key_means = leak ? at<float>(offsets_.key_means) : nullptr;
    pass.large_means = leak ? at<int>(offsets_.large_means) : nullptr;
    pass.row_sums = leak ? at<float>(offsets_.row_sums) : nullptr;
    pass.key_mean_columns = panels(kernel_head_dim_) * kPanel;
    pass.row_max = integer ? at<std::uint32_t>(offsets_.row_max) : nullptr;
    return pass;
  }

  bool gives_statistics() const { return problem_.key_statistics == KeyStatistics::given; }

  common::KeyStatisticsCopy key_statistics() const {
    return common::KeyStatisticsCopy(forward_, row_pass(SumKind::integer), tensors_.key_statistics,
                                     stream_);
  }

  // Of the keys of this call, which has no other result.
  template <class Config>
  Status write_key_statistics() const {
    Status status = bound_keys<Config>();
    if (status.ok()) {
      status = prepare<Config, SumKind::integer>(0);
    }
    return status.ok() ? key_statistics().give() : status;
  }

  template <class Config>
  Status bound_keys() const {
    const Status status =
        cuda::check(cudaMemsetAsync(at<void>(offsets_.measured), 0,
                                    offsets_.zeroed_end - offsets_.measured, stream_),
                    "cudaMemsetAsync");
    if (!status.ok() || gives_statistics() || key_work_ == 0) {
      return status.ok() && gives_statistics() ? key_statistics().take() : status;
    }
    cuda::Launch how = launch_of(key_work_, common::kBoundThreads);
    how.early = false;
    return launch_bound_keys<Config::kDType>(
        how, common::key_bounds_params(forward_, tensors_.forward, row_pass(SumKind::integer),
                                       key_tiles_));
  }

  // `row_blocks` is that of the call, or 0, for the means of the keys alone.
  template <class Config, SumKind kSum>
  Status prepare(int row_blocks) const {
    common::PrepareParams params;
    params.pass = row_pass(kSum);
    if (row_blocks == 0) {
      params.pass.row_tile_count = 0;
    }
    params.o = tensors_.forward.o;
    params.grad_o = tensors_.grad_o;
    params.o_layout = forward_.o;
    params.grad_o_layout = problem_.grad_o;
    params.o_low = problem_.has_o_low ? tensors_.o_low : nullptr;
    params.seqlen_q = forward_.seqlen_q;
    params.head_dim_v = static_cast<int>(forward_.head_dim_v);
    params.claimed = at<int>(offsets_.claimed);
    params.lse = tensors_.forward.lse;
    params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
    params.lse_head_stride = lse_head_stride();
    params.lse_batch_stride = lse_batch_stride();
    params.keys.k = tensors_.forward.k;
    params.keys.k_layout = forward_.k;
    params.keys.head_dim = static_cast<int>(forward_.head_dim);
    params.key_mean_blocks = params.pass.key_means != nullptr && !gives_statistics()
                                 ? static_cast<int>(forward_.batch * forward_.heads_k)
                                 : 0;
    constexpr bool kInteger = kSum == SumKind::integer;
    cuda::Launch how =
        launch_of(core::max_of(row_blocks, 1) + params.key_mean_blocks, common::kPrepareThreads);
    how.early = kInteger && key_work_ > 0 && !gives_statistics();  // beside the last of bound_keys
    return launch_prepare_rows<Config::kDType, Config::kTileQ, threads_per_row(Config::kHeadDimV),
                               kInteger>(how, params);
  }

  template <class Config>
  Status encode_maps(BackwardMaps* maps) const {
    const std::int64_t query_batch = forward_.packed_q ? 1 : forward_.batch;
    const std::int64_t key_batch = forward_.packed_k ? 1 : forward_.batch;
    const std::int64_t rows = counted_rows(forward_);
    const std::int64_t keys = counted_keys(forward_);
    const SequenceTensor tensors[] = {
        {"q", tensors_.forward.q, forward_.q, forward_.head_dim, rows, forward_.heads_q,
         query_batch},
        {"grad_o", tensors_.grad_o, problem_.grad_o, forward_.head_dim_v, rows, forward_.heads_q,
         query_batch},
        {"k", tensors_.forward.k, forward_.k, forward_.head_dim, keys, forward_.heads_k, key_batch},
        {"v", tensors_.forward.v, forward_.v, forward_.head_dim_v, keys, forward_.heads_k,
         key_batch}};
    CUtensorMap* const targets[] = {&maps->q, &maps->grad_o, &maps->k, &maps->v};
    Status status;
    for (int i = 0; i < 4 && status.ok(); ++i) {
      status = encode_sequence_map(tensors[i], Config::kDType,
                                   i < 2 ? Config::kTileQ : Config::kTileK, targets[i]);
    }
    return status;
  }

  template <MaskKind kMask>
  core::TileOrder key_order() const {
    return backward_key_order(forward_, key_tiles_.tiles_per_sequence, main_blocks_,
                              kMask == MaskKind::causal || hooks_.mask_forms != 0);
  }

  template <MaskKind kMask>
  ListedWork listed_work() const {
    return forward_.packed_k ? ListedWork{core::TileOrder(), true} : ListedWork{key_order<kMask>()};
  }

  template <class Config>
  Status settle() const {
    SettleParams<Config::kTileQ> params;
    params.pass = row_pass(SumKind::integer);
    params.tile_k = Config::kTileK;
    params.claimed = at<int>(offsets_.claimed);
    const int blocks = core::min_of(row_blocks(), 2 * multiprocessors_);
    return launch_settle_units(launch_of(blocks, common::kSettleThreads), params);
  }

  template <MaskKind kMask>
  BackwardParams main_params(SumKind sum, bool repeats) const {
    BackwardParams params;
    params.queries = queries_;
    params.keys = keys_;
    params.row_tiles = row_tiles_;
    params.key_tiles = key_tiles_;
    params.order = forward_.packed_k ? core::TileOrder() : key_order<kMask>();
    params.key_heads = core::FastDivmod(static_cast<int>(forward_.heads_k));
    params.query_extent = static_cast<int>(counted_rows(forward_));
    params.key_extent = static_cast<int>(counted_keys(forward_));
    params.heads_q = static_cast<int>(forward_.heads_q);
    params.heads_k = static_cast<int>(forward_.heads_k);
    params.group = static_cast<int>(forward_.heads_q / forward_.heads_k);
    params.window_left = mask_.left;
    params.window_right = mask_.right;
    params.head_dim = static_cast<int>(forward_.head_dim);
    params.head_dim_v = static_cast<int>(forward_.head_dim_v);
    params.scale = forward_.scale;
    params.scale_log2 = forward_.scale * core::kLog2E;
    params.masked_score = forward_.scale > 0.0f ? -core::kInfinity : core::kInfinity;
    params.row_tile_count = offsets_.row_tile_count;
    params.work_count = key_work_;
    const common::RowPass pass = row_pass(sum);
    params.key_bounds = pass.key_bounds;
    params.row_max = pass.row_max;
    params.measured = pass.measured;
    params.repeats = repeats;
    params.large_means = pass.large_means;
    params.row_sums = pass.row_sums;
    params.claimed = at<int>(offsets_.claimed);
    params.dq_sum = at<float>(offsets_.dq_sum);
    params.lse_terms = at<uint4>(offsets_.lse_terms);
    params.delta_terms = at<uint4>(offsets_.delta_terms);
    params.grad_k = tensors_.grad_k;
    params.grad_v = tensors_.grad_v;
    params.grad_k_layout = problem_.grad_k;
    params.grad_v_layout = problem_.grad_v;
    return params;
  }

  template <class Config, MaskKind kMask, SumKind kSum>
  Status run_main(bool repeats) const {
    BackwardMaps maps;
    Status status = encode_maps<Config>(&maps);
    if (!status.ok()) {
      return status;
    }
    BackwardParams params = main_params<kMask>(kSum, repeats);
    static cuda::PreparedDevices prepared{0};
    cuda::Launch how = launch_of(main_blocks_, Config::kThreads);
    how.prepared = &prepared;
    how.device = device_;
    how.shared_bytes = kStorageBytes<Storage<Config>>;
    constexpr const char* kName = "the main backward kernel";
    if (hooks_.any()) {
      static VariantKernels kernels;
      const jit::LoadedKernel* kernel = nullptr;
      status = kernels.find(plan_, kSum == SumKind::integer ? 1 : 0, stream_, &kernel);
      if (!status.ok()) {
        return status;
      }
      how.prepared = &kernel->prepared;
      attn::VariantParams variant =
          backward_variant_params(problem_, tensors_, offsets_, workspace_);
      if (hooks_.mask_forms != 0) {
        variant.lists = backward_lists(plan_).at(workspace_);
      }
      void* pointers[] = {&maps, &params, &variant};
      return cuda::launch(kName, how, kernel->handle, pointers);
    }
    if constexpr (Config::kTileK == 128) {
      return cuda::launch(kName, how, backward_paired<Config, kMask, kSum>, maps, params);
    } else {
      return cuda::launch(kName, how, backward_pipeline<Config, kMask, kSum>, maps, params);
    }
  }

  // ---- gradients of the variant's tensors

  Status finish_variant_gradients() const {
    Status status;
    if (problem_.wants_grad_sinks) {
      common::SinkParams params;
      params.pass = row_pass(SumKind::floating);
      params.lse = tensors_.forward.lse;
      params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
      params.lse_head_stride = lse_head_stride();
      params.lse_batch_stride = lse_batch_stride();
      params.keep_scale = core::dropout_scale(forward_.variant.dropout);
      params.grad_sinks = tensors_.variant.sinks;
      status = launch_sum_sinks(
          launch_of(static_cast<int>(forward_.heads_q), common::kVariantThreads), params);
    }
    if (status.ok() && problem_.wants_grad_alibi) {
      common::SlopeParams params;
      params.parts = at<float>(offsets_.slope_parts);
      params.key_tiles = key_tiles_;
      params.tiles = static_cast<int>(offsets_.key_tile_count);
      params.parts_per_tile = kSlopeParts;
      params.heads = static_cast<int>(forward_.heads_q);
      params.batch = static_cast<int>(forward_.batch);
      params.by_batch = forward_.variant.alibi_by_batch;
      params.keep_scale = core::dropout_scale(forward_.variant.dropout);
      params.grad_slopes = tensors_.variant.alibi_slopes;
      const int slopes = params.heads * (params.by_batch ? params.batch : 1);
      status = launch_sum_slopes(launch_of(slopes, common::kVariantThreads), params);
    }
    return status.ok() ? sum_bias_parts(problem_, tensors_, offsets_, workspace_, stream_) : status;
  }

  template <class Config, SumKind kSum>
  Status finish(bool repeats) const {
    using common::SumFormat;
    constexpr SumFormat kFormat = kSum == SumKind::floating ? SumFormat::f32
                                  : Config::kBulkAdds       ? SumFormat::i32
                                                            : SumFormat::i32x2;
    common::FinishParams params;
    params.pass = row_pass(kSum);
    params.grad_q = tensors_.grad_q;
    params.grad_q_layout = problem_.grad_q;
    params.head_dim = static_cast<int>(forward_.head_dim);
    params.tile_k = Config::kTileK;
    params.rows_split = Config::kTileQ == 128;
    params.grad_scale = forward_.scale * core::dropout_scale(forward_.variant.dropout);
    params.lse = tensors_.forward.lse;
    params.grad_lse = problem_.has_grad_lse ? tensors_.grad_lse : nullptr;
    params.lse_head_stride = lse_head_stride();
    params.lse_batch_stride = lse_batch_stride();
    const int fragments = dq_tile_floats_ / common::kFragmentFloats;
    params.blocks = row_blocks() * fragments;
    params.repeats = repeats;
    const int blocks = repeats ? core::min_of(params.blocks, 8 * multiprocessors_) : params.blocks;
    return launch_finish_rows<Config::kDType, kFormat>(launch_of(blocks, common::kFinishThreads),
                                                       params);
  }

  cuda::Launch launch_of(int blocks, int threads) const {
    return {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0, stream_};
  }

  template <class Config>
  using Storage =
      std::conditional_t<Config::kTileK == 128, PairedStorage<Config>, PipelineStorage<Config>>;

  const BackwardPlan& plan_;
  const VariantHooks hooks_;
  const BackwardProblem& problem_;
  const ForwardProblem& forward_;
  const BackwardTensors& tensors_;
  const BackwardWorkspace offsets_;
  std::uint8_t* const workspace_;
  const cudaStream_t stream_;
  const int device_;
  const core::SequenceSide queries_, keys_;
  const common::TileNumbers row_tiles_, key_tiles_;
  const int multiprocessors_;
  const int main_blocks_;
  const int key_work_;
  const int kernel_head_dim_;
  const int dq_tile_floats_;
  const core::Mask mask_;  // only its window
};

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                       void* stream) {
  using Floating = BackwardConfig<kDType, kHeadDim, kHeadDimV, SumKind::floating>;
  using Integer = BackwardConfig<kDType, kHeadDim, kHeadDimV, SumKind::integer>;
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  const BackwardCall call(plan, tensors, workspace, static_cast<cudaStream_t>(stream));
  return plan.problem.deterministic ? call.run<Integer, kMask, SumKind::integer>()
                                    : call.run<Floating, kMask, SumKind::floating>();
}

}  // namespace pantile::hopper
