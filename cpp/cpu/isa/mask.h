// The mask that a variant adds to the window (MaskForm of pantile/variant.h): what a tile of
// queries sees of a tile of keys, and the bytes of those that it sees in part.
#pragma once

#include "cpu/isa/problem.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

enum class Sight { none, some, all };

PANTILE_INLINE const std::uint8_t* mask_row(const MaskJob& mask, int batch, int head, int row) {
  return mask.bytes + batch * mask.batch + head * mask.head + row * mask.query;
}

// Whether the pair is shown.
inline bool shows(const MaskJob& mask, int batch, int head, int row, int key) {
  switch (mask.form) {
    case MaskForm::blocks:
      return mask_row(mask, batch, head, row / mask.block)[key / mask.block] != 0;
    case MaskForm::elements: return mask_row(mask, batch, head, row)[key] != 0;
    case MaskForm::documents:
      return mask.query_ids[batch * mask.batch + row] ==
             mask.key_ids[batch * mask.batch_keys + key];
    default: return true;
  }
}

struct Seen {
  bool any = false;
  bool all = true;
  PANTILE_INLINE void add(bool shown) {
    any = any || shown;
    all = all && shown;
  }
  Sight sight() const { return all ? Sight::all : any ? Sight::some : Sight::none; }
};

inline Sight sight_of_blocks(const MaskJob& mask, int batch, int head, Span rows, Span keys) {
  Seen seen;
  for (int r = rows.begin / mask.block; r <= (rows.end - 1) / mask.block; ++r) {
    const std::uint8_t* row = mask_row(mask, batch, head, r);
    for (int k = keys.begin / mask.block; k <= (keys.end - 1) / mask.block; ++k) {
      seen.add(row[k] != 0);
    }
  }
  return seen.sight();
}

inline Sight sight_of_elements(const MaskJob& mask, int batch, int head, Span rows, Span keys) {
  Seen seen;
  const int last = mask.query == 0 ? rows.begin + 1 : rows.end;  // rows share theirs
  for (int r = rows.begin; r < last; ++r) {
    const std::uint8_t* row = mask_row(mask, batch, head, r);
    std::uint8_t any = 0;
    std::uint8_t hidden = 0;
    for (int k = keys.begin; k < keys.end; ++k) {
      any = static_cast<std::uint8_t>(any | row[k]);
      hidden = static_cast<std::uint8_t>(hidden | (row[k] == 0 ? 1 : 0));
    }
    seen.any = seen.any || any != 0;
    seen.all = seen.all && hidden == 0;
  }
  return seen.sight();
}

// Smallest and largest of some ids.
struct IdRange {
  std::int32_t low, high;
};
inline IdRange id_range(const std::int32_t* ids, Span span) {
  IdRange range{ids[span.begin], ids[span.begin]};
  for (int i = span.begin; i < span.end; ++i) {
    range.low = core::min_of(range.low, ids[i]);
    range.high = core::max_of(range.high, ids[i]);
  }
  return range;
}

// Ids may come in any order: ranges that overlap may still have none in common.
inline Sight sight_of_documents(const MaskJob& mask, int batch, Span rows, Span keys) {
  const IdRange q = id_range(mask.query_ids + batch * mask.batch, rows);
  const IdRange k = id_range(mask.key_ids + batch * mask.batch_keys, keys);
  if (q.high < k.low || k.high < q.low) {
    return Sight::none;
  }
  return q.low == q.high && k.low == k.high ? Sight::all : Sight::some;
}

// Of rows and keys that are not empty.
inline Sight sight_of(const MaskJob& mask, int batch, int head, Span rows, Span keys) {
  switch (mask.form) {
    case MaskForm::blocks: return sight_of_blocks(mask, batch, head, rows, keys);
    case MaskForm::elements: return sight_of_elements(mask, batch, head, rows, keys);
    case MaskForm::documents: return sight_of_documents(mask, batch, rows, keys);
    default: return Sight::all;
  }
}

// One byte for each pair of a tile, not 0 where it is shown: to[i * ld + j], j along the lanes.
// kByKeys: those are queries.
template <bool kByKeys>
inline void shown_bytes(const MaskJob& mask, int batch, int head, Span rows, Span keys, int ld,
                        std::uint8_t* to) {
  for (int i = 0; i < rows.size(); ++i) {
    for (int j = 0; j < keys.size(); ++j) {
      const bool shown = shows(mask, batch, head, rows.begin + i, keys.begin + j);
      to[kByKeys ? j * ld + i : i * ld + j] = shown ? 1 : 0;
    }
  }
}

// Which of kLanes pairs are shown.
PANTILE_INLINE Ints shown_lanes(const std::uint8_t* bytes) {
  typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes shown;
  __builtin_memcpy(&shown, bytes, sizeof shown);
  return __builtin_convertvector(shown, Ints) != 0;
}

// Hides scores of S^T, queries along the lanes.
inline void hide_unshown(const std::uint8_t* bytes, int keys, int vectors, float* scores) {
  for (int at = 0; at < keys * kForwardRows; at += kForwardRows) {
    for (int v = at; v < at + vectors * kLanes; v += kLanes) {
      store(scores + v, select(shown_lanes(bytes + v), load(scores + v), splat(kHidden)));
    }
  }
}

// Both masks of a query head, for single pairs.
struct VisiblePairs {
  const core::ShiftedMask& window;
  const MaskJob& mask;
  int batch, head;
  bool operator()(int row, int key) const {
    return core::is_visible(window, row, key) && shows(mask, batch, head, row, key);
  }
};

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
