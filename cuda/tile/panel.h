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
  // Byte offset of element (row, column).
  PANTILE_HD constexpr int offset(int row, int column) const {
    return static_cast<int>(
        core::panel_offset(core::Swizzle::bytes128, rows, row, column * kElementBytes));
  }
};

}  // namespace pantile::tile
