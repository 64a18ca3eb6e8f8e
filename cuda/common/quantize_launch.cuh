// Launches the FP8 quantiser and the dequantiser: one kernel, or three with K smoothing. Allocates
// nothing and waits for nothing; may be captured into a CUDA graph.
#pragma once

#include "common/dequantize.cuh"
#include "common/quantize.cuh"
#include "common/quantize_mean.cuh"
#include "driver.h"
#include "pantile/quantize.h"

namespace pantile::common {

// Everything about one call that is not a template parameter.
class QuantizeCall {
 public:
  // may_overlap: kernels may start while the one before them drains, because they are compiled for
  // a target where they wait for it themselves (prim/grid_dependency.cuh).
  QuantizeCall(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
               cudaStream_t stream, bool may_overlap)
      : plan_(plan),
        p_(plan.problem.forward),
        t_(tensors),
        sizes_(quantized_sizes(p_)),
        partial_(static_cast<float*>(workspace)),
        stream_(stream),
        may_overlap_(may_overlap) {}

  // kMostDim: the largest head dim of the row.
  template <DType kDType, int kMostDim>
  Status run() const {
    const cuda::DeviceGuard guard(plan_.device.device.index);
    if (!guard.status().ok()) {
      return guard.status();
    }
    const std::int64_t dim = p_.head_dim;
    if constexpr (kMostDim > 128) {
      return dim <= 64    ? run_dim<kDType, 64>()
             : dim <= 128 ? run_dim<kDType, 128>()
                          : run_dim<kDType, 256>();
    } else {
      return dim <= 64 ? run_dim<kDType, 64>() : run_dim<kDType, 128>();
    }
  }

 private:
  template <DType kDType, int kDim>
  Status run_dim() const {
    if constexpr (kDType != DType::e4m3) {
      if (plan_.problem.dequantize) {
        return launch(dequantize_kernel<kDType, kDim>, dim3(static_cast<unsigned>(plan_.blocks)),
                      dim3(RowDequantizer<kDType, kDim>::kThreads), numbers_params(), false,
                      "launching the FP8 dequantiser");
      }
    }
    const bool smooth = p_.fp8.smooth_k && p_.heads_k * sizes_.blocks_k > 0;
    if (smooth) {
      const Status status = run_mean<kDType, kDim>();
      if (!status.ok()) {
        return status;
      }
    }
    using Rows = RowQuantizer<kDType, kDim>;
    return launch(quantize_kernel<kDType, kDim>, dim3(static_cast<unsigned>(plan_.blocks)),
                  dim3(Rows::kThreads), params(), smooth, "launching the FP8 quantiser");
  }

  template <DType kDType, int kDim>
  Status run_mean() const {
    const MeanParams mean{side_k(),      static_cast<int>(p_.batch), partial_, t_.mean_k,
                          turned_mean(), plan_.problem.hadamard};
    const auto blocks = static_cast<unsigned>(p_.heads_k * sizes_.blocks_k);
    const Status status = launch(sum_keys_kernel<kDType, kDim>, dim3(blocks), dim3(2 * kDim), mean,
                                 false, "launching the sums of K");
    if (!status.ok()) {
      return status;
    }
    const dim3 grid(static_cast<unsigned>(core::ceil_div<std::int64_t>(p_.head_dim, 32)),
                    static_cast<unsigned>(p_.heads_k), static_cast<unsigned>(p_.batch));
    return launch(mean_keys_kernel<kDType>, grid, dim3(32, 32), mean, true,
                  "launching the mean of K");
  }

  // `early`: may start while the kernel before it drains.
  template <class Kernel, class Params>
  Status launch(Kernel kernel, dim3 grid, dim3 block, const Params& params, bool early,
                const char* what) const {
    return cuda::launch(what, cuda::Launch{grid, block, 0, stream_, early && may_overlap_}, kernel,
                        params);
  }

  QuantizeSide side(const void* data, const Layout& layout, std::int64_t length,
                    const std::int32_t* cu_seqlens, const std::int32_t* seqused, std::int64_t heads,
                    std::int64_t dim, std::int64_t blocks) const {
    core::SequenceSide sequences;
    sequences.batch_stride = layout.batch;
    sequences.seq_stride = layout.seq;
    sequences.max_length = static_cast<int>(length);
    sequences.cu_seqlens = cu_seqlens;
    sequences.seqused = seqused;
    return {data,
            sequences,
            layout.head,
            static_cast<int>(heads),
            static_cast<int>(dim),
            static_cast<int>(blocks),
            static_cast<int>(core::ceil_div<std::int64_t>(length, core::kBlockedRows))};
  }

