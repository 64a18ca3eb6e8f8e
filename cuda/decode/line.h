// How the cells of the line are shared out among blocks (schedule.cuh). For host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::decode {

// Block i of `blocks` owns the cells line_begin(i) <= c < line_begin(i + 1) of `line`.
PANTILE_HD constexpr int line_begin(int block, int line, int blocks) {
  return static_cast<int>(std::int64_t{block} * line / blocks);
}

// Blocks that take part, of a grid with `resident` blocks on each multiprocessor: all, unless that
// leaves tiles to the merge that are not worth a part. Below 8 tiles a block, one a multiprocessor.
PANTILE_HD constexpr int active_blocks(int grid, int resident, int line, bool tiles) {
  constexpr int kWorthAPart = 8;
  const int least = core::min_of(core::ceil_div(grid, resident), line);
  return tiles ? core::clamp(line / kWorthAPart, least, core::max_of(least, grid))
               : core::min_of(grid, line);
}

// The block that owns a cell: the least i with line_begin(i + 1) > cell.
PANTILE_HD constexpr int line_owner(int cell, int line, int blocks) {
  return static_cast<int>(((cell + std::int64_t{1}) * blocks - 1) / line);
}

}  // namespace pantile::decode
