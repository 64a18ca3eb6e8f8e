// A warp's piece of a tile of a 16-bit bias in shared memory: one row a query, one column a key.
// The warp copies it in chunks of 16 bytes, 8 keys each, and reads it with ldmatrix in the order of
// its scores: as they are (a row a query), or transposed (a row a key). Pure index arithmetic.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/swizzle.h"

namespace pantile::core {

template <int kRowsOf, int kKeysOf>
struct BiasPiece {
  static constexpr int kRows = kRowsOf;
  static constexpr int kKeys = kKeysOf;
  static constexpr int kRowBytes = kKeys * 2;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunks = kKeys / 8;             // a row
  static constexpr int kCopyRows = 32 / kChunks;        // rows that the lanes copy at once
  static constexpr int kCopies = kRows * kChunks / 32;  // a lane
  static_assert(kKeys == 32 || kKeys == 64, "a row is half a line of shared memory or all of it");
  static_assert(kRows % 16 == 0);

  // Row and chunk of the first chunk that a lane copies; its next one is kCopyRows below.
  PANTILE_HD static constexpr int copy_row(int lane) { return lane / kChunks; }
  PANTILE_HD static constexpr int copy_chunk(int lane) { return lane % kChunks; }

  // Bytes from the start of the piece, which is a multiple of 128.
  PANTILE_HD static constexpr std::uint32_t place(int row, int chunk) {
    return ldmatrix_offset(kRowBytes, row, chunk);
  }

  // What a lane passes to ldmatrix.x4 for 16 queries from `row16` * 16 on and 16 keys from `key16`
  // * 16 on. Rows are queries: block i has the keys i / 2 * 8 on of the queries i % 2 * 8 on, and a
  // lane gets elements 4 (i / 2) + 2 (i % 2) and the next one of its scores (mma_accumulator()).
  PANTILE_HD static constexpr std::uint32_t query_major(int lane, int row16, int key16) {
    return place(row16 * 16 + lane % 16, key16 * 2 + lane / 16);
  }

  // ldmatrix.x4.trans: block i has the queries i / 2 * 8 on of the keys i % 2 * 8 on, and a lane
  // gets the same elements of scores whose rows are keys.
  PANTILE_HD static constexpr std::uint32_t key_major(int lane, int row16, int key16) {
    return place(row16 * 16 + lane / 16 * 8 + lane % 8, key16 * 2 + lane / 8 % 2);
  }
};

// How many bytes of the chunk that begins with key `key` there are.
PANTILE_HD constexpr int bias_chunk_bytes(int key, int keys) {
  const int bytes = 2 * (keys - key);
  return bytes < 0 ? 0 : bytes > kChunkBytes ? kChunkBytes : bytes;
}

}  // namespace pantile::core
