// Rows of 16-bit elements in shared memory, permuted so that ldmatrix meets no bank conflicts.
//
// A row is a run of 16-byte chunks. Within groups of 8 chunks (128 bytes; 4 chunks when a row is an
// odd number of 64-byte pieces) chunk c of row r lies at place c ^ twist(r), so that the same chunk
// of 8 successive rows covers all 32 banks once. Tiles start at multiples of 128 bytes.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::tile {

template <int kColumns>
struct SwizzledRows {
  static_assert(kColumns % 32 == 0);
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kGroup = kColumns % 64 == 0 ? 8 : 4;  // chunks permuted among themselves
  static constexpr int kRowBytes = kColumns * 2;

  PANTILE_DEVICE static constexpr int twist(int row) {
    return kGroup == 8 ? row & 7 : (row >> 1) & 3;
  }

  // Bytes from the tile's start. chunk and row may be any chunk and row of the tile.
  PANTILE_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ twist(row)) << 4);
  }

  // What a lane passes to ldmatrix.x4 for the 16 x 16 elements at the tile's start: blocks 0, 1 are
  // 8 rows apart and blocks 2, 3 lie 8 columns right of them ...
  PANTILE_DEVICE static int lane_offset_rows_first(int lane) {
    return offset((lane & 7) + ((lane >> 3) & 1) * 8, lane >> 4);
  }

  // ... or blocks 0, 1 are 8 columns apart and blocks 2, 3 lie 8 rows below them.
  PANTILE_DEVICE static int lane_offset_columns_first(int lane) {
    return offset((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
  }

  // Moves a lane's address by row16 * 16 rows and column16 * 16 columns. column16 is best a
  // constant: then this is one XOR, shared by all columns that are equal modulo the group.
  PANTILE_DEVICE static constexpr std::uint32_t step(std::uint32_t lane_address, int row16,
                                                     int column16) {
    const int chunk = column16 * 2;
    return (lane_address ^ ((chunk % kGroup) << 4)) + chunk / kGroup * (kGroup * 16) +
           row16 * 16 * kRowBytes;
  }
};

// What a lane passes to ldmatrix in one of several equal shares of a tile's columns.
template <class Rows, int kColumns>
class ColumnShare {
  // Shares of 2^k chunks begin where the XOR of a share and a step is their sum.
  static constexpr bool kAligned = (kColumns / 8 & (kColumns / 8 - 1)) == 0;

 public:
  PANTILE_DEVICE ColumnShare(std::uint32_t lane_address, int share)
      : first_(share * (kColumns / 16)),
        lane_address_(kAligned ? Rows::step(lane_address, 0, first_) : lane_address) {}

  PANTILE_DEVICE std::uint32_t step(int row16, int column16) const {
    return Rows::step(lane_address_, row16, kAligned ? column16 : first_ + column16);
  }

 private:
  int first_;  // in units of 16 columns
  std::uint32_t lane_address_;
};

}  // namespace pantile::tile
