// What the kernels are told of a mask beside the window, and of the lists of tiles that it leaves.
// No CUDA headers.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::attn {

// The forms of MaskForm (pantile/variant.h), as bits of a clause.
enum MaskBit : std::uint32_t {
  kBlocksBit = 1,
  kElementsBit = 2,
  kDocumentsBit = 4,
  kPrefixBit = 8,
};
inline constexpr int kClauseBits = 4;

// Distances in elements; a form that is in no clause is not read.
struct MaskParams {
  // Clauses of kClauseBits each, from the lowest; 0 ends them. A pair is visible where all forms
  // of some clause show it.
  std::uint32_t clauses;

  const std::uint8_t* blocks;  // [batch][head][rows / block][keys / block]
  std::int64_t blocks_batch, blocks_head, blocks_row;
  int block_shift;  // log2 of queries and keys of a block

  const std::uint8_t* elements;  // [batch][head][row][key]
  std::int64_t elements_batch, elements_head, elements_row;
  bool element_pairs;  // rows begin at even addresses

  const std::int32_t *query_ids, *key_ids;  // [batch][row], [batch][key]
  std::int64_t query_ids_batch, key_ids_batch;

  const std::int32_t* prefixes;  // [batch]: keys that all queries see; those behind are causal
  std::int64_t prefixes_batch;   // 0 or 1
};

// The tiles that tiles of rows (forward) or of keys (backward) must visit, on the device. List
// (head * head_step) * tiles + number of the tile: `counts` has how many of its entries are visible
// as a whole, which come first, and how many it has; entries are in `entries`, capacity a list.
struct TileLists {
  std::int32_t* counts;   // [lists][2]
  std::int32_t* entries;  // [lists][capacity]
  std::int32_t* order;    // work items, longest first within sections of heads
  int tiles;              // lists of a head
  int head_step;          // 0: heads share them
  int batch_step;         // dense: numbers from one sequence to the next, 0 if they share them
  int capacity;
};

// An entry: a tile, and above it what of the tile is visible.
enum class TileSight : int {
  whole = 0,
  cut = 1,      // the mask shows all of it; the window, or the end of the sequence, does not
  partial = 2,  // the mask must be asked
  hidden = 3,   // nothing: the only entry of a list that would be empty
};
inline constexpr int kSightShift = 28;  // sequences have below 2^29 rows, tiles 64 at least
inline constexpr int kTileOfEntry = (1 << kSightShift) - 1;

PANTILE_HD constexpr int list_entry(int tile, TileSight sight) {
  return tile | static_cast<int>(sight) << kSightShift;
}
PANTILE_HD constexpr int tile_of_entry(int entry) {
  return entry & kTileOfEntry;
}
PANTILE_HD constexpr TileSight sight_of_entry(int entry) {
  return static_cast<TileSight>(entry >> kSightShift);
}

}  // namespace pantile::attn
