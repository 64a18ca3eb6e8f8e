// Shared-memory tiles of 16-bit elements as TMA writes them and wgmma reads them with the 128-byte
// swizzle (core/swizzle.h): columns in panels of 64 elements, panel after panel.
#pragma once

#include "core/host_device.h"
#include "core/integer.h"
#include "core/swizzle.h"

namespace pantile::tile {

inline constexpr int kElementBytes = 2;
inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = kPanelColumns * kElementBytes;
inline constexpr int kChunkColumns = core::kChunkBytes / kElementBytes;
inline constexpr int kTileAlignment = core::swizzle_alignment(core::Swizzle::bytes128);

struct PanelTile {
  int rows, columns;
  PANTILE_HD constexpr int panels() const { return core::ceil_div(columns, kPanelColumns); }
  PANTILE_HD constexpr int panel_bytes() const { return rows * kPanelRowBytes; }
  PANTILE_HD constexpr int bytes() const { return panels() * panel_bytes(); }
  // Byte offset of element (row, column): core::panel_offset, with the terms of row and column kept
  // apart, so that of an unrolled loop over columns only constants and one XOR a chunk remain.
  PANTILE_HD constexpr int offset(int row, int column) const {
    const int chunk = column % kPanelColumns / kChunkColumns;
    return column / kPanelColumns * panel_bytes() + row * kPanelRowBytes +
           (chunk ^ (row % 8)) * core::kChunkBytes + column % kChunkColumns * kElementBytes;
  }
};

namespace detail {
constexpr bool offset_agrees_with_core() {
  constexpr PanelTile tile{16, 128};
  for (int row = 0; row < tile.rows; ++row) {
    for (int column = 0; column < tile.columns; ++column) {
      if (tile.offset(row, column) !=
          static_cast<int>(core::panel_offset(core::Swizzle::bytes128, tile.rows, row,
                                              column * kElementBytes))) {
        return false;
      }
    }
  }
  return true;
}
}  // namespace detail
static_assert(detail::offset_agrees_with_core());

}  // namespace pantile::tile
