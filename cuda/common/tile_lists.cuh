// Lists of the tiles that a mask leaves (attn/tile_mask.h), made on the device before the kernel
// that walks them:
//
//   1 list_tiles   a block a list: its warps ask the mask about the tiles that the window leaves,
//                  one tile a warp, in chunks of as many tiles as the block has threads
//   2 order_work   a block a section of heads: its work items, longest first (a counting sort)
//
// Forward: a list holds tiles of keys and belongs to a tile of rows. Backward (kTransposed): the
// other way round, both counted from the first attended row and key (attended.h). Whole tiles come
// first; of the others the last keys are the last, so that the forward, which walks from the end,
// meets the ragged tile first.
#pragma once

#include "attn/tile_mask.cuh"
#include "attn/tile_mask.h"
#include "common/attended.h"
#include "core/geometry.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "prim/grid_dependency.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

inline constexpr int kListThreads = 512;
inline constexpr int kOrderThreads = 1024;

struct ListParams {
  attn::MaskParams mask;
  attn::TileLists lists;
  core::SequenceSide queries, keys;  // lengths only
  TileNumbers numbers;               // of the tiles that have lists
  int window_left, window_right;
  int tile_rows, tile_keys;
};

// Where a list's tile lies.
struct ListedTile {
  attn::MaskPlace at;
  core::Mask mask;           // of the window; backward: of the attended part
  int first_row, first_key;  // backward: where that part begins, else 0
  int tile;                  // of its sequence
};

template <bool kTransposed>
PANTILE_DEVICE ListedTile locate_list(const ListParams& p, int number, int head) {
  ListedTile listed;
  const int batch = p.numbers.sequence(number);
  listed.tile = number - p.numbers.first(batch);
  const int rows = core::locate_sequence(p.queries, batch).length;
  const int keys = core::locate_sequence(p.keys, batch).length;
  listed.at = attn::MaskPlace{batch, head, rows, keys};
  listed.mask = core::Mask{rows, keys, p.window_left, p.window_right};
  listed.first_row = listed.first_key = 0;
  if constexpr (kTransposed) {
    const Attended part = attended_part(listed.mask);
    listed.first_row = part.first_row;
    listed.first_key = part.first_key;
    listed.mask = part.mask;
  }
  return listed;
}

// Puts the entries of a list together, chunk by chunk.
class ListWriter {
 public:
  PANTILE_DEVICE explicit ListWriter(std::int32_t* entries, int capacity)
      : entries_(entries), capacity_(capacity) {}

  // One entry of each thread, in the order of the threads; negative: none. Whole tiles grow from
  // the front, the others from the back.
  PANTILE_DEVICE void add(int entry) {
    __shared__ int before[kWarps][2];
    const bool whole = entry >= 0 && attn::sight_of_entry(entry) == attn::TileSight::whole;
    const unsigned masks[2] = {__ballot_sync(prim::kAllLanes, whole),
                               __ballot_sync(prim::kAllLanes, entry >= 0 && !whole)};
    const int lane = prim::lane_index(), warp = static_cast<int>(threadIdx.x) / 32;
    __syncthreads();
    if (lane < 2) {
      before[warp][lane] = __popc(masks[lane]);
    }
    __syncthreads();
    int offset[2] = {0, 0}, total[2] = {0, 0};
    for (int w = 0; w < kWarps; ++w) {
      for (int i = 0; i < 2; ++i) {
        offset[i] += w < warp ? before[w][i] : 0;
        total[i] += before[w][i];
      }
    }
    if (entry >= 0) {
      const unsigned lower = (1u << lane) - 1;
      if (whole) {
        entries_[whole_ + offset[0] + __popc(masks[0] & lower)] = entry;
      } else {
        entries_[capacity_ - 1 - other_ - offset[1] - __popc(masks[1] & lower)] = entry;
      }
    }
    whole_ += total[0];
    other_ += total[1];
  }

