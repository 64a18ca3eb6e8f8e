// The order of tiles, decided alike when a plan is made and when it is run.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/integer.h"
#include "core/softmax_state.h"
#include "core/tile_order.h"
#include "pantile/device.h"
#include "pantile/problem.h"
#include "pantile/registry.h"

namespace pantile::ampere {

// What running heads may take of L2: half, the rest is for Q, O and whatever else runs.
constexpr std::int64_t running_heads_bytes(const DeviceProps& device) {
  return device.l2_bytes / 2;
}

// Tiles of `tile_q` rows of all heads and sequences, for the longest sequence if they differ.
constexpr core::TileOrder forward_order(const ForwardProblem& p, const DeviceProps& device,
                                        int tile_q) {
  const int heads = static_cast<int>(p.heads_q);
  const int batch = static_cast<int>(p.batch);
  const int group = p.heads_k > 0 ? static_cast<int>(p.heads_q / p.heads_k) : 1;
  const std::int64_t bytes_per_key_head =
      p.seqlen_k * (p.head_dim + p.head_dim_v) * dtype_bytes(p.dtype);
  const int section = mask_kind(p) == MaskKind::full
                          ? 1
                          : core::heads_per_section(bytes_per_key_head, group, heads * batch,
                                                    running_heads_bytes(device));
  return core::TileOrder(core::ceil_div(static_cast<int>(p.seqlen_q), tile_q), heads, batch,
                         section, core::TileDirection::descending);
}

// Tiles of `tile_k` keys of all key heads and sequences. Under a causal mask the first keys are
// seen by the most rows. A section there has at least as many tiles as half of the multiprocessors:
// else the long tiles of the last heads start late and end alone (measured: 1.22x for 8 key heads
// of 64 tiles on 132 multiprocessors). Powers of two, so that sections end with the batch.
constexpr core::TileOrder backward_order(const ForwardProblem& p, const DeviceProps& device,
                                         int tile_k) {
  const int heads = static_cast<int>(p.heads_k);
  const int batch = static_cast<int>(p.batch);
  const int tiles = core::ceil_div(static_cast<int>(p.seqlen_k), tile_k);
  const std::int64_t group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  const std::int64_t bytes_per_key_head =
      p.seqlen_q * group * (4 * p.head_dim + dtype_bytes(p.dtype) * (p.head_dim + p.head_dim_v));
  int section = 1;
  if (mask_kind(p) != MaskKind::full) {
    section =
        core::heads_per_section(bytes_per_key_head, 1, heads * batch, running_heads_bytes(device));
    while (section < heads * batch && 2 * section * tiles < device.multiprocessors) {
      section *= 2;
    }
  }
  return core::TileOrder(tiles, heads, batch, section, core::TileDirection::ascending);
}

// Scores times this are base-2 logits. The kernels want a positive and finite factor, so that
// masked scores stay -inf: a negative scale changes the sign of Q instead, and with a scale of 0 Q
// becomes zeros. Subnormal factors are as good as others: the scores that they multiply are finite.
inline float logit_scale(float scale) {
  return scale == 0.0f ? core::kLog2E : core::min_of(std::fabs(scale) * core::kLog2E, FLT_MAX);
}

}  // namespace pantile::ampere
