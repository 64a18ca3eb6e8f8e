// Host half of the FP8 backward: turns a plan and pointers into parameters and launches
//
//   1 zero_unused_fp8        (packed or with seqused) rows of the gradients that no sequence uses
//   2 prepare_backward_fp8   images of queries and keys, zeros in the sums of dQ
//   3 backward_fp8           dK, dV, sums of dQ
//   4 finish_backward_fp8    dQ
//
// on one stream. Nothing waits for the GPU or allocates; a CUDA graph can capture it.
#pragma once

#include "core/hadamard.h"
#include "core/softmax_state.h"
#include "driver.h"
#include "hopper/fp8_backward/finish.cuh"
#include "hopper/fp8_backward/kernel.cuh"
#include "pantile/plan.h"

namespace pantile::hopper {

class Fp8BackwardCall {
 public:
  Fp8BackwardCall(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                  cudaStream_t stream)
      : problem_(plan.problem),
        p_(plan.problem.forward),
        t_(tensors),
        sizes_(quantized_sizes(p_)),
        offsets_(fp8_backward_workspace(p_, plan.kernel->head_dim)),
        workspace_(static_cast<std::uint8_t*>(workspace)),
        stream_(stream),
        device_(plan.device.device.index),
        blocks_(plan.blocks),
        queries_(side(p_.seqlen_q, t_.forward.cu_seqlens_q, t_.forward.seqused_q)),
        keys_(side(p_.seqlen_k, t_.forward.cu_seqlens_k, t_.forward.seqused_k)) {}

  template <int kDim>
  Status run() const {
    Status status = zero_unused();
    const std::int64_t images = p_.heads_q * sizes_.blocks_q + p_.heads_k * sizes_.blocks_k;
    if (status.ok() && images > 0) {
      status = cuda::launch("preparing the FP8 backward", how(images, kFp8PrepareThreads),
                            prepare_backward_fp8<kDim>, prepare_params());
    }
    if (status.ok() && blocks_ > 0) {
      static cuda::PreparedDevices prepared{0};
      cuda::Launch launch = how(blocks_, Fp8BackwardConfig::kThreads);
      launch.shared_bytes = kFp8BackwardSharedBytes<kDim>;
      launch.prepared = &prepared;
      launch.device = device_;
      status = cuda::launch("the FP8 backward", launch, backward_fp8<kDim>, main_params());
    }
    if (status.ok() && p_.heads_q * sizes_.blocks_q > 0) {
      status = cuda::launch("dQ of the FP8 backward",
                            how(2 * p_.heads_q * sizes_.blocks_q, kFp8FinishThreads),
                            finish_backward_fp8<kDim>, finish_params());
    }
    return status;
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

  cuda::Launch how(std::int64_t blocks, int threads) const {
    cuda::Launch launch{dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                        0, stream_};
    launch.early = false;
    return launch;
  }

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }

  float balance() const {
    return static_cast<float>(
        core::rotation_balance(core::hadamard_group(static_cast<int>(p_.head_dim))));
  }

  Status zero_unused() const {
    Status status;
    if (p_.packed_q || p_.has_seqused_q) {
      status = zero_rows(queries_, p_.heads_q, p_.packed_q ? p_.total_q : p_.seqlen_q, p_.packed_q,
                         t_.grad_q, problem_.grad_q);
    }
    if (status.ok() && (p_.packed_k || p_.has_seqused_k)) {
      const std::int64_t rows = p_.packed_k ? p_.total_k : p_.seqlen_k;
      status = zero_rows(keys_, p_.heads_k, rows, p_.packed_k, t_.grad_k, problem_.grad_k);
      if (status.ok()) {
        status = zero_rows(keys_, p_.heads_k, rows, p_.packed_k, t_.grad_v, problem_.grad_v);
      }
    }
    return status;
  }

  Status zero_rows(const core::SequenceSide& rows_of, std::int64_t heads, std::int64_t rows,
                   bool packed, void* data, const Layout& layout) const {
    if (rows == 0 || p_.batch == 0) {
      return Status();
    }
    constexpr int kThreads = 64;
    const Fp8UnusedParams params{rows_of,
                                 static_cast<int>(p_.batch),
                                 static_cast<int>(heads),
                                 static_cast<int>(p_.head_dim),
                                 static_cast<int>(rows),
                                 static_cast<std::uint16_t*>(data),
                                 layout};
    cuda::Launch launch = how(rows, kThreads);
    launch.grid.y = packed ? 1u : static_cast<unsigned>(p_.batch);
    return cuda::launch("zeros in unused rows", launch, zero_unused_fp8<kThreads>, params);
  }