  // Moves the others behind the whole ones. The lists of a thread's block are its own.
  PANTILE_DEVICE void close(std::int32_t* counts) {
    const int gap = capacity_ - other_ - whole_;
    __syncthreads();
    if (gap > 0) {
      for (int i = 0; i < other_; i += kListThreads) {
        const int at = whole_ + i + static_cast<int>(threadIdx.x);
        const bool mine = i + static_cast<int>(threadIdx.x) < other_;
        const int entry = mine ? entries_[at + gap] : 0;
        __syncthreads();
        if (mine) {
          entries_[at] = entry;
        }
        __syncthreads();
      }
    }
    if (threadIdx.x == 0) {
      counts[0] = whole_;
      counts[1] = whole_ + other_;
    }
  }

 private:
  static constexpr int kWarps = kListThreads / 32;
  std::int32_t* entries_;
  int capacity_;
  int whole_ = 0, other_ = 0;
};

// One block: the list of the tile with that number, of a head.
template <class Mask, bool kTransposed>
PANTILE_DEVICE void list_tile(const ListParams& p, int number, int head) {
  constexpr int kWarps = kListThreads / 32;
  __shared__ std::uint8_t sights[kListThreads];
  const attn::TileLists& lists = p.lists;
  const std::int64_t list = std::int64_t{head} * lists.tiles + number;
  const ListedTile listed = locate_list<kTransposed>(p, number, head);
  const int own = kTransposed ? p.tile_keys : p.tile_rows;
  const int other = kTransposed ? p.tile_rows : p.tile_keys;
  const int own_end = kTransposed ? listed.mask.keys : listed.mask.rows;
  const int other_end = kTransposed ? listed.mask.rows : listed.mask.keys;
  const core::Span mine{listed.tile * own, core::min_of((listed.tile + 1) * own, own_end)};
  core::TilePlan plan{{0, 0}, {0, 0}};
  if (!mine.empty()) {
    plan = kTransposed ? core::plan_key_tile(listed.mask, mine, other)
                       : core::plan_row_tile(listed.mask, mine, other);
  }
  ListWriter writer(lists.entries + list * lists.capacity, lists.capacity);
  const int lane = prim::lane_index(), warp = static_cast<int>(threadIdx.x) / 32;
  for (int end = plan.visit.end; end > plan.visit.begin; end -= kListThreads) {
    const int count = core::min_of(end - plan.visit.begin, kListThreads);
    __syncthreads();
    for (int i = warp; i < count; i += kWarps) {
      const int tile = end - 1 - i;
      const core::Span theirs{tile * other, core::min_of((tile + 1) * other, other_end)};
      core::Span rows = kTransposed ? theirs : mine, keys = kTransposed ? mine : theirs;
      rows = core::Span{rows.begin + listed.first_row, rows.end + listed.first_row};
      keys = core::Span{keys.begin + listed.first_key, keys.end + listed.first_key};
      const attn::Sight sight = Mask::sight(p.mask, listed.at, rows, keys);
      if (lane == 0) {
        sights[i] = static_cast<std::uint8_t>(sight);
      }
    }
    __syncthreads();
    int entry = -1;
    if (static_cast<int>(threadIdx.x) < count) {
      const int tile = end - 1 - static_cast<int>(threadIdx.x);
      const auto sight = static_cast<attn::Sight>(sights[threadIdx.x]);
      // A backward cuts keys past the end in all of its tiles, and no rows.
      const bool inside = kTransposed
                              ? mine.size() == own && tile >= plan.full.begin &&
                                    (tile < plan.full.end ||
                                     (plan.full.begin < plan.full.end && tile == plan.full.end &&
                                      (tile + 1) * other > other_end))
                              : tile >= plan.full.begin && tile < plan.full.end;
      if (sight != attn::Sight::none) {
        entry = attn::list_entry(tile, sight == attn::Sight::some ? attn::TileSight::partial
                                       : inside                   ? attn::TileSight::whole
                                                                  : attn::TileSight::cut);
      }
    }
    writer.add(entry);
  }
  std::int32_t* const counts = lists.counts + 2 * list;
  writer.close(counts);
  if (!kTransposed && threadIdx.x == 0 && !mine.empty() && counts[1] == 0) {
    counts[1] = 1;
    lists.entries[list * lists.capacity] = attn::list_entry(0, attn::TileSight::hidden);
  }
}

