// Tile sizes of the ampere FP8 forward and what they cost in shared memory. Plain C++17 without
// CUDA.
#pragma once

#include "ampere/config.h"
#include "core/integer.h"
#include "pantile/problem.h"

namespace pantile::ampere {

// The first with products of e4m3.
inline constexpr int kFp8Major = 8;
inline constexpr int kFp8Minor = 9;

struct Fp8Tile {
  int head_dim;  // of Q, K, V and O
  int tile_q;    // queries of a block, at most 128: a block of scales
  int warps;
  int blocks_per_sm;

  static constexpr int kTileK = 64;  // keys of a step, half a block of scales
  static constexpr int kStages = 2;

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return tile_q / warps; }
  // Of a row of Q or K in shared memory: pieces of 64 bytes.
  constexpr int row_bytes() const { return core::round_up(head_dim, 64); }
  constexpr int k_bytes() const { return kTileK * row_bytes(); }
  constexpr int v_bytes() const { return head_dim * kTileK; }
  constexpr int q_bytes() const { return tile_q * row_bytes(); }
  // O in 16 bits takes the place of K and V.
  constexpr int shared_bytes() const {
    return q_bytes() + kStages * (k_bytes() + v_bytes()) + kWorkBytes;
  }

  constexpr bool valid() const {
    return head_dim % 32 == 0 && warp_rows() % 16 == 0 && tile_q <= 128 &&
           2 * tile_q * head_dim <= kStages * (k_bytes() + v_bytes()) &&
           blocks_per_sm * (shared_bytes() + 1024) <= shared_class_bytes(SharedClass::small) + 1024;
  }
};

// One table for all GPUs: e4m3 tiles of two stages fit the smallest shared memory. 32 queries a
// warp halve the shared-memory reads per product.
constexpr Fp8Tile fp8_tile(int head_dim) {
  return head_dim <= 64   ? Fp8Tile{64, 128, 4, 2}
         : head_dim <= 96 ? Fp8Tile{96, 128, 4, 2}
                          : Fp8Tile{128, 128, 4, 2};
}

static_assert(fp8_tile(64).valid() && fp8_tile(96).valid() && fp8_tile(128).valid());

// A kernel's parameters as a type.
template <int kHeadDimOf, Fp8Exp kExpOf>
struct Fp8Config {
  static constexpr Fp8Tile kTile = fp8_tile(kHeadDimOf);
  static constexpr Fp8Exp kExp = kExpOf;
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kTileQ = kTile.tile_q;
  static constexpr int kTileK = Fp8Tile::kTileK;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kTile.warp_rows();
  static constexpr int kRowTiles = kWarpRows / 16;
};

}  // namespace pantile::ampere
