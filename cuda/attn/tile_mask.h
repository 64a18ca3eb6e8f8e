// What the kernels are told of a mask beside the window, and of the lists of tiles that it leaves.
// No CUDA headers.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "pantile/variant.h"

namespace pantile::attn {

// Distances in elements; a form that is in no clause is not read.
struct MaskParams {
  std::uint32_t clauses;  // as Variant::mask_clauses

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

// The tiles that tiles of rows (forward) or of keys (backward) must visit, on the device: lists
// (head * head_step) * tiles + number of the tile.
struct TileLists {
  // [lists][2]: how many entries are visible as a whole, which come first (of a backward:
  // not 0 if the mask must be asked about some of them), and how many there are.
  std::int32_t* counts;
  std::int32_t* entries;  // [lists][capacity]
  // [work items][4] in the order in which they run: the item, counts[0] of its lists (backward: of
  // any of them), how many entries they have together, and the last one (forward).
  std::int32_t* order;
  int tiles;       // lists of a head
  int head_step;   // 0: heads share them
  int batch_step;  // dense: numbers from one sequence to the next, 0 if they share them
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
