// Which tiles a block owns. All tiles of all (sequence, key head, row tile) triples, "pairs", form
// one line: sequence by sequence, pair by pair, tiles ascending. Of n blocks, block i owns
//
//   [i T / n, (i + 1) T / n)      of the T cells of the line
//
// A cell is a tile (Cuts::anywhere) or a part between two cuts. So a block owns some whole pairs
// and at most two cut ones (Cuts::anywhere). Every block computes the line for itself: 1,024
// lengths are 8 a thread and a scan.
//
// A `piece` is what is computed without a break and has one result: the tiles of one pair that a
// block owns (Cuts::anywhere), or a part.
#pragma once

#include <cstdint>

#include "decode/line.h"
#include "decode/params.cuh"
#include "prim/warp.cuh"

namespace pantile::decode {

// What find_range() leaves in shared memory. Positions count cells; the line has fewer than 2^31.
struct Range {
  int sequence;      // of the first cell
  int cell;          // of that sequence, over all its pairs
  int begin;         // the first cell's place on the line
  int count;         // cells; 0: nothing to do
  int line, blocks;  // T and n
  int warp_sums[8];
};

PANTILE_DEVICE int cells_of_pair(const DecodeParams& p, const Sequence& s) {
  return p.cuts == Cuts::anywhere ? s.tiles - s.tile : count_parts(p, s);
}

PANTILE_DEVICE int pairs_of_sequence(const DecodeParams& p) {
  return p.heads_k * p.row_tiles;
}

// Sum over the lanes below this one; `total` over all.
PANTILE_DEVICE int scan_lanes(int value, int* total) {
  const int lane = prim::lane_index();
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(prim::kAllLanes, sum, step);
    sum += lane >= step ? below : 0;
  }
  *total = __shfl_sync(prim::kAllLanes, sum, 31);
  return sum - value;
}

// By all threads; ends with a barrier.
template <class Config>
PANTILE_DEVICE void find_range(const DecodeParams& p, Range& range) {
  const int thread = static_cast<int>(threadIdx.x);
  const int pairs = pairs_of_sequence(p);
  const int share = core::ceil_div(p.batch, Config::kThreads);
  const int low = core::min_of(thread * share, p.batch);
  const int high = core::min_of(low + share, p.batch);
  int own = 0;
#pragma unroll 1
  for (int b = low; b < high; ++b) {
    own += pairs * cells_of_pair(p, read_sequence<Config::kTileKeys>(p, b));
  }
  int warp_total;
  int before = scan_lanes(own, &warp_total);
  if ((thread & 31) == 0) {
    range.warp_sums[thread / 32] = warp_total;
  }
  __syncthreads();
  int line = 0;
#pragma unroll
  for (int w = 0; w < Config::kThreads / 32; ++w) {
    before += w < thread / 32 ? range.warp_sums[w] : 0;
    line += range.warp_sums[w];
  }
  const int blocks =
      active_blocks(static_cast<int>(gridDim.x), Config::kBlocks, line, p.cuts == Cuts::anywhere);
  const int block = static_cast<int>(blockIdx.x);
  const int begin = block < blocks ? line_begin(block, line, blocks) : line;
  const int end = block < blocks ? line_begin(block + 1, line, blocks) : line;
  if (thread == 0) {
    range.count = end - begin;
  }
  if (block < blocks && begin >= before && begin < before + own) {
    int at = before;
#pragma unroll 1
    for (int b = low;; ++b) {
      const int cells = pairs * cells_of_pair(p, read_sequence<Config::kTileKeys>(p, b));
      if (begin < at + cells) {
        range.sequence = b;
        range.cell = begin - at;
        range.begin = begin;
        range.line = line;
        range.blocks = blocks;
        break;
      }
      at += cells;
    }
  }
  __syncthreads();
}

// A position on the block's range, tile by tile. The loads and the products each have one; a warp's
// lanes agree on everything.
template <class Config>
struct Walk {
  Sequence s;
  int b, pair;     // sequence; pair within it
  int tile;        // current, of the sequence
  int piece;       // first tile of the piece
  int stop;        // one past the last tile of the piece
  int left;        // cells behind this piece
  int pair_begin;  // place on the line of the pair's first cell
  bool more;

  PANTILE_DEVICE void start(const DecodeParams& p, const Range& range) {
    b = range.sequence;
    s = read_sequence<Config::kTileKeys>(p, b);
    const int cells = cells_of_pair(p, s);
    pair = range.cell / cells;
    const int cell = range.cell - pair * cells;
    tile = s.tile;
    if (p.cuts == Cuts::anywhere) {
      tile += cell;
    } else if (cell > 0) {
      tile = first_tile(p, s, part_of_tile(p, s, s.tile) + cell);
    }
    pair_begin = range.begin - cell;
    left = range.count;
    more = true;
    begin_piece(p);
  }

  PANTILE_DEVICE void begin_piece(const DecodeParams& p) {
    piece = tile;
    if (p.cuts == Cuts::anywhere) {
      stop = core::min_of(s.tiles, tile + left);
      left -= stop - tile;
    } else {
      stop = core::min_of(s.tiles, first_tile(p, s, part_of_tile(p, s, tile) + 1));
      left -= 1;
    }
  }

  PANTILE_DEVICE bool piece_begins() const { return tile == piece; }
  PANTILE_DEVICE bool piece_ends() const { return tile == stop; }
  PANTILE_DEVICE bool whole_pair() const { return piece == s.tile && stop == s.tiles; }

  // The block's next piece is another part of the same pair.
  PANTILE_DEVICE bool pair_goes_on() const { return stop < s.tiles && left > 0; }

  // From a piece that ended to the next one, if there is one.
  PANTILE_DEVICE void next_piece(const DecodeParams& p) {
    if (left == 0) {
      more = false;
      return;
    }
    if (tile == s.tiles) {
      pair_begin += cells_of_pair(p, s);
      if (++pair == pairs_of_sequence(p)) {
        pair = 0;
        s = read_sequence<Config::kTileKeys>(p, ++b);
      }
      tile = s.tile;
    }
    begin_piece(p);
  }
};

// The slots of the workspace that hold the parts of a pair, ascending, and this piece's own.
struct PartSlots {
  int count;  // parts of the pair
  int own;    // slot of this piece
  int first;  // slot of part 0
  int base;   // that of part i > 0, less i

  PANTILE_DEVICE int at(int part) const { return part == 0 ? first : base + part; }
};

// Cuts::anywhere: slot i for block i's piece that continues a pair, slot grid + i for its piece
// that begins one. Parts: a slot for each place on the line.
template <class Config>
PANTILE_DEVICE PartSlots part_slots(const DecodeParams& p, const Walk<Config>& walk, int line,
                                    int blocks) {
  PartSlots slots;
  if (p.cuts != Cuts::anywhere) {
    slots.count = count_parts(p, walk.s);
    slots.own = walk.pair_begin + part_of_tile(p, walk.s, walk.piece) -
                part_of_tile(p, walk.s, walk.s.tile);
    slots.first = walk.pair_begin;
    slots.base = walk.pair_begin;
    return slots;
  }
  const int first = line_owner(walk.pair_begin, line, blocks);
  slots.count =
      line_owner(walk.pair_begin + walk.s.tiles - walk.s.tile - 1, line, blocks) - first + 1;
  const int grid = static_cast<int>(gridDim.x);
  slots.own = static_cast<int>(blockIdx.x) + (walk.piece == walk.s.tile ? grid : 0);
  slots.first = first + grid;
  slots.base = first;
  return slots;
}

}  // namespace pantile::decode
