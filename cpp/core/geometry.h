// Which keys a query row sees, and which tiles a tile of rows (or of keys) must visit.
//
// One sequence has `rows` queries and `keys` keys. Query i sits at key position i + shift:
//   query i sees key j   <=>   i + shift - left <= j <= i + shift + right
// Masks are bottom-right aligned, shift = keys - rows, so that the last query faces the last key,
// unless the caller gives another shift.
// Spans are half open. Lengths are below 2^29, so that no sum here leaves 32 bits.
#pragma once

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

inline constexpr int kNoBound = 1 << 29;  // a window side that hides nothing

struct Span {
  int begin, end;
  PANTILE_HD constexpr int size() const { return end > begin ? end - begin : 0; }
  PANTILE_HD constexpr bool empty() const { return end <= begin; }
};

// The mask of one sequence, aligned to the bottom right.
struct Mask {
  int rows, keys;
  int left, right;  // 0..kNoBound
  PANTILE_HD constexpr int shift() const { return keys - rows; }
};

// The same with any shift. A type of its own: kernels that have no other shift do not carry one.
struct ShiftedMask {
  int rows, keys;
  int left, right;  // 0..kNoBound
  int given;        // -kNoBound..kNoBound
  PANTILE_HD constexpr int shift() const { return given; }
};

PANTILE_HD constexpr ShiftedMask with_shift(const Mask& mask, int shift) {
  return ShiftedMask{mask.rows, mask.keys, mask.left, mask.right,
                     clamp(shift, -kNoBound, kNoBound)};
}

// The functions below take either.

// From the public convention, where a negative side is unbounded.
PANTILE_HD constexpr Mask make_mask(int rows, int keys, long long window_left,
                                    long long window_right) {
  const long long no_bound = kNoBound;
  return Mask{rows, keys,
              window_left < 0 ? kNoBound : static_cast<int>(min_of(window_left, no_bound)),
              window_right < 0 ? kNoBound : static_cast<int>(min_of(window_right, no_bound))};
}

// Keys that query `row` sees; empty when it sees none.
template <class AnyMask>
PANTILE_HD constexpr Span visible_keys(const AnyMask& mask, int row) {
  const int position = row + mask.shift();
  return Span{clamp(position - mask.left, 0, mask.keys),
              clamp(position + mask.right + 1, 0, mask.keys)};
}

// Rows that see key `key`; empty when none does.
template <class AnyMask>
PANTILE_HD constexpr Span visible_rows(const AnyMask& mask, int key) {
  const int position = key - mask.shift();
  return Span{clamp(position - mask.right, 0, mask.rows),
              clamp(position + mask.left + 1, 0, mask.rows)};
}

template <class AnyMask>
PANTILE_HD constexpr bool is_visible(const AnyMask& mask, int row, int key) {
  const Span span = visible_keys(mask, row);
  return key >= span.begin && key < span.end;
}

// Tiles to visit, in units of tiles. `visit` holds every visible pair; tiles in `full` (a part of
// `visit`, possibly empty) are visible to all rows (keys) of the tile and need no mask. Everything
// of `visit` outside `full` must be masked element by element.
struct TilePlan {
  Span visit;
  Span full;
};

namespace detail {
PANTILE_HD constexpr TilePlan tile_plan(Span touched, Span common, int tile) {
  TilePlan plan{{0, 0}, {0, 0}};
  if (touched.empty()) {
    return plan;
  }
  plan.visit = Span{touched.begin / tile, ceil_div(touched.end, tile)};
  plan.full = Span{plan.visit.begin, plan.visit.begin};
  if (!common.empty()) {
    // The last, ragged tile is never full: its elements past the end need the mask.
    const int end = common.end / tile;
    const int begin = ceil_div(common.begin, tile);
    if (begin < end) {
      plan.full = Span{begin, end};
    }
  }
  return plan;
}
}  // namespace detail

// Key tiles of `tile` keys for the query rows [rows.begin, rows.end), which must not be empty.
template <class AnyMask>
PANTILE_HD constexpr TilePlan plan_row_tile(const AnyMask& mask, Span rows, int tile) {
  const Span first = visible_keys(mask, rows.begin);
  const Span last = visible_keys(mask, rows.end - 1);
  return detail::tile_plan(Span{first.begin, last.end}, Span{last.begin, first.end}, tile);
}

// Row tiles of `tile` rows for the keys [keys.begin, keys.end), which must not be empty.
template <class AnyMask>
PANTILE_HD constexpr TilePlan plan_key_tile(const AnyMask& mask, Span keys, int tile) {
  const Span first = visible_rows(mask, keys.begin);
  const Span last = visible_rows(mask, keys.end - 1);
  return detail::tile_plan(Span{first.begin, last.end}, Span{last.begin, first.end}, tile);
}

}  // namespace pantile::core
