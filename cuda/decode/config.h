// Tiles of the decode kernel. Included by the host part too, so that plans need no CUDA.
//
// A block's warps share the keys of a tile: each of kSlices teams owns 16 of them, and the kTeam
// warps of a team share those keys and divide the packed queries. Except for latent caches, tile
// and slices depend on the head dim alone: the order of additions within a query is then the same
// for any number of queries.
#pragma once

#include "core/integer.h"
#include "pantile/kv.h"

namespace pantile::decode {

inline constexpr int kSliceKeys = 16;  // keys of a warp's step: rows of operand A
inline constexpr int kMostStages = 6;
inline constexpr int kChunkBytes = 16;  // of a copy

// Shared memory of a block: two blocks of an H100 multiprocessor or one; two of an A100 or one of
// the GPUs with 99 KB.
enum class SharedClass { large, small };

constexpr int shared_limit(SharedClass shared, int blocks) {
  if (shared == SharedClass::large) {
    return blocks == 2 ? 115712 : 232448;
  }
  return blocks == 2 ? 82944 : 101376;
}

// What an instance of the kernel is for, apart from the dtype of Q.
struct Shape {
  int head_dim, head_dim_v;
  CacheFormat format;
  bool v_in_k;

  constexpr int element_bytes() const { return format == CacheFormat::plain ? 2 : 1; }
};

constexpr int slices(const Shape& shape, int columns, SharedClass shared) {
  if (shape.head_dim_v > 256) {
    return columns <= 16 && shared == SharedClass::large ? 4 : 1;
  }
  return shape.head_dim > 128 ? 2 : 4;
}

// Keys of a tile.
constexpr int tile_keys(const Shape& shape, int columns, SharedClass shared) {
  return slices(shape, columns, shared) * kSliceKeys;
}

// Queries of a warp: bounded by the registers of O, 4 bytes x head dim of V a query and warp.
constexpr int warp_columns(const Shape& shape, int columns) {
  if (shape.head_dim_v > 256) {
    return 8;
  }
  if (shape.head_dim > 128) {
    return columns <= 16 ? 8 : 16;
  }
  return columns <= 16 ? columns : columns / 2;
}

// Rows lie at an odd multiple of 16 bytes, so that ldmatrix has no bank conflicts.
constexpr int row_pitch_bytes(int head_dim, int element_bytes) {
  return (head_dim * element_bytes / kChunkBytes | 1) * kChunkBytes;
}

// K's rows, V's rows, and for 8-bit caches the scales of K and V.
constexpr int slice_bytes(const Shape& shape) {
  const int bytes = shape.element_bytes();
  const int row = row_pitch_bytes(shape.head_dim, bytes) +
                  (shape.v_in_k ? 0 : row_pitch_bytes(shape.head_dim_v, bytes)) +
                  (bytes == 1 ? 8 : 0);
  return kSliceKeys * row;
}

// A row of O, floats: 4 mod 32, so that columns of O^T have no bank conflicts. Q lies in the same
// memory, 16 bits an element.
constexpr int output_pitch(const Shape& shape) {
  return core::max_of(shape.head_dim_v, shape.head_dim / 2) + 4;
}

// Everything of a block beside the ring: O, references and sums of a piece, units of Q, a few
// words.
constexpr int fixed_bytes(const Shape& shape, int columns, SharedClass shared) {
  return columns * (output_pitch(shape) + 1) * 4 +
         2 * slices(shape, columns, shared) * columns * 4 + 64;
}

constexpr int stages(const Shape& shape, int columns, SharedClass shared, int blocks) {
  const int room = shared_limit(shared, blocks) - fixed_bytes(shape, columns, shared);
  const int stage = slices(shape, columns, shared) * slice_bytes(shape);
  return core::clamp(room / stage, 0, kMostStages);
}

constexpr int least_stages(SharedClass shared) {
  return shared == SharedClass::large ? 3 : 2;
}

constexpr int threads(const Shape& shape, int columns, SharedClass shared) {
  return 32 * slices(shape, columns, shared) * (columns / warp_columns(shape, columns));
}

// Blocks that a multiprocessor holds: a warp may have 255 registers.
constexpr int resident_blocks(const Shape& shape, int columns, SharedClass shared) {
  const bool two = threads(shape, columns, shared) <= 128 &&
                   stages(shape, columns, shared, 2) >= least_stages(shared);
  return two ? 2 : 1;
}

// Packed queries that a block can have: 8, 16, 32 or 64. More than that are cut into row tiles,
// which read the cache again.
constexpr int most_columns(const Shape& shape, SharedClass shared) {
  int columns = 64;
  while (columns > 8 && stages(shape, columns, shared, 1) < 2) {
    columns /= 2;
  }
  return columns;
}

// Latent caches have tiles of 16 and 64 queries only.
constexpr bool has_columns(const Shape& shape, int columns, SharedClass shared) {
  return columns <= most_columns(shape, shared) &&
         (!shape.v_in_k || columns == 16 || columns == 64);
}

// For `rows` packed queries: the smallest tile that holds them, or the largest.
constexpr int columns_for(int rows, const Shape& shape, SharedClass shared) {
  int best = 0;
  for (int columns = 64; columns >= 8; columns /= 2) {
    if (has_columns(shape, columns, shared) && (best == 0 || columns >= rows)) {
      best = columns;
    }
  }
  return best;
}

}  // namespace pantile::decode
