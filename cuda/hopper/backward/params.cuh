// What the main backward kernels are told, and which tile of keys a work item stands for.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/attended.h"
#include "common/backward_rows.cuh"
#include "core/geometry.h"
#include "core/integer_unit.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "prim/address.cuh"

namespace pantile::hopper {

struct BackwardMaps {
  CUtensorMap q, grad_o;  // boxes of tile_q rows x 64 columns
  CUtensorMap k, v;       // boxes of tile_k rows x 64 columns
};

struct BackwardParams {
  core::SequenceSide queries, keys;  // lengths; the strides are in the maps
  common::TileNumbers row_tiles, key_tiles;
  core::TileOrder order;         // of the key tiles of dense keys
  core::FastDivmod key_heads;    // of the key tiles of packed keys
  int query_extent, key_extent;  // rows of the maps' row axis
  int heads_q, heads_k, group;   // group: query heads per key head
  int window_left, window_right;
  int head_dim, head_dim_v;     // of the tensors, at most the kernel's
  float scale, scale_log2;      // scale * log2(e)
  float masked_score;           // times scale: -inf
  std::int64_t row_tile_count;  // numbers of row_tiles
  int work_count;               // key tiles, or numbers of key tiles, of all heads
  // Integer sums only, else null: what is known of the keys of each head, and where the first of
  // two passes notes the largest additions to the rows of loud heads (core/integer_unit.h). The
  // second, which repeats those heads, runs only if `measured` is not 0.
  const core::KeyBounds* key_bounds;
  std::uint32_t* row_max;
  const int* measured;
  bool repeats;
  const int* large_means;    // these two: see common::RowPass; or null
  float* row_sums;           //
  int* claimed;              // work items taken beyond each block's first; 0 before
  float* dq_sum;             // [heads_q][row_tile_count][dq_tile_floats()], fragments
  const uint4* lse_terms;    // [heads_q][row_tile_count * tile_q], -lse / scale
  const uint4* delta_terms;  // the same, dLSE - rowsum(dO * O)
  void* grad_k;              // [keys, heads_k, head_dim]
  void* grad_v;              // [keys, heads_k, head_dim_v]
  Layout grad_k_layout, grad_v_layout;
};

// Where a sequence starts in a map: its row r is row `row + r` of the axis that ends with the
// sequence, see encode_sequence_map().
struct MapOrigin {
  int row, start, batch;
};

// A tile of keys and the tiles of rows that see it. Lives in shared memory.
struct KeyTile {
  int batch, key_head;
  int tile;                            // in units of tile_k, of the attended keys
  int first_row, first_key;            // attended, see common::Attended
  core::Mask mask;                     // of the attended part
  core::Span rows;                     // row tiles to visit
  int masked_before;                   // of these, tiles below this one need the mask
  int masked_from;                     // and tiles from this one on (windows only)
  int first_row_tile;                  // number of the sequence's first row tile
  int key_offset;                      // packed: rows before the sequence
  int key_capacity;                    // keys of the sequence, used or not
  MapOrigin query_origin, key_origin;  // of the first attended row and key
  bool careful;                        // is_careful(); described later than the rest
};

namespace detail {

PANTILE_DEVICE MapOrigin map_origin(const core::SequenceSide& side, const core::Sequence& sequence,
                                    int extent, int first, int batch) {
  const bool packed = side.cu_seqlens != nullptr;
  const int begin = packed ? static_cast<int>(sequence.row) : 0;
  return MapOrigin{extent - sequence.length + first, begin + sequence.length, packed ? 0 : batch};
}

PANTILE_DEVICE int capacity(core::SequenceSide side, int batch) {
  side.seqused = nullptr;
  return core::locate_sequence(side, batch).length;
}

}  // namespace detail

// Whether the tile's head is one whose rows are measured.
PANTILE_DEVICE bool is_measured(const BackwardParams& params, const KeyTile& key_tile) {
  return params.key_bounds[key_tile.batch * params.heads_k + key_tile.key_head].measured != 0;
}

// Whether the tile's head takes careful steps: they sum dS, where the keys have a large mean, and
// note the largest additions, where rows are measured. The kernel before has found out, and must
// have finished.
PANTILE_DEVICE bool is_careful(const BackwardParams& params, const KeyTile& key_tile) {
  const int head = key_tile.batch * params.heads_k + key_tile.key_head;
  const int large_mean = params.large_means != nullptr ? params.large_means[head] : 0;
  const int measured = params.key_bounds != nullptr ? params.key_bounds[head].measured : 0;
  return (large_mean | measured) != 0;
}

// What sums of dS are multiplied by before they become integers in the unit of their row of dQ.
PANTILE_DEVICE float row_sum_unit(const BackwardParams& params, const KeyTile& key_tile) {
  return core::row_sum_unit(params.key_bounds[key_tile.batch * params.heads_k + key_tile.key_head]);
}

// Describes work item `work`. False: there is nothing to do, not even zeros to write.
template <class Config, MaskKind kMask>
PANTILE_DEVICE bool describe_key_tile(const BackwardParams& params, int work, KeyTile& key_tile) {
  int batch;
  int tile;
  if (params.keys.cu_seqlens == nullptr) {
    const core::WorkTile place = params.order.tile(work);
    batch = place.batch;
    tile = place.tile;
    key_tile.key_head = place.head;
  } else {
    const core::FastDivmod::Result place = params.key_heads.divmod(work);
    batch = params.key_tiles.sequence(place.quotient);
    tile = place.quotient - params.key_tiles.first(batch);
    key_tile.key_head = place.remainder;
  }
  const int capacity = detail::capacity(params.keys, batch);
  if (tile * Config::kTileK >= capacity) {
    return false;
  }
  key_tile.batch = batch;
  key_tile.tile = tile;
  key_tile.key_capacity = capacity;
  key_tile.first_row_tile = params.row_tiles.first(batch);
  const core::Sequence queries = core::locate_sequence(params.queries, batch);
  const core::Sequence keys = core::locate_sequence(params.keys, batch);
  const int left = kMask == MaskKind::window ? params.window_left : core::kNoBound;
  const int right = kMask == MaskKind::window   ? params.window_right
                    : kMask == MaskKind::causal ? 0
                                                : core::kNoBound;
  const common::Attended part =
      common::attended_part(core::Mask{queries.length, keys.length, left, right});
  key_tile.first_row = part.first_row;
  key_tile.first_key = part.first_key;
  key_tile.mask = part.mask;
  key_tile.key_offset = static_cast<int>(keys.row);
  key_tile.query_origin =
      detail::map_origin(params.queries, queries, params.query_extent, part.first_row, batch);
  key_tile.key_origin =
      detail::map_origin(params.keys, keys, params.key_extent, part.first_key, batch);

  const core::Span span{tile * Config::kTileK,
                        core::min_of((tile + 1) * Config::kTileK, part.mask.keys)};
  key_tile.rows = core::Span{0, 0};
  key_tile.masked_before = 0;
  key_tile.masked_from = core::kNoBound;
  if (!span.empty()) {
    const core::Span first = core::visible_rows(part.mask, span.begin);
    const core::Span last = core::visible_rows(part.mask, span.end - 1);
    key_tile.rows =
        core::Span{first.begin / Config::kTileQ, core::ceil_div(last.end, Config::kTileQ)};
    // A tile past the end of the keys is masked throughout. One past the end of the rows is not:
    // its missing rows have statistics that make their P zero.
    const bool ragged = span.size() < Config::kTileK;
    key_tile.masked_before = ragged ? core::kNoBound : core::ceil_div(last.begin, Config::kTileQ);
    if (kMask == MaskKind::window && first.end < part.mask.rows) {
      key_tile.masked_from = first.end / Config::kTileQ;
    }
  }
  return true;
}

}  // namespace pantile::hopper
