// The mask that a variant adds to the window (pantile/variant.h): what a tile of
// queries sees of a tile of keys, and the bytes of those that it sees in part.
#pragma once

#include "cpu/isa/expression.h"
#include "cpu/isa/problem.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

enum class Sight { none, some, all };

// What a mask is asked about: a sequence and a head of queries.
struct MaskPlace {
  int batch, head;
  int shift;  // keys less queries of the sequence
};

PANTILE_INLINE const std::uint8_t* mask_row(const std::uint8_t* bytes, const MaskLayout& layout,
                                            const MaskPlace& at, int row) {
  return bytes + at.batch * layout.batch + at.head * layout.head + row * layout.query;
}

// Keys that a query sees of a prefix mask: those of the prefix, and those up to its own position.
PANTILE_INLINE int prefix_end(const MaskJob& mask, const MaskPlace& at, int row) {
  return core::max_of(mask.prefixes[at.batch * mask.batch_prefixes], row + at.shift + 1);
}

constexpr std::uint32_t kClause = (1u << kMaskForms) - 1;

// Whether all forms of a clause show the pair.
inline bool clause_shows(const MaskJob& mask, std::uint32_t clause, const MaskPlace& at, int row,
                         int key) {
  return ((clause & kMaskBlocks) == 0 ||
          mask_row(mask.blocks, mask.block_layout, at, row / mask.block)[key / mask.block] != 0) &&
         ((clause & kMaskElements) == 0 ||
          mask_row(mask.elements, mask.element_layout, at, row)[key] != 0) &&
         ((clause & kMaskDocuments) == 0 || mask.query_ids[at.batch * mask.batch_queries + row] ==
                                                mask.key_ids[at.batch * mask.batch_keys + key]) &&
         ((clause & kMaskPrefix) == 0 || key < prefix_end(mask, at, row));
}

// Calls visit(i, j, count, machine) for up to kSlotLanes pairs of a row at a time, whose result 0
// says which are shown, until it returns false. This is where a mask of the user's own is
// evaluated.
template <class Visit>
inline void evaluate_mask(const MaskJob& mask, int batch, int head, Span rows, Span keys,
                          const Visit& visit) {
  Machine machine(mask.program, mask.captured, batch, head);
  for (int i = rows.begin; i < rows.end; ++i) {
    for (int j = keys.begin; j < keys.end; j += kSlotLanes) {
      const int count = core::min_of(kSlotLanes, keys.end - j);
      machine.run_row(
          nullptr, PairRow{i, j, 0, 1, rows.end - 1, keys.end - 1, core::ceil_div(count, kLanes)});
      if (!visit(i, j, count, machine)) {
        return;
      }
    }
  }
}

inline bool shows_by_expression(const MaskJob& mask, int batch, int head, int row, int key) {
  bool shown = false;
  evaluate_mask(mask, batch, head, Span{row, row + 1}, Span{key, key + 1},
                [&](int, int, int, const Machine& machine) {
                  shown = machine.integer(0, 0) != 0;
                  return true;
                });
  return shown;
}

// Whether the pair is shown.
inline bool shows(const MaskJob& mask, const MaskPlace& at, int row, int key) {
  if (mask.has_expression) {
    return shows_by_expression(mask, at.batch, at.head, row, key);
  }
  bool shown = mask.clauses == 0;
  for (std::uint32_t rest = mask.clauses; rest != 0 && !shown; rest >>= kMaskForms) {
    shown = clause_shows(mask, rest & kClause, at, row, key);
  }
  return shown;
}

struct Seen {
  bool any = false;
  bool all = true;
  PANTILE_INLINE void add(bool shown) {
    any = any || shown;
    all = all && shown;
  }
  // Of what both show; `any` of it may be none in truth.
  PANTILE_INLINE void keep(const Seen& other) {
    any = any && other.any;
    all = all && other.all;
  }
  Sight sight() const { return all ? Sight::all : any ? Sight::some : Sight::none; }
};

