// Lists of the tiles that a mask leaves (attn/tile_mask.h), made on the device before the kernel
// that walks them:
//
//   1 list_tiles   a block a list: its warps ask the mask about the tiles that the window leaves,
//                  one tile a warp, in chunks of as many tiles as the block has threads
//   2 order_work   a block a section of heads: its work items, the longest first
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
  const std::int32_t* mask_shift;    // [batch], forward; null: masks end at the bottom right
  TileNumbers numbers;               // of the tiles that have lists
  int window_left, window_right;
  int tile_rows, tile_keys;
};

// Where a list's tile lies.
struct ListedTile {
  attn::MaskPlace at;
  core::ShiftedMask mask;    // of the window; backward: of the attended part
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
  const core::Mask mask{rows, keys, p.window_left, p.window_right};
  listed.mask = core::with_shift(mask, mask.shift());
  listed.first_row = listed.first_key = 0;
  if constexpr (kTransposed) {
    const Attended part = attended_part(mask);
    listed.first_row = part.first_row;
    listed.first_key = part.first_key;
    listed.mask = core::with_shift(part.mask, part.mask.shift());
  } else if (p.mask_shift != nullptr) {
    listed.mask = core::with_shift(mask, p.mask_shift[batch]);
  }
  listed.at =
      attn::MaskPlace{batch, head, rows, keys, kTransposed ? mask.shift() : listed.mask.shift()};
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
  PANTILE_DEVICE void close(std::int32_t* counts, int first_count) {
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
      counts[0] = first_count;
      counts[1] = whole_ + other_;
    }
  }

  PANTILE_DEVICE int whole() const { return whole_; }

 private:
  static constexpr int kWarps = kListThreads / 32;
  std::int32_t* entries_;
  int capacity_;
  int whole_ = 0, other_ = 0;
};

// Backward: whether all of `keys` are seen by all rows of tile `tile`. Rows past the end do not
// count: their weights are 0.
PANTILE_DEVICE bool all_see(const core::ShiftedMask& mask, const core::Span& keys, int tile_rows,
                            int tile) {
  const core::Span first = core::visible_rows(mask, keys.begin);
  const core::Span last = core::visible_rows(mask, keys.end - 1);
  return tile * tile_rows >= last.begin &&
         core::min_of((tile + 1) * tile_rows, mask.rows) <= first.end;
}

// One block: the list of the tile with that number, of a head.
template <class Mask, bool kTransposed>
PANTILE_DEVICE void list_tile(const ListParams& p, int number, int head) {
  constexpr int kWarps = kListThreads / 32;
  __shared__ std::uint32_t seen[kListThreads];
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
  int partial = 0;
  ListWriter writer(lists.entries + list * lists.capacity, lists.capacity);
  const int lane = prim::lane_index(), warp = static_cast<int>(threadIdx.x) / 32;
  for (int end = plan.visit.end; end > plan.visit.begin; end -= kListThreads) {
    const int count = core::min_of(end - plan.visit.begin, kListThreads);
    const auto ask = [&](int i, const auto& question) {
      const int tile = end - 1 - i;
      const core::Span theirs{tile * other, core::min_of((tile + 1) * other, other_end)};
      const core::Span& rows = kTransposed ? theirs : mine;
      const core::Span& keys = kTransposed ? mine : theirs;
      return question(core::Span{rows.begin + listed.first_row, rows.end + listed.first_row},
                      core::Span{keys.begin + listed.first_key, keys.end + listed.first_key});
    };
    const int thread = static_cast<int>(threadIdx.x);
    std::uint32_t found = 0;
    if (thread < count) {
      found = ask(thread, [&](const core::Span& rows, const core::Span& keys) {
        return Mask::see(p.mask, listed.at, rows, keys);
      });
    }
    const bool looks_on = __syncthreads_or(thread < count && Mask::look_on(p.mask, found)) != 0;
    if (looks_on) {
      seen[thread] = found;
      __syncthreads();
      for (int i = warp; i < count; i += kWarps) {
        if (Mask::look_on(p.mask, seen[i])) {
          const std::uint32_t more = ask(i, [&](const core::Span& rows, const core::Span& keys) {
            return Mask::see_closely(p.mask, listed.at, rows, keys, seen[i]);
          });
          __syncwarp();
          if (lane == 0) {
            seen[i] = more;
          }
        }
      }
      __syncthreads();
      found = seen[thread];
    }
    int entry = -1;
    if (thread < count) {
      const int tile = end - 1 - thread;
      const attn::Sight sight = Mask::sight(p.mask, found);
      const bool inside = kTransposed
                              ? mine.size() == own && all_see(listed.mask, mine, other, tile)
                              : tile >= plan.full.begin && tile < plan.full.end;
      if (sight != attn::Sight::none) {
        entry = attn::list_entry(tile, sight == attn::Sight::some ? attn::TileSight::partial
                                       : inside                   ? attn::TileSight::whole
                                                                  : attn::TileSight::cut);
      }
    }
    writer.add(entry);
    partial |=
        __syncthreads_or(entry >= 0 && attn::sight_of_entry(entry) == attn::TileSight::partial);
  }
  std::int32_t* const counts = lists.counts + 2 * list;
  writer.close(counts, kTransposed ? partial : writer.whole());
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

// What is known of a work item: x the item, y counts[0] of its lists, any bit, z their entries, w
// the last entry, if it has one list.
PANTILE_DEVICE int4 describe_work(const OrderParams& p, int work) {
  int number, head;
  if (p.packed_heads > 0) {
    number = work / p.packed_heads;
    head = work % p.packed_heads;
  } else {
    const core::WorkTile place = p.order.tile(work);
    number = place.batch * p.lists.batch_step + place.tile;
    head = place.head;
  }
  int4 item = make_int4(work, 0, 0, 0);
  for (int g = 0; g < p.group; ++g) {
    const std::int64_t list =
        std::int64_t{head * p.group + g} * p.lists.head_step * p.lists.tiles + number;
    const int2 counts = *reinterpret_cast<const int2*>(p.lists.counts + 2 * list);
    item.y |= counts.x;
    item.z += counts.y;
    if (p.group == 1 && counts.y > 0) {
      item.w = p.lists.entries[list * p.lists.capacity + counts.y - 1];
    }
  }
  return item;
}

PANTILE_DEVICE int work_length(const OrderParams& p, int work) {
  return describe_work(p, work).z;
}

// Lengths from 2^(c - 1) to 2^c - 1 are class c; 0 is class 0.
PANTILE_DEVICE int class_of(int length) {
  return 32 - __clz(length);
}

inline constexpr int kClasses = 32;

// Adds 1 to counters[at] for each lane that counts, lanes with the same counter together, and
// returns what the lane found there. Lists are often equally long: one by one, a block's additions
// to one counter would take longer than all else. All lanes of a warp call it.
PANTILE_DEVICE int count_one(int* counters, int at, bool counts) {
  const int lane = prim::lane_index();
  const unsigned peers = __match_any_sync(prim::kAllLanes, counts ? at : -1);
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  int found = 0;
  if (counts && lane == leader) {
    found = atomicAdd(counters + at, __popc(peers));
  }
  return __shfl_sync(prim::kAllLanes, found, leader) + __popc(peers & ((1u << lane) - 1));
}

// Where the items of a section begin that have a class: longer ones come first, those of all
// sections, and in a class one section after the other. Adds up what all items have to say.
PANTILE_DEVICE void find_class_starts(const OrderParams& p, int section, int (&starts)[kClasses]) {
  __shared__ int all[kClasses], before[kClasses];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kClasses) {
    all[thread] = before[thread] = 0;
  }
  __syncthreads();
  for (int first = 0; first < p.items; first += kOrderThreads) {
    const int work = first + thread;
    const bool exists = work < p.items;
    const int c = exists ? class_of(work_length(p, work)) : 0;
    count_one(all, c, exists);
    count_one(before, c, exists && work / p.section_items < section);
  }
  __syncthreads();
  if (thread < kClasses) {
    int start = before[thread];
    for (int c = thread + 1; c < kClasses; ++c) {
      start += all[c];
    }
    starts[thread] = start;
  }
  __syncthreads();
}

