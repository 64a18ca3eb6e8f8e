// In which order the blocks of the main backward kernel take tiles of keys.
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "core/tile_order.h"
#include "pantile/problem.h"

namespace pantile::hopper {

// Under a causal mask the first keys are seen by the most rows (`in_sections`). The heads of a
// section share L2: Q, dO and the fp32 dQ of their rows. A section has a tile for every one of
// `blocks` at least, and all sections have as many heads, or the last one's longest tiles would
// start when the other blocks run out of work.
inline core::TileOrder backward_key_order(const ForwardProblem& problem, int tiles_per_sequence,
                                          int blocks, bool in_sections) {
  constexpr std::int64_t kSectionBytes = std::int64_t{40} << 20;
  const int heads = static_cast<int>(problem.batch * problem.heads_k);
  int section = 1;
  if (in_sections) {
    const std::int64_t head_bytes =
        problem.seqlen_q * (problem.heads_q / problem.heads_k) *
        (4 * problem.head_dim + 2 * (problem.head_dim + problem.head_dim_v));
    section = core::max_of(core::heads_per_section(head_bytes, 1, heads, kSectionBytes),
                           core::ceil_div(blocks, tiles_per_sequence));
    section = core::ceil_div(heads, core::max_of(heads / section, 1));
  }
  return core::TileOrder(tiles_per_sequence, static_cast<int>(problem.heads_k),
                         static_cast<int>(problem.batch), section, core::TileDirection::ascending);
}

}  // namespace pantile::hopper
