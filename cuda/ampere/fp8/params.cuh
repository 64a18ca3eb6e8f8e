// What the ampere FP8 forward is told, and its shared memory.
#pragma once

#include <cstdint>

#include "ampere/fp8/config.h"
#include "ampere/operand.cuh"
#include "core/geometry.h"
#include "core/integer.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "tile/row_copy_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

// Operands lie as the quantiser writes them (pantile/quantize.h): all heads one after the other, in
// blocks of 128 rows that are counted per head.
struct Fp8ForwardParams {
  const std::uint8_t *q, *k, *v;
  int row_bytes;  // of Q and K in global memory: head_dim rounded up
  int head_dim;   // of the tensors, at most the kernel's
  // From a row to the one that the same thread copies next, and to the tile, the block before.
  std::int64_t q_pass_bytes, k_pass_bytes, k_tile_bytes, v_block_bytes;
  int q_blocks, k_blocks;
  int q_scale_shift;     // 2^this many rows share a scale of Q: 1, 64 or 128
  const float* q_scale;  // [heads_q, 128 q_blocks >> q_scale_shift]
  // [heads_k, k_blocks]: of K, of V; V's has its sign bit set where V holds NaN, and is 0 or -0
  // where V is 0
  const float2* kv_scale;
  const uint4* v_nonfinite;  // [heads_k, k_blocks, head_dim]: a bit a key
  const float* q_dot_mean;   // [heads_q, 128 q_blocks] or null: what smoothing took from QK^T
  float scale, scale_log2;
  float score_bound;  // no |sum of products of codes| is larger

  Operand o;
  bool o_is_f16;
  float* lse;                    // null when not wanted
  std::int64_t lse_head_stride;  // rows of one head of LSE
  bool lse_packed;               // [heads, total] instead of [batch, heads, rows]

  core::SequenceSide queries, keys;  // lengths only
  core::FastDivmod group;            // query heads per key head
  int heads_q;
  core::TileOrder order;
  int window_left, window_right;  // core::kNoBound lifts a side
};

// The rows of a block of threads, and where their operands lie. In shared memory, because the loop
// has no registers left for what is needed again at the end.
struct Fp8Work {
  int head;
  int row0;  // the block's first row, in the sequence
  SequenceRows sequence;
  core::Mask mask;
  std::int64_t q_block;  // first block of the sequence, among those of all heads
  std::int64_t k_block;  // first block of its keys, among those of all heads
};

// Tiles of bytes, which copies and ldmatrix take for 16-bit elements, two at a time.
template <class Config>
struct Fp8Storage {
  struct Stage {
    alignas(128) unsigned char k[Config::kTile.k_bytes()];
    alignas(128) unsigned char v[Config::kTile.v_bytes()];  // a row of kTileK keys for each dim
  };
  alignas(128) unsigned char q[Config::kTile.q_bytes()];
  Stage stages[Fp8Tile::kStages];  // at the end O, 16-bit, on its way to global memory
  alignas(kWorkBytes) Fp8Work work;
};

template <class Config>
struct Fp8Layouts {
  static constexpr int kRowPairs = Config::kTile.row_bytes() / 2;
  using KRows = tile::SwizzledRows<kRowPairs>;  // of Q, too
  using VRows = tile::SwizzledRows<Config::kTileK / 2>;
  using ORows = tile::SwizzledRows<Config::kHeadDim>;
  using QCopy = tile::RowCopy<Config::kTileQ, kRowPairs, Config::kThreads>;
  using KCopy = tile::RowCopy<Config::kTileK, kRowPairs, Config::kThreads>;
  using VCopy = tile::RowCopy<Config::kHeadDim, Config::kTileK / 2, Config::kThreads>;
};

}  // namespace pantile::ampere
