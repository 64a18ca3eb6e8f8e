// How the cells of the line are shared out among blocks (schedule.cuh). For host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::decode {

// Block i of `blocks` owns the cells line_begin(i) <= c < line_begin(i + 1) of `line`.
PANTILE_HD constexpr int line_begin(int block, int line, int blocks) {
  return static_cast<int>(std::int64_t{block} * line / blocks);
}

// The block that owns a cell: the least i with line_begin(i + 1) > cell.
PANTILE_HD constexpr int line_owner(int cell, int line, int blocks) {
  return static_cast<int>(((cell + std::int64_t{1}) * blocks - 1) / line);
}

}  // namespace pantile::decode
