// Host half of the masks beside the window on Hopper: what the kernels are told of a mask, and
// where the lists of the tiles that it leaves lie in a plan's workspace. No CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/tile_mask.h"
#include "common/stored_mask.h"
#include "pantile/plan.h"
#include "pantile/problem.h"

namespace pantile::hopper {

using common::has_clauses;
using common::mask_params;

// Of the lists of one pass: offsets in bytes.
struct ListLayout {
  std::int64_t tiles = 0;     // lists of a head
  std::int64_t heads = 0;     // with lists of their own
  std::int64_t capacity = 0;  // entries of a list
  std::int64_t items = 0;     // work items in `order`
  int batch_step = 0;
  std::size_t counts = 0, entries = 0, order = 0;
  std::size_t end = 0;

  attn::TileLists at(void* workspace) const;
};

// Forward: a list for each tile of rows, behind the counters that must be zero.
ListLayout forward_lists(const ForwardPlan& plan);
// Backward: a list for each tile of keys, behind all else.
ListLayout backward_lists(const BackwardPlan& plan);

}  // namespace pantile::hopper
