// How the cells of the line are shared out among blocks (schedule.cuh). For host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::decode {

// Block i of `blocks` owns the cells line_begin(i) <= c < line_begin(i + 1) of `line`:
// floor(block * line / blocks), without a 64-bit division.
PANTILE_HD constexpr int line_begin(int block, int line, int blocks) {
  return block * (line / blocks) + block * (line % blocks) / blocks;
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
// The quotient is below 2^10, so that its error in fp32 is far below 1.
PANTILE_HD constexpr int line_owner(int cell, int line, int blocks) {
  const int guess = static_cast<int>(static_cast<float>(cell) * static_cast<float>(blocks) /
                                     static_cast<float>(line));
  if (line_begin(guess, line, blocks) > cell) {
    return guess - 1;
  }
  return line_begin(guess + 1, line, blocks) > cell ? guess : guess + 1;
}

}  // namespace pantile::decode