  Fp8PrepareParams prepare_params() const {
    const ForwardTensors& f = t_.forward;
    Fp8PrepareParams params{};
    params.queries = queries_;
    params.keys = keys_;
    params.heads_q = static_cast<int>(p_.heads_q);
    params.batch = static_cast<int>(p_.batch);
    params.q_blocks = static_cast<int>(sizes_.blocks_q);
    params.k_blocks = static_cast<int>(sizes_.blocks_k);
    params.head_dim = static_cast<int>(p_.head_dim);
    params.limit = core::gradient_code_limit(params.head_dim);
    params.value_factor = core::value_row_factor(params.head_dim);
    params.scale = p_.scale;
    params.codes_q = static_cast<const std::uint8_t*>(f.q);
    params.codes_k = static_cast<const std::uint8_t*>(f.k);
    params.codes_v = static_cast<const std::uint8_t*>(f.v);
    params.scale_q = f.fp8.scale_q;
    params.q_dot_mean = p_.fp8.smooth_k ? f.fp8.q_dot_mean : nullptr;
    params.o = static_cast<const std::uint16_t*>(f.o);
    params.grad_o = static_cast<const std::uint16_t*>(t_.grad_o);
    params.o_layout = p_.o;
    params.grad_o_layout = problem_.grad_o;
    params.lse = f.lse;
    params.grad_lse = problem_.has_grad_lse ? t_.grad_lse : nullptr;
    params.lse_head = p_.packed_q ? p_.total_q : p_.seqlen_q;
    params.lse_batch = p_.packed_q ? 0 : p_.heads_q * p_.seqlen_q;
    params.row_images = at<std::uint8_t>(offsets_.row_images);
    params.key_images = at<std::uint8_t>(offsets_.key_images);
    params.dq_sum = at<float>(offsets_.dq_sum);
    params.turns = problem_.deterministic ? at<std::int32_t>(offsets_.turns) : nullptr;
    params.ticket = problem_.deterministic ? at<std::int32_t>(offsets_.ticket) : nullptr;
    params.is_f16 = p_.fp8.output == DType::f16;
    return params;
  }

  Fp8BackwardParams main_params() const {
    const core::Mask bounds = core::make_mask(0, 0, p_.window_left, p_.window_right);
    Fp8BackwardParams params{};
    params.queries = queries_;
    params.keys = keys_;
    const auto heads = static_cast<int>(p_.heads_k);
    const auto batch = static_cast<int>(p_.batch);
    // Under a causal mask the first keys are seen by the most queries, of all heads first.
    const int section = p_.window_right == kUnbounded ? 1 : core::max_of(heads * batch, 1);
    params.order = core::TileOrder(
        static_cast<int>(core::ceil_div<std::int64_t>(p_.seqlen_k, core::kBlockedRows)), heads,
        batch, section, core::TileDirection::ascending);
    params.heads_q = static_cast<int>(p_.heads_q);
    params.heads_k = heads;
    params.group = static_cast<int>(p_.heads_q / p_.heads_k);
    params.batch = batch;
    params.window_left = bounds.left;
    params.window_right = bounds.right;
    params.q_blocks = static_cast<int>(sizes_.blocks_q);
    params.k_blocks = static_cast<int>(sizes_.blocks_k);
    params.head_dim = static_cast<int>(p_.head_dim);
    params.scale_log2 = p_.scale * core::kLog2E;
    params.scale_q = p_.scale * balance();
    params.scale_k = p_.scale / balance();
    params.value_units = 1.0f / core::value_row_factor(params.head_dim);
    params.kv_scale = t_.forward.fp8.scale_kv;
    params.row_images = at<const std::uint8_t>(offsets_.row_images);
    params.key_images = at<const std::uint8_t>(offsets_.key_images);
    params.dq_sum = at<float>(offsets_.dq_sum);
    params.turns = problem_.deterministic ? at<std::int32_t>(offsets_.turns) : nullptr;
    params.ticket = problem_.deterministic ? at<std::int32_t>(offsets_.ticket) : nullptr;
    params.grad_k = static_cast<std::uint16_t*>(t_.grad_k);
    params.grad_v = static_cast<std::uint16_t*>(t_.grad_v);
    params.grad_k_layout = problem_.grad_k;
    params.grad_v_layout = problem_.grad_v;
    params.is_f16 = p_.fp8.output == DType::f16;
    return params;
  }

  Fp8FinishParams finish_params() const {
    return Fp8FinishParams{queries_,
                           static_cast<int>(p_.heads_q),
                           static_cast<int>(p_.batch),
                           static_cast<int>(sizes_.blocks_q),
                           static_cast<int>(p_.head_dim),
                           at<const float>(offsets_.dq_sum),
                           static_cast<std::uint16_t*>(t_.grad_q),
                           problem_.grad_q,
                           p_.fp8.output == DType::f16};
  }

  const BackwardProblem& problem_;
  const ForwardProblem& p_;
  const BackwardTensors& t_;
  QuantizedSizes sizes_;
  Fp8BackwardWorkspace offsets_;
  std::uint8_t* workspace_;
  cudaStream_t stream_;
  int device_, blocks_;
  core::SequenceSide queries_, keys_;
};

template <DType kDType, int kHeadDim, int kHeadDimV, MaskKind kMask>
Status launch_backward_fp8(const BackwardPlan& plan, const BackwardTensors& tensors,
                           void* workspace, void* stream) {
  static_assert(kDType == DType::e4m3 && kHeadDim == kHeadDimV && kMask == MaskKind::any);
  const cuda::DeviceGuard guard(plan.device.device.index);
  if (!guard.status().ok()) {
    return guard.status();
  }
  return Fp8BackwardCall(plan, tensors, workspace, static_cast<cudaStream_t>(stream))
      .run<kHeadDim>();
}

}  // namespace pantile::hopper
