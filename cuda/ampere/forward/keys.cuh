// The keys that one thread block of the forward goes through: which tiles, where they come from,
// and what a mask hides of them.
#pragma once

#include <math.h>

#include <cstdint>

#include "ampere/forward/params.cuh"
#include "ampere/storage.cuh"
#include "core/geometry.h"
#include "pantile/registry.h"
#include "prim/special_registers.cuh"

namespace pantile::ampere {

template <bool kShift>
struct MaskType {
  using type = core::Mask;
};
template <>
struct MaskType<true> {
  using type = core::ShiftedMask;
};

template <class Config, MaskKind kMask, KeySource kSource = KeySource{}>
class ForwardKeys {
  using KCopy = typename Config::KCopy;
  using VCopy = typename Config::VCopy;
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kTileK = Config::kTileK;
  using AnyMask = typename MaskType<kSource.shift>::type;

 public:
  static constexpr bool kLeftBound = kMask == MaskKind::window || kMask == MaskKind::any;

  PANTILE_DEVICE ForwardKeys(const ForwardParams& params, const ForwardWork& work)
      : params_(params), row0_(work.row0) {
    SequenceRows keys = sequence_rows(params.keys, work.sequence.batch);
    if constexpr (kSource.ranges) {
      keys.first = params.k_begin[keys.batch];
    }
    const int key_head = params.group.divide(work.head);
    const core::Mask mask{work.sequence.length, keys.length,
                          kLeftBound ? params.window_left : core::kNoBound,
                          kLeftBound                ? params.window_right
                          : kMask == MaskKind::full ? core::kNoBound
                                                    : 0};
    if constexpr (kSource.shift) {
      mask_ = core::with_shift(mask, params.mask_shift[keys.batch]);
    } else {
      mask_ = mask;
    }
    tiles_ = plan_tiles();
    if constexpr (kSource.pages) {
      // The first page's rows of the head, and the sequence's row of the table.
      keys.batch = 0;
      next_k_ = reinterpret_cast<const char*>(head_rows(params.k, keys, key_head).rows);
      next_v_ = reinterpret_cast<const char*>(head_rows(params.v, keys, key_head).rows);
      table_ = params.block_table + work.sequence.batch * params.table_stride;
      return;
    }
    const int last_tile = (tiles_.visit.end - 1) * kTileK;
    next_k_ = KCopy::source(head_rows(params.k, keys, key_head), last_tile);
    next_v_ = VCopy::source(head_rows(params.v, keys, key_head), last_tile);
  }

  PANTILE_DEVICE const AnyMask& mask() const { return mask_; }

  // Key tiles to visit, and those of them that need no mask.
  PANTILE_DEVICE const core::TilePlan& tiles() const { return tiles_; }

  PANTILE_DEVICE void treat_all_as_masked() {
    full_before_ = tiles_.full;
    tiles_.full = core::Span{tiles_.visit.begin, tiles_.visit.begin};
  }

  // Whether tile n, now masked, was not before. Pipelined kernels treat the first and the last tile
  // that they go through as masked in any case.
  PANTILE_DEVICE bool was_full(int n) const {
    if constexpr (Config::kSchedule == Schedule::pipelined) {
      return n > full_before_.begin && n < core::min_of(full_before_.end, tiles_.visit.end - 1);
    }
    return n >= full_before_.begin && n < full_before_.end;
  }

  // Tiles are fetched one after the other, from the last one that is seen to the first, and nothing
  // after that. Only the last one may be ragged. `to`: a tile of storage.stages[].k.
  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_keys(int n, const void* to) {
    const KCopy copy(params_.head_dim);
    const bool wanted = n >= tiles_.visit.begin;
    if constexpr (kSource.pages) {
      copy.copy_rows_if(wanted, prim::shared_address(to), mask_.keys - n * kTileK,
                        [&](int row) { return paged_row(next_k_, params_.k, n * kTileK + row); });
      return;
    }
    if constexpr (kMaybeRagged) {
      copy.copy_ragged_if(wanted, prim::shared_address(to), next_k_, params_.k_pass_bytes,
                          mask_.keys - n * kTileK);
    } else {
      copy.copy_if(wanted, prim::shared_address(to), next_k_, params_.k_pass_bytes);
    }
    next_k_ -= params_.k_tile_bytes;
  }

  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_values(int n, const void* to) {
    const VCopy copy(params_.head_dim_v);
    const bool wanted = n >= tiles_.visit.begin;
    if constexpr (kSource.pages) {
      copy.copy_rows_if(wanted, prim::shared_address(to), mask_.keys - n * kTileK,
                        [&](int row) { return paged_row(next_v_, params_.v, n * kTileK + row); });
      return;
    }
    if constexpr (kMaybeRagged) {
      copy.copy_ragged_if(wanted, prim::shared_address(to), next_v_, params_.v_pass_bytes,
                          mask_.keys - n * kTileK);
    } else {
      copy.copy_if(wanted, prim::shared_address(to), next_v_, params_.v_pass_bytes);
    }
    next_v_ -= params_.v_tile_bytes;
  }

