// How shared-memory tiles are permuted so that neither rows nor columns collide in a bank.
// Everything counts in bytes; a chunk is 16 bytes, the unit that TMA, wgmma and ldmatrix move.
// Shared memory has 32 banks of 4 bytes.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::core {

inline constexpr int kChunkBytes = 16;
inline constexpr int kBanks = 32;
inline constexpr int kBankBytes = 4;

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

// Passes that shared memory needs to serve one access of `bytes` (4, 8 or 16) by each of `lanes`
// lanes: in each pass every bank delivers one word, and equal words are delivered once. Accesses of
// 8 and 16 bytes go by halves and quarters of a warp, as the hardware does; `ldmatrix` of one 8x8
// matrix is eight accesses of 16 bytes.
PANTILE_HD constexpr int bank_passes(const std::uint32_t* addresses, int lanes, int bytes) {
  const int words = bytes / kBankBytes;
  const int together = kBanks / words;  // lanes served at a time
  int passes = 0;
  for (int first = 0; first < lanes; first += together) {
    const int count = lanes - first < together ? lanes - first : together;
    int per_bank[kBanks] = {};
    std::uint32_t seen[kBanks] = {};  // the distinct words asked for so far
    int distinct = 0;
    int worst = 0;
    for (int i = 0; i < count * words; ++i) {
      const std::uint32_t word =
          addresses[first + i / words] / kBankBytes + static_cast<std::uint32_t>(i % words);
      bool is_new = true;
      for (int j = 0; j < distinct; ++j) {
        is_new = is_new && seen[j] != word;
      }
      if (is_new) {
        seen[distinct++] = word;
        const int load = ++per_bank[word % kBanks];
        worst = load > worst ? load : worst;
      }
    }
    passes += worst;
  }
  return passes;
}

}  // namespace pantile::core