inline Seen see_blocks(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys) {
  Seen seen;
  for (int r = rows.begin / mask.block; r <= (rows.end - 1) / mask.block; ++r) {
    const std::uint8_t* row = mask_row(mask.blocks, mask.block_layout, at, r);
    for (int k = keys.begin / mask.block; k <= (keys.end - 1) / mask.block; ++k) {
      seen.add(row[k] != 0);
    }
  }
  return seen;
}

inline Seen see_elements(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys) {
  Seen seen;
  const int last = mask.element_layout.query == 0 ? rows.begin + 1 : rows.end;  // rows share theirs
  for (int r = rows.begin; r < last; ++r) {
    const std::uint8_t* row = mask_row(mask.elements, mask.element_layout, at, r);
    std::uint8_t any = 0;
    std::uint8_t hidden = 0;
    for (int k = keys.begin; k < keys.end; ++k) {
      any = static_cast<std::uint8_t>(any | row[k]);
      hidden = static_cast<std::uint8_t>(hidden | (row[k] == 0 ? 1 : 0));
    }
    seen.any = seen.any || any != 0;
    seen.all = seen.all && hidden == 0;
  }
  return seen;
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
inline Seen see_documents(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys) {
  const IdRange q = id_range(mask.query_ids + at.batch * mask.batch_queries, rows);
  const IdRange k = id_range(mask.key_ids + at.batch * mask.batch_keys, keys);
  return Seen{q.high >= k.low && k.high >= q.low,
              q.low == q.high && k.low == k.high && q.low == k.low};
}

inline Seen see_prefix(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys) {
  return Seen{keys.begin < prefix_end(mask, at, rows.end - 1),
              keys.end <= prefix_end(mask, at, rows.begin)};
}

inline Sight sight_of_expression(const MaskJob& mask, int batch, int head, Span rows, Span keys) {
  Seen seen;
  evaluate_mask(mask, batch, head, rows, keys, [&](int, int, int count, const Machine& machine) {
    for (int lane = 0; lane < count; ++lane) {
      seen.add(machine.integer(0, lane) != 0);
    }
    return seen.all || !seen.any;
  });
  return seen.sight();
}

// Of rows and keys that are not empty.
inline Sight sight_of(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys) {
  if (mask.has_expression) {
    return sight_of_expression(mask, at.batch, at.head, rows, keys);
  }
  Seen seen{mask.clauses == 0, mask.clauses == 0};
  for (std::uint32_t rest = mask.clauses; rest != 0; rest >>= kMaskForms) {
    Seen clause{true, true};
    if ((rest & kMaskBlocks) != 0) {
      clause.keep(see_blocks(mask, at, rows, keys));
    }
    if ((rest & kMaskDocuments) != 0) {
      clause.keep(see_documents(mask, at, rows, keys));
    }
    if ((rest & kMaskPrefix) != 0) {
      clause.keep(see_prefix(mask, at, rows, keys));
    }
    if ((rest & kMaskElements) != 0 && clause.any) {
      clause.keep(see_elements(mask, at, rows, keys));
    }
    seen.any = seen.any || clause.any;
    seen.all = seen.all || clause.all;
  }
  return seen.sight();
}

// One byte for each pair of a tile, not 0 where it is shown: to[i * ld + j], j along the lanes.
// kByKeys: those are queries.
template <bool kByKeys>
inline void shown_bytes(const MaskJob& mask, const MaskPlace& at, Span rows, Span keys, int ld,
                        std::uint8_t* to) {
  if (mask.has_expression) {
    evaluate_mask(mask, at.batch, at.head, rows, keys,
                  [&](int row, int key, int count, const Machine& machine) {
                    const int i = row - rows.begin;
                    for (int lane = 0; lane < count; ++lane) {
                      const int j = key - keys.begin + lane;
                      to[kByKeys ? j * ld + i : i * ld + j] = machine.integer(0, lane) != 0 ? 1 : 0;
                    }
                    return true;
                  });
    return;
  }
  for (int i = 0; i < rows.size(); ++i) {
    for (int j = 0; j < keys.size(); ++j) {
      const bool shown = shows(mask, at, rows.begin + i, keys.begin + j);
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
    return core::is_visible(window, row, key) &&
           shows(mask, MaskPlace{batch, head, window.shift()}, row, key);
  }
};

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
