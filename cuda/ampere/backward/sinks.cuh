// The gradient of the sinks, from the row terms that prepare_rows wrote.
#pragma once

#include <cstdint>

#include "ampere/config.h"
#include "common/attended.h"
#include "common/backward_key_means.cuh"
#include "common/backward_rows.cuh"
#include "core/softmax_state.h"
#include "prim/math.cuh"

namespace pantile::ampere {

inline constexpr int kSinkThreads = common::kMeanThreads;  // of a block

// The share of a row's sum that its sink has; `term`: its row term 0.
PANTILE_DEVICE float sink_share(float sink, float term) {
  return prim::exp2_approx(fmaf(sink, core::kLog2E, term));
}

struct SinkParams {
  common::RowPass pass;    // with sinks
  float* grad_sinks;       // [heads_q]
  const float* row_terms;  //
  const float* grad_lse;   // as in PrepareParams
  std::int64_t lse_head_stride, lse_batch_stride;
};

// The gradient of the sinks, a block a head: a sink has the weight P = exp(sink - LSE) and the
// value 0, so that its dS is P * (dLSE - rowsum(dO * O)). In a fixed order.
template <int kTileQ>
__global__ void __launch_bounds__(kSinkThreads)
    sum_sink_gradients(const __grid_constant__ SinkParams params) {
  __shared__ float warps[kSinkThreads / 32];
  const common::RowPass& pass = params.pass;
  const int head = static_cast<int>(blockIdx.x);
  const float sink = pass.sinks[head];
  float sum = 0.0f;
  for (int batch = 0; batch < pass.row_tiles.batch; ++batch) {
    const core::Sequence queries = core::locate_sequence(pass.queries, batch);
    const core::Sequence keys = core::locate_sequence(pass.keys, batch);
    const common::Attended part = common::attended_part(
        core::Mask{queries.length, keys.length, pass.window_left, pass.window_right});
    const std::int64_t first_tile =
        std::int64_t{head} * pass.row_tile_count + pass.row_tiles.first(batch);
    const bool packed = pass.queries.cu_seqlens != nullptr;
    const std::int64_t lse_offset =
        head * params.lse_head_stride + (packed ? queries.row : batch * params.lse_batch_stride);
    for (int row = static_cast<int>(threadIdx.x); row < queries.length; row += kSinkThreads) {
      const int attended = row - part.first_row;
      if (attended >= 0 && attended < part.mask.rows) {
        const float* const terms =
            params.row_terms + (first_tile + attended / kTileQ) * (kRowTerms * kTileQ);
        const int at = attended % kTileQ;
        sum += sink_share(sink, terms[at]) * terms[kTileQ + at];
      } else if (params.grad_lse != nullptr && sink > -INFINITY) {
        // A row without keys: its LSE is the sink.
        sum += params.grad_lse[lse_offset + row] * pass.delta_factor;
      }
    }
  }
  sum = common::block_sum(sum, warps);
  if (threadIdx.x == 0) {
    params.grad_sinks[head] = sum / pass.delta_factor;
  }
}

}  // namespace pantile::ampere