  // The row, within the sequence, of this lane's accumulator elements 0 and 1 of row tile 0;
  // elements 2 and 3 are 8 rows, the next row tile 16 rows below.
  PANTILE_DEVICE int lane_row() const {
    const int thread = prim::fresh_thread_index();
    return row0_ + thread / 32 * Config::kWarpRows + thread % 32 / 4;
  }

  PANTILE_DEVICE core::Span seen_keys(int row) const {
    if constexpr (kLeftBound) {
      return core::visible_keys(mask_, row);
    } else if constexpr (kMask == MaskKind::causal) {
      return core::Span{0, core::min_of(mask_.keys, row + mask_.shift() + 1)};
    } else {
      return core::Span{0, mask_.keys};
    }
  }

  // How many groups of 16 keys of tile n reach to the last key that the warp's rows see. Equal in
  // all lanes.
  PANTILE_DEVICE int seen_groups(int n) const {
    const int warp_row = prim::fresh_thread_index() / 32 * Config::kWarpRows;
    const int end = seen_keys(row0_ + warp_row + Config::kWarpRows - 1).end - n * kTileK;
    return core::clamp(end + 15, 0, kTileK) / 16;
  }

  // Scores of tile n that the mask hides become -inf.
  template <class Scores>
  PANTILE_DEVICE void mask_scores(Scores& s, int n) const {
    const int first_key = n * kTileK + prim::fresh_thread_index() % 4 * 2;
    const int row = lane_row();
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const core::Span seen = seen_keys(row + m * 16 + r * 8);
        const int begin = seen.begin - first_key;
        const int end = seen.end - first_key;
#pragma unroll
        for (int j = 0; j < kTileK / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * j + c >= end || (kLeftBound && 8 * j + c < begin)) {
              s[m][j][2 * r + c] = -INFINITY;
            }
          }
        }
      }
    }
  }

 private:
  // Key `key` of the sequence, which exists. `first`: slot 0 of page 0 of the head.
  PANTILE_DEVICE const char* paged_row(const char* first, const Operand& x, int key) const {
    const core::FastDivmod::Result at = params_.page_size.divmod(key);
    return first + (__ldg(table_ + at.quotient) * x.batch + at.remainder * x.seq) * 2;
  }

  // Without a left bound the tiles begin with 0, which the compiler should know.
  PANTILE_DEVICE core::TilePlan plan_tiles() const {
    if constexpr (kMask == MaskKind::full) {
      return row0_ < mask_.rows
                 ? core::TilePlan{{0, core::ceil_div(mask_.keys, kTileK)}, {0, mask_.keys / kTileK}}
                 : core::TilePlan{{0, 0}, {0, 0}};
    }
    core::TilePlan tiles{{0, 0}, {0, 0}};
    if (row0_ < mask_.rows) {
      tiles = core::plan_row_tile(
          mask_, core::Span{row0_, core::min_of(row0_ + kTileQ, mask_.rows)}, kTileK);
    }
    if constexpr (!kLeftBound) {
      tiles.visit.begin = tiles.full.begin = 0;
    }
    return tiles;
  }

  const ForwardParams& params_;
  int row0_;              // the block's first row, in the sequence
  AnyMask mask_;          // of the sequence
  core::TilePlan tiles_;  // of the block
  core::Span full_before_{0, 0};
  const char* next_k_;  // what this thread copies next; of pages: see the constructor
  const char* next_v_;
  const std::int32_t* table_ = nullptr;
};

}  // namespace pantile::ampere