// Exclusive sums over the block of one number a thread.
PANTILE_DEVICE int sum_before(int count) {
  __shared__ int sums[kOrderThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
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
  return before + sum - count;
}

// A block a section. Its items are sorted by their lengths, in buckets of equal or nearly equal
// ones; the buckets of a class go where the section's part of the class begins. So the few longest
// items of all sections run first, and most items run while the keys of their section are in L2.
PANTILE_DEVICE void order_work_body(const OrderParams& p) {
  constexpr int kBuckets = kOrderThreads;
  __shared__ int places[kBuckets];
  __shared__ int class_starts[kClasses], own_starts[kClasses];
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  const int thread = static_cast<int>(threadIdx.x);
  const int section = static_cast<int>(blockIdx.x);
  const int begin = section * p.section_items;
  const int end = core::min_of(begin + p.section_items, p.items);
  find_class_starts(p, section, class_starts);
  // A class has a part of the buckets of its own, so that buckets never hold two classes.
  const int classes = class_of(p.lists.capacity * p.group) + 1;
  const int part = kBuckets / classes;
  const auto bucket = [&](int length) {
    const int c = class_of(length);
    const int low = c == 0 ? 0 : 1 << (c - 1);
    const int width = c <= 1 ? 1 : 1 << (c - 1);
    const int inside = static_cast<int>(std::int64_t{length - low} * part / width);
    return kBuckets - 1 - (c * part + inside);
  };
  places[thread] = 0;
  __syncthreads();
  for (int at = begin; at < end; at += kOrderThreads) {
    const bool exists = at + thread < end;
    count_one(places, exists ? bucket(work_length(p, at + thread)) : 0, exists);
  }
  __syncthreads();
  const int first = sum_before(places[thread]);
  __syncthreads();
  places[thread] = first;
  __syncthreads();
  if (thread < classes) {
    own_starts[thread] = places[kBuckets - (thread + 1) * part];
  }
  __syncthreads();
  for (int at = begin; at < end; at += kOrderThreads) {
    const bool exists = at + thread < end;
    const int4 item = exists ? describe_work(p, at + thread) : make_int4(0, 0, 0, 0);
    const int place = count_one(places, bucket(item.z), exists);
    if (exists) {
      const int c = class_of(item.z);
      reinterpret_cast<int4*>(p.lists.order)[class_starts[c] + place - own_starts[c]] = item;
    }
  }
}

template <int kThreads = kOrderThreads>
__global__ void __launch_bounds__(kThreads) order_work(const __grid_constant__ OrderParams p) {
  order_work_body(p);
}

}  // namespace pantile::common
