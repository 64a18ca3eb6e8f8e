// What the decode kernel is told, and what it reads of a sequence. No lengths: those are read on
// the device, so that a launch that was captured in a graph serves every length.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/integer.h"
#include "core/kv_sequence.h"
#include "core/kv_split.h"
#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::decode {

enum class Cuts : int { anywhere, by_length, fixed };

// One tensor of the cache. Distances in bytes.
struct CacheSide {
  const char* data;
  std::int64_t block, slot, head;
};

// Scales of K or V: of a token and head, or of a sequence and head. Distances in floats.
struct ScaleSide {
  const float* data;  // null: none
  std::int64_t block, slot, head;
};

// Q or O. Distances in elements; the one between sequences is 0 for packed rows.
struct RowSide {
  std::int64_t batch, seq, head;
};

struct DecodeParams {
  const void* q;
  void* o;
  float* lse;      // null: not wanted
  CacheSide k, v;  // v: not read with V in K
  ScaleSide k_scales, v_scales;
  bool token_scales;  // else of a sequence and head
  RowSide q_rows, o_rows;
  std::int64_t lse_head;  // floats between heads of LSE: seqlen_q, or the packed rows

  core::KvArrays arrays;
  const std::int32_t* block_table;  // null: a dense cache
  const std::int64_t* tree_mask;    // null: window alone
  const float* sinks;               // null: none
  std::int64_t table_stride;

  core::FastDivmod group;  // query heads of a key head
  core::FastDivmod page;   // slots of a page; dense: more than any cache has
  bool whole_slices;       // the keys of a slice lie on one page
  int batch, heads_q, heads_k;
  int head_dim, head_dim_v;
  int row_tiles;                  // tiles of packed queries of a key head
  int window_left, window_right;  // core::kNoBound: none
  float scale_log2;               // of scores: scale * log2(e), or with a softcap log2(e) * softcap
  float cap_inner;                // with a softcap 2 log2(e) scale / softcap
  bool capped;

  Cuts cuts;
  core::FastDivmod cut_tiles;  // Cuts::fixed: tiles between cuts
  DType queries, output;       // of Q, of O
  int* arrivals;  // one for each sequence, key head and row tile; zero before and after a run
  float* parts;   // slots of part_floats() floats
};

// Floats of a part in the workspace: O of `columns` queries, their references, their sums.
constexpr std::int64_t part_floats(int columns, int head_dim_v) {
  return static_cast<std::int64_t>(columns) * (head_dim_v + 2);
}

// A sequence as this step sees it. Tiles are numbered from slot 0.
struct Sequence {
  int keys;         // Sk: slots in use, with the new ones
  int first;        // first key that a query sees
  int queries;      //
  int first_query;  // packed: row of Q of query 0; else 0
  int row;          // of the block table, or of a dense cache
  int tile, tiles;  // first tile, and one past the last; at least one tile, if an empty one
  int cut_shift;    // Cuts::by_length: log2 of the tiles between cuts
};

// The part of a sequence that holds a tile, counted from slot 0, and a part's first tile.
PANTILE_DEVICE int part_of_tile(const DecodeParams& p, const Sequence& s, int tile) {
  return p.cuts == Cuts::fixed ? p.cut_tiles.divide(tile) : tile >> s.cut_shift;
}
PANTILE_DEVICE int first_tile(const DecodeParams& p, const Sequence& s, int part) {
  return p.cuts == Cuts::fixed ? part * p.cut_tiles.divisor() : part << s.cut_shift;
}
PANTILE_DEVICE int count_parts(const DecodeParams& p, const Sequence& s) {
  return part_of_tile(p, s, s.tiles - 1) - part_of_tile(p, s, s.tile) + 1;
}

template <int kTileKeys>
PANTILE_DEVICE Sequence read_sequence(const DecodeParams& p, int b) {
  static_assert((kTileKeys & (kTileKeys - 1)) == 0);
  const core::KvSequence located = core::locate_kv_sequence(p.arrays, b);
  Sequence s;
  s.keys = located.keys;
  s.queries = located.queries;
  s.first_query = p.arrays.cu_seqlens_q != nullptr ? static_cast<int>(located.query_row) : 0;
  s.row = located.cache_row;
  s.first = core::clamp(s.keys - s.queries - p.window_left, located.first_key, s.keys);
  s.tile = s.first / kTileKeys;
  s.tiles = core::max_of(core::ceil_div(s.keys, kTileKeys), s.tile + 1);
  s.cut_shift = 31 - __clz(core::invariant_part_keys(s.keys) / kTileKeys);
  return s;
}

}  // namespace pantile::decode
