// What the kernels before and after the main backward kernel share: which rows a block works on.
//
// Both work on tiles of rows, numbered and summed as in attended.h, of every query head.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/attended.h"
#include "core/geometry.h"
#include "core/integer_unit.h"
#include "core/sequence.h"
#include "core/softmax_state.h"
#include "pantile/problem.h"
#include "prim/address.cuh"
#include "prim/math.cuh"

namespace pantile::common {

struct RowPass {
  core::SequenceSide queries, keys;  // lengths only
  TileNumbers row_tiles;
  int row_tile_count;  // numbers of row_tiles
  int heads_q, group;
  int window_left, window_right;
  int tile_floats;  // of dQ
  float scale;
  // Variants (pantile/variant.h). delta_factor: 1 / dropout's scale, by which the delta terms are
  // multiplied, and 1 without dropout. capped_lse: scores have a softcap and do not start from a
  // term; that of LSE is LSE * log2(e), in fp32. sinks: [heads_q], or null.
  float delta_factor = 1.0f;
  bool capped_lse = false;
  const float* sinks = nullptr;
  float* dq_sum;       // [heads_q][row_tile_count][tile_floats]
  uint4* lse_terms;    // [heads_q][row_tile_count * tile]
  uint4* delta_terms;  // the same
  // Deterministic mode only, else null. [batch][heads_k]; whether some head must be measured;
  // [heads_q][row_tile_count * tile], the bits of the largest addition to a row of such a head.
  core::KeyBounds* key_bounds;
  int* measured;
  std::uint32_t* row_max;
  // Where the leak of dS is to be taken from dQ (backward_key_means.cuh), else null:
  // [batch][heads_k], a mean a column of the kernel's head dim, and whether it is large.
  float* key_means;
  int* large_means;
  int key_mean_columns;
  // Of heads with a large mean, else 0: [heads_q][row_tile_count][row_sum_floats()], sums of dS
  // over keys. Where dQ is summed in fragments, 64 of each of them, one a row: fragments with the
  // same rows have the sums over different keys. Else one of every row.
  float* row_sums;
};

PANTILE_HD constexpr int row_sum_floats(const RowPass& pass) {
  return row_sum_floats(pass.tile_floats, pass.row_tiles.tile);
}

template <DType kDType>
inline constexpr int kMantissaBits = kDType == DType::f16 ? 11 : 8;

struct RowTile {
  int batch, head;
  int tile;               // of the attended rows, and slice of the whole sequence
  std::int64_t index;     // [head][number]
  std::int64_t sequence;  // packed: rows before the sequence
  int capacity;           // rows of the sequence, used or not
  int first_row, rows;    // attended
  int keys;               // attended
};

// The float that three bf16 of a row's term add up to (backward_prepare.cuh).
PANTILE_DEVICE float term_value(const uint4& term) {
  return __uint_as_float(term.x << 16) + __uint_as_float(term.x & 0xffff0000u) +
         __uint_as_float(term.y << 16);
}

// The share of a row's sum that its sink has. A row without keys has nothing else.
PANTILE_DEVICE float sink_share(float sink, float lse) {
  return lse == -core::kInfinity ? 0.0f : prim::exp2_approx((sink - lse) * core::kLog2E);
}

// Blocks count down, so that the heads the main kernel starts with are written last, and read last.
PANTILE_DEVICE RowTile locate_row_tile(const RowPass& pass, int block, int blocks) {
  const int work = blocks - 1 - block;
  RowTile row_tile;
  int number;
  if (pass.row_tiles.cu_seqlens == nullptr) {  // sequence, head, tile
    const int tiles = pass.row_tiles.tiles_per_sequence;
    const int heads = work / tiles;
    row_tile.tile = work % tiles;
    row_tile.head = heads % pass.heads_q;
    row_tile.batch = heads / pass.heads_q;
    number = row_tile.batch * tiles + row_tile.tile;
  } else {  // number, head
    number = work / pass.heads_q;
    row_tile.head = work % pass.heads_q;
    row_tile.batch = pass.row_tiles.sequence(number);
    row_tile.tile = number - pass.row_tiles.first(row_tile.batch);
  }
  row_tile.index = static_cast<std::int64_t>(row_tile.head) * pass.row_tile_count + number;
  core::SequenceSide whole = pass.queries;
  whole.seqused = nullptr;
  row_tile.capacity = core::locate_sequence(whole, row_tile.batch).length;
  const core::Sequence queries = core::locate_sequence(pass.queries, row_tile.batch);
  const core::Sequence keys = core::locate_sequence(pass.keys, row_tile.batch);
  const Attended part =
      attended_part(core::Mask{queries.length, keys.length, pass.window_left, pass.window_right});
  row_tile.sequence = queries.row;
  row_tile.first_row = part.first_row;
  row_tile.rows = part.mask.rows;
  row_tile.keys = part.mask.keys;
  return row_tile;
}

// Of the tile's head, in key_bounds.
PANTILE_DEVICE int key_head_of(const RowPass& pass, const RowTile& row_tile) {
  return row_tile.batch * (pass.heads_q / pass.group) + row_tile.head / pass.group;
}

PANTILE_DEVICE void clear_row_sums(const RowPass& pass, const RowTile& row_tile, int threads) {
  if (pass.row_sums == nullptr) {
    return;
  }
  const int count = row_sum_floats(pass);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
    pass.row_sums[row_tile.index * count + i] = 0.0f;
  }
}

// How often the main kernel adds to the tile: once for every tile of keys that a row sees.
PANTILE_DEVICE int additions(const RowPass& pass, const RowTile& row_tile, int tile_k) {
  const int first = row_tile.tile * pass.row_tiles.tile;
  const core::Span rows{first, core::min_of(first + pass.row_tiles.tile, row_tile.rows)};
  const core::Mask mask{row_tile.rows, row_tile.keys, pass.window_left, pass.window_right};
  return core::plan_row_tile(mask, rows, tile_k).visit.size();
}

// Elements from a tensor's start to row 0 of the tile's sequence and head.
PANTILE_DEVICE std::int64_t sequence_offset(const Layout& layout, bool packed,
                                            const RowTile& row_tile) {
  const std::int64_t rows = packed ? row_tile.sequence * layout.seq : row_tile.batch * layout.batch;
  return rows + row_tile.head * layout.head;
}

}  // namespace pantile::common
