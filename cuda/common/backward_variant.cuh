// The last kernels of a backward whose variant has tensors with gradients of their own. Each sums
// numbers of a head in a fixed order: equal inputs give equal bits.
//
//   sum_sinks   dsink[h]  = -sum over its rows of  exp(sink - LSE) * (delta - dLSE)
//   sum_slopes  dslope[h] = -keep_scale * sum over tiles of keys of the parts that the main kernel
//                           has left, sums of dS times the distance
//   sum_bias    dbias     = sum over the heads and sequences that share an element of dS
#pragma once

#include "common/backward_rows.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

inline constexpr int kVariantThreads = 1024;

struct SinkParams {
  RowPass pass;           // with sinks
  const float* lse;       // [batch][heads_q][seqlen_q], packed [heads_q][total_q]
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
  float keep_scale;   // 1 / pass.delta_factor
  float* grad_sinks;  // [heads_q]
};

struct SlopeParams {
  const float* parts;  // [heads_q][tiles][parts_per_tile]
  TileNumbers key_tiles;
  int tiles, parts_per_tile;
  int heads, batch;
  bool by_batch;  // slopes and gradients are [batch][heads], else [heads]
  float keep_scale;
  float* grad_slopes;
};

inline constexpr int kBiasThreads = 256;

struct BiasParams {
  const float* parts;  // [batch][heads][pairs]
  std::int64_t pairs;  // of a query and a key
  std::int64_t heads, batch;
  bool sums_heads, sums_batch;
  float* grad_bias;  // [1 or batch][1 or heads][pairs]

  PANTILE_HD std::int64_t elements() const {
    return pairs * (sums_heads ? 1 : heads) * (sums_batch ? 1 : batch);
  }
  PANTILE_HD int blocks() const {
    return static_cast<int>(
        core::min_of<std::int64_t>(core::ceil_div<std::int64_t>(elements(), kBiasThreads), 65535));
  }
};

// Of a backward with has_bias_parts().
inline BiasParams bias_params(const BackwardProblem& problem, const float* parts,
                              float* grad_bias) {
  const ForwardProblem& forward = problem.forward;
  BiasParams params;
  params.parts = parts;
  params.pairs = forward.seqlen_q * forward.seqlen_k;
  params.heads = forward.heads_q;
  params.batch = forward.batch;
  params.sums_heads = forward.variant.bias.head == 0;
  params.sums_batch = forward.variant.bias.batch == 0;
  params.grad_bias = grad_bias;
  return params;
}

// Over a block of kVariantThreads; all threads get it.
PANTILE_DEVICE float sum_over_block(float x) {
  __shared__ float warps[kVariantThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(prim::kAllLanes, x, step);
  }
  if (prim::lane_index() == 0) {
    warps[threadIdx.x / 32] = x;
  }
  __syncthreads();
  float sum = warps[prim::lane_index()];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(prim::kAllLanes, sum, step);
  }
  return sum;
}

// Of row `row` of a sequence: share of the sink times delta - dLSE. Rows that no key attends to are
// in no tile; their delta is 0.
PANTILE_DEVICE float sink_gradient(const SinkParams& params, const Attended& part, int head,
                                   std::int64_t lse_offset, std::int64_t first_slot, int row) {
  const RowPass& pass = params.pass;
  const float share = sink_share(pass.sinks[head], params.lse[lse_offset + row]);
  const int attended = row - part.first_row;
  if (attended >= 0 && attended < part.mask.rows) {
    return -share * params.keep_scale * term_value(pass.delta_terms[first_slot + attended]);
  }
  return params.grad_lse == nullptr ? 0.0f : -share * params.grad_lse[lse_offset + row];
}

// A block takes a head.
template <int kThreads = kVariantThreads>
__global__ void __launch_bounds__(kThreads) sum_sinks(const __grid_constant__ SinkParams params) {
  prim::wait_for_previous_grid();
  const RowPass& pass = params.pass;
  const int head = static_cast<int>(blockIdx.x);
  const bool packed = pass.queries.cu_seqlens != nullptr;
  float sum = 0.0f;
  for (int batch = 0; batch < pass.row_tiles.batch; ++batch) {
    const core::Sequence queries = core::locate_sequence(pass.queries, batch);
    const core::Sequence keys = core::locate_sequence(pass.keys, batch);
    const Attended part =
        attended_part(core::Mask{queries.length, keys.length, pass.window_left, pass.window_right});
    const std::int64_t lse_offset =
        head * params.lse_head_stride + (packed ? queries.row : batch * params.lse_batch_stride);
    const std::int64_t first_slot =
        (static_cast<std::int64_t>(head) * pass.row_tile_count + pass.row_tiles.first(batch)) *
        pass.row_tiles.tile;
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x); row < queries.length; row += kThreads) {
      sum += sink_gradient(params, part, head, lse_offset, first_slot, row);
    }
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) {
    params.grad_sinks[head] = -sum;
  }
}

// A block takes a slope.
template <int kThreads = kVariantThreads>
__global__ void __launch_bounds__(kThreads) sum_slopes(const __grid_constant__ SlopeParams params) {
  prim::wait_for_previous_grid();
  const int head = static_cast<int>(blockIdx.x) % params.heads;
  const int batch = static_cast<int>(blockIdx.x) / params.heads;
  const std::int64_t begin =
      std::int64_t{params.by_batch ? params.key_tiles.first(batch) : 0} * params.parts_per_tile;
  const std::int64_t end =
      std::int64_t{params.by_batch && batch + 1 < params.batch ? params.key_tiles.first(batch + 1)
                                                               : params.tiles} *
      params.parts_per_tile;
  const float* parts =
      params.parts + static_cast<std::int64_t>(head) * params.tiles * params.parts_per_tile;
  float sum = 0.0f;
  for (std::int64_t i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    sum += parts[i];
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) {
    params.grad_slopes[blockIdx.x] = -params.keep_scale * sum;
  }
}

// A thread takes an element.
template <int kThreads = kBiasThreads>
__global__ void __launch_bounds__(kThreads) sum_bias(const __grid_constant__ BiasParams params) {
  prim::wait_for_previous_grid();
  const std::int64_t elements = params.elements();
  const std::int64_t batch_step = params.heads * params.pairs;
  const std::int64_t heads = params.sums_heads ? params.heads : 1;
  const std::int64_t batches = params.sums_batch ? params.batch : 1;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x);
       i < elements; i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t plane = i / params.pairs;  // [1 or batch][1 or heads]
    const std::int64_t head = params.sums_heads ? 0 : plane % params.heads;
    const std::int64_t batch = params.sums_heads ? plane : plane / params.heads;
    const float* const first =
        params.parts + batch * batch_step + head * params.pairs + i % params.pairs;
    float sum = 0.0f;
    for (std::int64_t b = 0; b < batches; ++b) {
#pragma unroll 4
      for (std::int64_t h = 0; h < heads; ++h) {
        sum += first[b * batch_step + h * params.pairs];
      }
    }
    params.grad_bias[i] = sum;
  }
}

}  // namespace pantile::common