  // Behind the sums in the workspace.
  float* turned_mean() const { return partial_ + p_.heads_k * sizes_.blocks_k * p_.head_dim; }

  QuantizeSide side_k() const {
    return side(t_.k, plan_.problem.k, p_.seqlen_k, t_.cu_seqlens_k, t_.seqused_k, p_.heads_k,
                p_.head_dim, sizes_.blocks_k);
  }

  DequantizeParams numbers_params() const {
    const QuantizeProblem& problem = plan_.problem;
    DequantizeParams params{};
    params.sides[0] = side(nullptr, problem.q, p_.seqlen_q, t_.cu_seqlens_q, t_.seqused_q,
                           p_.heads_q, p_.head_dim, sizes_.blocks_q);
    params.sides[1] = side_k();
    params.sides[2] = side(nullptr, problem.v, p_.seqlen_k, t_.cu_seqlens_k, t_.seqused_k,
                           p_.heads_k, p_.head_dim_v, sizes_.blocks_k);
    const int whole = problem.hadamard ? core::hadamard_group(static_cast<int>(p_.head_dim)) : 1;
    const int group = problem.keep_rotation ? 1 : whole;
    const auto balance = static_cast<float>(core::rotation_balance(whole));
    const float factor_q = 1.0f / (problem.keep_rotation ? balance : static_cast<float>(whole));
    const float factor_k = problem.keep_rotation ? balance : 1.0f;
    const auto codes = [](const void* x) { return static_cast<const std::uint8_t*>(x); };
    // The scale of Q holds the group once, which stands in for the 1 / group of the rotation.
    params.out[0] = {t_.restored_q, codes(t_.codes_q), t_.scale_q, p_.fp8.block_q, 1,
                     group,         factor_q};
    params.out[1] = {t_.restored_k, codes(t_.codes_k), t_.scale_kv, p_.fp8.block_k, 2,
                     group,         factor_k};
    params.out[2] = {t_.restored_v, codes(t_.codes_v), t_.scale_kv + 1, p_.fp8.block_k, 2, 1, 1.0f};
    params.batch = static_cast<int>(p_.batch);
    return params;
  }

  QuantizeParams params() const {
    const QuantizeProblem& problem = plan_.problem;
    QuantizeParams params{};
    params.sides[0] = side(t_.q, problem.q, p_.seqlen_q, t_.cu_seqlens_q, t_.seqused_q, p_.heads_q,
                           p_.head_dim, sizes_.blocks_q);
    params.sides[1] = side_k();
    params.sides[2] = side(t_.v, problem.v, p_.seqlen_k, t_.cu_seqlens_k, t_.seqused_k, p_.heads_k,
                           p_.head_dim_v, sizes_.blocks_k);
    const int dim = static_cast<int>(p_.head_dim);
    const int group = problem.hadamard ? core::hadamard_group(dim) : 1;
    RowsOutput rows{};
    rows.mean = p_.fp8.smooth_k ? turned_mean() : nullptr;
    rows.hadamard_group = group;
    rows.group_inverse = 1.0f / static_cast<float>(group);
    rows.limit = core::score_code_limit(dim);
    RowsOutput& q = params.rows_out[0] = rows;
    q.codes = static_cast<std::uint8_t*>(t_.codes_q);
    q.scales = t_.scale_q;
    q.scale_rows = p_.fp8.block_q;
    q.scale_stride = 1;
    q.scale_factor = static_cast<float>(group);
    q.scale_bound = core::kLargestPower / q.scale_factor;
    q.descale = t_.descale_q;
    q.dot_mean = p_.fp8.smooth_k ? t_.q_dot_mean : nullptr;
    q.heads_per_mean = static_cast<int>(p_.heads_q / p_.heads_k);
    RowsOutput& k = params.rows_out[1] = rows;
    k.codes = static_cast<std::uint8_t*>(t_.codes_k);
    k.scales = t_.scale_kv;
    k.scale_rows = core::kBlockedRows;
    k.scale_stride = 2;
    k.scale_factor = 1.0f;
    k.scale_bound = core::kLargestPower;
    k.descale = t_.descale_k;
    k.heads_per_mean = 1;
    params.v_out = {static_cast<std::uint8_t*>(t_.codes_v), t_.scale_kv + 1, t_.nonfinite_v,
                    t_.descale_v, 2};
    params.batch = static_cast<int>(p_.batch);
    return params;
  }

  const QuantizePlan& plan_;
  const ForwardProblem& p_;
  const QuantizeTensors& t_;
  QuantizedSizes sizes_;
  float* partial_;
  cudaStream_t stream_;
  bool may_overlap_;
};

}  // namespace pantile::common
