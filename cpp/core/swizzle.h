// How shared-memory tiles are permuted so that neither rows nor columns collide in a bank.
// Everything counts in bytes; a chunk is 16 bytes, the unit that TMA, wgmma and ldmatrix move.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::core {

inline constexpr int kChunkBytes = 16;

// The modes of CUtensorMapSwizzle and of the wgmma matrix descriptor: the value is the width of a
// panel in bytes.
enum class Swizzle : int { bytes32 = 32, bytes64 = 64, bytes128 = 128 };

PANTILE_HD constexpr int panel_bytes(Swizzle mode) {
  return static_cast<int>(mode);
}

// A tile must start at a multiple of this for the address bits below to be those of the tile.
PANTILE_HD constexpr int swizzle_alignment(Swizzle mode) {
  return 8 * panel_bytes(mode);
}

// Where the byte of plain address `byte` lies. The chunk bits (4 up) are XORed with the bits that
// count 128-byte lines (7 up): three bits of them for 128-byte panels, two for 64, one for 32. The
// function is its own inverse.
PANTILE_HD constexpr std::uint32_t swizzled(Swizzle mode, std::uint32_t byte) {
  const std::uint32_t chunk_bits = static_cast<std::uint32_t>(panel_bytes(mode) - kChunkBytes);
  return byte ^ (byte >> 3 & chunk_bits);
}

// Offset of a byte in a tile of `rows` rows, stored as TMA writes it: one panel of
// panel_bytes(mode) columns after the other, the rows of a panel contiguous. rows is a multiple
// of 8.
PANTILE_HD constexpr std::uint32_t panel_offset(Swizzle mode, int rows, int row, int column_byte) {
  const int width = panel_bytes(mode);
  const int panel = column_byte / width;
  return swizzled(mode,
                  static_cast<std::uint32_t>((panel * rows + row) * width + column_byte % width));
}

// Offset of a chunk in a row-major tile that ldmatrix reads (mma.sync kernels). row_bytes is 32, 64
// or a multiple of 128. The chunk of a row moves by the number of its 128-byte line, so that eight
// consecutive rows have the same chunk in eight different places.
PANTILE_HD constexpr std::uint32_t ldmatrix_offset(int row_bytes, int row, int chunk) {
  const int rows_per_line = row_bytes < 128 ? 128 / row_bytes : 1;
  const int chunks = row_bytes < 128 ? row_bytes / kChunkBytes : 8;
  const int moved = chunk ^ (row / rows_per_line % chunks);
  return static_cast<std::uint32_t>(row * row_bytes + moved * kChunkBytes);
}

}  // namespace pantile::core
