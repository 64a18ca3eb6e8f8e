// Tile sizes of the fp32 kernels and what they cost in shared memory. Plain C++17 without CUDA.
#pragma once

#include "ampere/config.h"

namespace pantile::ampere {

// Forward: a block owns tile_q rows and refills one buffer of K and one of V in turn.
struct ForwardTileF32 {
  int tile_q;  // rows of a block
  int tile_k;  // keys of a step
  int warps;   // each owns tile_q / warps rows, 16 or 32
  int blocks_per_sm;

  constexpr int threads() const { return warps * 32; }
};

constexpr int forward_shared_bytes(const ForwardTileF32& tile, int head_dim) {
  return 4 * (tile.tile_q + 2 * tile.tile_k) * head_dim + kWorkBytes;
}

// Tiles of 97 KB at most serve every GPU; head dim 256 has a larger one where it fits. With the
// parts of P that `highest` needs, registers hold 16 rows a warp.
constexpr ForwardTileF32 forward_tile_f32(int head_dim, Float32Precision precision,
                                          SharedClass shared) {
  const bool highest = precision == Float32Precision::highest;
  switch (head_dim) {
    case 64: return highest ? ForwardTileF32{64, 64, 4, 2} : ForwardTileF32{128, 64, 4, 2};
    case 128: return highest ? ForwardTileF32{64, 32, 4, 2} : ForwardTileF32{128, 32, 4, 2};
    default:
      return shared == SharedClass::large ? ForwardTileF32{128, 32, 8, 1}
                                          : ForwardTileF32{64, 16, 4, 1};
  }
}

// Backward: a block owns rows of one side (of the queries for dQ, of the keys for dK and dV) and
// walks over the rows of the other side that see them.
struct BackwardTileF32 {
  int own;          // rows of a block
  int other;        // rows of a step
  int row_warps;    // warps along the own rows; each owns own / row_warps of them, 16 or 32
  int other_warps;  // warps that share these rows: each takes a part of the other side's, and their
                    // gradients are added at the end. 1 or 2
  int stages;
  int blocks_per_sm;
  bool splits_keys;  // dK and dV by two launches: registers hold one of them

  constexpr int threads() const { return row_warps * other_warps * 32; }
};

constexpr int backward_shared_bytes(const BackwardTileF32& tile, int head_dim) {
  return 4 * 2 * (tile.own + tile.stages * tile.other) * head_dim + kWorkBytes;
}

constexpr BackwardTileF32 backward_tile_f32(int head_dim, Float32Precision precision,
                                            SharedClass shared) {
  const bool highest = precision == Float32Precision::highest;
  const bool large = shared == SharedClass::large;
  switch (head_dim) {
    case 64:
      // 32 rows of either side a warp read the least shared memory; sm_80 would spill.
      return highest ? BackwardTileF32{64, 32, 4, 1, 2, 2, false}
                     : BackwardTileF32{128, large ? 32 : 16, 4, 1, 2, 2, false};
    case 128:
      // Split, the keys' gradients take 8 products instead of 7, but nothing spills. On an H200 the
      // spills cost no more.
      return BackwardTileF32{64, 32, 4, 1, 1, 2, highest && !large};
    default:
      return large ? BackwardTileF32{64, 32, 4, 2, 1, 1, true}
                   : BackwardTileF32{32, 16, 2, 1, 1, 1, true};
  }
}

}  // namespace pantile::ampere