// A block a list, of lists.tiles * heads.
template <class Mask, bool kTransposed>
PANTILE_DEVICE void list_tiles_body(const ListParams& p) {
  prim::allow_next_grid();
  prim::wait_for_previous_grid();  // it may write the mask, and read the lists before
  const int block = static_cast<int>(blockIdx.x);
  list_tile<Mask, kTransposed>(p, block % p.lists.tiles, block / p.lists.tiles);
}

template <class Mask, bool kTransposed>
__global__ void __launch_bounds__(kListThreads, 2)
    list_tiles(const __grid_constant__ ListParams p) {
  list_tiles_body<Mask, kTransposed>(p);
}

// ---- order

struct OrderParams {
  attn::TileLists lists;
  core::TileOrder order;  // of dense tiles; packed: of the numbers of all sequences' tiles
  int section_items;      // work items of a section
  int items;
  int group;  // lists of a work item: those of so many heads of queries
  // Backward of packed keys: work item w is tile number w / heads, head w % heads; else 0.
  int packed_heads;
};

PANTILE_DEVICE int work_length(const OrderParams& p, int work) {
  int number, head;
  if (p.packed_heads > 0) {
    number = work / p.packed_heads;
    head = work % p.packed_heads;
  } else {
    const core::WorkTile place = p.order.tile(work);
    number = place.batch * p.lists.batch_step + place.tile;
    head = place.head;
  }
  int length = 0;
  for (int g = 0; g < p.group; ++g) {
    const std::int64_t list =
        std::int64_t{head * p.group + g} * p.lists.head_step * p.lists.tiles + number;
    length += p.lists.counts[2 * list + 1];
  }
  return length;
}

// A block a section: buckets of equal or nearly equal lengths, the longest first.
PANTILE_DEVICE void order_work_body(const OrderParams& p) {
  constexpr int kBuckets = kOrderThreads;
  __shared__ int starts[kBuckets];
  __shared__ int sums[32];
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = static_cast<int>(blockIdx.x) * p.section_items;
  const int end = core::min_of(begin + p.section_items, p.items);
  const std::int64_t most = core::max_of(std::int64_t{p.lists.capacity} * p.group, std::int64_t{1});
  const auto bucket = [&](int work) {
    const std::int64_t length = core::min_of<std::int64_t>(work_length(p, work), most);
    return kBuckets - 1 - static_cast<int>(length * (kBuckets - 1) / most);
  };
  starts[thread] = 0;
  __syncthreads();
  for (int work = begin + thread; work < end; work += kOrderThreads) {
    atomicAdd(&starts[bucket(work)], 1);
  }
  __syncthreads();
  // Exclusive sums: of a warp, then of the warps.
  const int count = starts[thread];
  int sum = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(prim::kAllLanes, sum, step);
    sum += prim::lane_index() >= step ? below : 0;
  }
  if (prim::lane_index() == 31) {
    sums[thread / 32] = sum;
  }
  __syncthreads();
  int before = 0;
  for (int warp = 0; warp < thread / 32; ++warp) {
    before += sums[warp];
  }
  starts[thread] = before + sum - count;
  __syncthreads();
  for (int work = begin + thread; work < end; work += kOrderThreads) {
    p.lists.order[begin + atomicAdd(&starts[bucket(work)], 1)] = work;
  }
}

template <int kThreads = kOrderThreads>
__global__ void __launch_bounds__(kThreads) order_work(const __grid_constant__ OrderParams p) {
  order_work_body(p);
}

}  // namespace pantile::common
