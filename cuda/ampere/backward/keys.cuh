// The keys that a block of the backward owns: which they are, which rows see them, and where their
// gradients go.
#pragma once

#include <cstdint>

#include "ampere/backward/params.cuh"
#include "ampere/storage.cuh"
#include "common/attended.h"
#include "core/geometry.h"
#include "pantile/registry.h"
#include "prim/special_registers.cuh"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

// A tile of the attended keys of one key head, and the same slice of the whole sequence.
struct KeyBlock {
  int key_head, tile;
  SequenceRows queries, keys;
  common::Attended part;
};

// Where a thread stands in its block.
template <class Config>
struct BackwardPlace {
  int warp, lane, key_warp, column_warp;
  PANTILE_DEVICE BackwardPlace() {
    const int thread = prim::fresh_thread_index();
    warp = thread / 32;
    lane = thread % 32;
    key_warp = warp / Config::kColumnWarps;
    column_warp = warp % Config::kColumnWarps;
  }
};

template <class Config, MaskKind kMask>
struct BackwardKeys {
  static constexpr int kTileK = Config::kTileK;
  static constexpr bool kLeftBound = kMask == MaskKind::window || kMask == MaskKind::any;

  PANTILE_DEVICE static KeyBlock locate(const BackwardParams& params, int index) {
    const core::WorkTile work = params.order.tile(index);
    KeyBlock block;
    block.key_head = work.head;
    block.tile = work.tile;
    block.queries = sequence_rows(params.queries, work.batch);
    block.keys = sequence_rows(params.keys, work.batch);
    block.part = common::attended_part(core::Mask{block.queries.length, block.keys.length,
                                                  kLeftBound ? params.window_left : core::kNoBound,
                                                  kLeftBound                ? params.window_right
                                                  : kMask == MaskKind::full ? core::kNoBound
                                                                            : 0});
    return block;
  }

  PANTILE_DEVICE static BackwardWork describe(const BackwardParams& params) {
    const KeyBlock block = locate(params, static_cast<int>(blockIdx.x));
    BackwardWork work;
    work.key0 = block.tile * kTileK;
    work.mask = block.part.mask;
    work.rows = core::TilePlan{{0, 0}, {0, 0}};
    if (work.key0 < work.mask.keys) {
      work.rows = core::plan_key_tile(
          work.mask, core::Span{work.key0, core::min_of(work.key0 + kTileK, work.mask.keys)},
          Config::kTileQ);
    }
    work.queries = block.queries;
    work.queries.first += block.part.first_row;
    work.head0 = block.key_head * params.group;
    work.row_number0 = params.row_tiles.first(block.queries.batch);
    work.row_sum_unit = row_sum_unit(params, block);
    return work;
  }

  // 1, or with integer sums what gives the sums of dS the unit of their row of dQ; 0 where the mean
  // of the keys is not large, so that nobody asks for them (common/backward_key_means.cuh).
  PANTILE_DEVICE static float row_sum_unit(const BackwardParams& params, const KeyBlock& block) {
    const int head = block.queries.batch * params.heads_k + block.key_head;
    if (params.large_means == nullptr || params.large_means[head] == 0) {
      return 0.0f;
    }
    return params.integer_sums ? core::row_sum_unit(params.key_bounds[head]) : 1.0f;
  }

  // Whether the rows that this block's keys add to have been measured (core/integer_unit.h).
  PANTILE_DEVICE static bool is_measured(const BackwardParams& params) {
    if (*params.measured == 0) {
      return false;
    }
    const KeyBlock block = locate(params, prim::fresh_block_index());
    return params.key_bounds[block.queries.batch * params.heads_k + block.key_head].measured != 0;
  }

  // Rows of the attended keys.
  PANTILE_DEVICE static tile::HeadRows key_rows(const Operand& x, const KeyBlock& block) {
    SequenceRows keys = block.keys;
    keys.first += block.part.first_key;
    return head_rows(x, keys, block.key_head);
  }

  template <class Rows>
  PANTILE_DEVICE static void store_rows(const tile::HeadRows& to, const std::uint16_t* tile,
                                        int columns, const KeyBlock& block) {
    const int first = block.tile * kTileK;
    const char* const bytes = reinterpret_cast<const char*>(tile);
#pragma unroll 4
    for (int i = prim::fresh_thread_index(); i < kTileK * Rows::kChunks; i += Config::kThreads) {
      const int key = i / Rows::kChunks;
      const int chunk = i % Rows::kChunks;
      if (first + key < block.part.mask.keys && chunk * 8 < columns) {
        *reinterpret_cast<uint4*>(to.rows + (first + key) * to.stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(bytes + Rows::offset(key, chunk));
      }
    }
  }

  // Of rows tile * kTileK on of the whole sequence, those that are not attended.
  PANTILE_DEVICE static void clear_rows(const tile::HeadRows& to, int columns,
                                        const KeyBlock& block, const common::Attended& part) {
    const int begin = block.tile * kTileK;
    const int end = core::min_of(begin + kTileK, block.keys.allocated);
    const int attended_end = part.first_key + part.mask.keys;
    if (begin >= part.first_key && end <= attended_end) {
      return;
    }
    const int chunks = columns / 8;
    for (int i = prim::fresh_thread_index(); i < (end - begin) * chunks; i += Config::kThreads) {
      const int key = begin + i / chunks;
      if (key < part.first_key || key >= attended_end) {
        *reinterpret_cast<uint4*>(to.rows + key * to.stride + i % chunks * 8) = uint4{0, 0, 0, 0};
      }
    }
  }
};

}  // namespace pantile::ampere
