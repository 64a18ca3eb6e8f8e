// What the roles of the Hopper FP8 forward share: parameters, tile descriptions, shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/tile_order.h"
#include "hopper/forward/storage.cuh"
#include "hopper/fp8/config.h"
#include "prim/mbarrier.cuh"

namespace pantile::hopper {

// Codes are maps over the quantiser's layouts, all heads one after the other: q and k {dim, row,
// 1}, v {key, dim, block}; o over the caller's tensor.
struct Fp8Maps {
  CUtensorMap q, k, v, o;
};

struct Fp8Params {
  core::TileOrder order;  // of row tiles; packed Q: of the slots of all sequences
  int heads_q, group;     // group: query heads per key head
  int batch;
  int seqlen_q, seqlen_k;
  int window_left, window_right;  // core::kNoBound lifts a side
  const std::int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;

  // Scales. A block is 128 rows of one sequence (core/scaling.h); blocks are counted per head.
  int q_blocks, k_blocks;
  int q_scale_rows;      // rows that share a scale of Q: 1, 64 or 128
  const float* q_scale;  // [heads_q, 128 q_blocks / q_scale_rows]
  // [heads_k, k_blocks]: of K, of V; V's has its sign bit set where V holds NaN, and is 0 or -0
  // where V is 0
  const float2* kv_scale;
  const uint4* v_nonfinite;  // [heads_k, k_blocks, head_dim]: a bit a key
  const float* q_dot_mean;   // [heads_q, 128 q_blocks] or null: what smoothing took from QK^T
  float scale, scale_log2;
  float score_bound;  // no |sum of products of codes| is larger

  float* lse;                        // null when not wanted
  std::int64_t lse_batch, lse_head;  // distances; 0 batch for packed

  std::int32_t* counter;  // [0] claimed tiles, [1] finished blocks
  int zero;               // 0, where the compiler must not know it

  // O: a map for whole tiles, strides for the last rows of a sequence inside a packed tensor.
  int head_dim_v;
  bool o_is_f16;
  bool clipped;  // TMA cuts O at the end of every sequence
  int o_panels;  // that one copy moves
  MapSteps o_steps;
  void* o;
  Strides o_strides;
};

// One tile of rows of one head, written by the loader, read by the math warps.
struct Fp8TileInfo {
  int visit_begin, visit_end;  // key tiles, last one first; end -1: no more work, 0: no keys
  int row0;                    // first row, within its sequence
  int rows, keys;              // of the sequence
  int q_row;                   // rows before the sequence in packed tensors, else 0
  int q_block;                 // first block of the sequence, among those of all heads
  int k_block;                 // first block of its keys, among those of all heads
  int head, batch;
  float q_scale[3];  // of the rows of each math warpgroup, unless each row has its own
  // Known once the last K has arrived: the scale of V of the last step, and whether some V that
  // the tile visits is not finite.
  float v_scale;
  bool v_nonfinite;
};

// What the loader works out for a step of the math warps.
struct alignas(16) Fp8StepScales {
  float k;     // scale of K
  float unit;  // v of the step before over that of this one; not read in a tile's first step
  float v;     // scale of V; of a block of zeros that of the step before
  float most;  // the largest v since the tile began
};

// A stage of the rings of K and V, without the tiles: all of it at fixed distances from one
// address. The scales are as fresh and as long there as K.
struct Fp8Stage {
  prim::Mbarrier k_full, k_empty, v_full, v_empty;
  Fp8StepScales scales;
};

// A place in the rings of K and V, and the parity of this turn's barriers there.
template <int kStages>
struct Fp8Place {
  int stage = 0;
  std::uint32_t parity = 0;

  PANTILE_DEVICE Fp8Place after() const {
    const bool wraps = stage == kStages - 1;
    return {wraps ? 0 : stage + 1, wraps ? parity ^ 1 : parity};
  }
};

template <Fp8Config kConfig>
struct Fp8Storage {
  static constexpr int kGroups = kConfig.math_warpgroups;
  using Byte = unsigned char;

  alignas(tile::kTileAlignment) Byte q[kConfig.q_buffers][kGroups][kConfig.q_bytes()];
  alignas(tile::kTileAlignment) Byte o[4 * kGroups][kConfig.o_tile().bytes()];  // a warp each
  alignas(tile::kTileAlignment) Byte k[kConfig.stages][kConfig.k_bytes()];
  alignas(tile::kTileAlignment) Byte v[kConfig.stages][kConfig.v_bytes()];

  prim::Mbarrier q_full[kConfig.q_buffers], q_empty[kConfig.q_buffers];
  Fp8Stage stages[kConfig.stages];
  Fp8TileInfo tiles[Fp8Config::kTiles];
};

}  // namespace pantile::hopper
