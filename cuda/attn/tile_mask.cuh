// The masks beside the window, as kernels ask them. A mask that lists can be made of is a type with
// these static functions; rows and keys count from the start of their sequence:
//
//   visible(params, at, row, key)         one pair
//   see(params, at, rows, keys)           what a thread finds out of a tile by itself: a number
//   look_on(params, seen)                 whether a warp should find out more,
//   see_closely(params, at, rows, keys, seen)  which it does here
//   sight(params, seen)                   what that says; `some` where finding out is not worth it
//   fragment<kTransposed>(params, at, row, key, bits)
//                                         the elements of a thread's fragment. Of a forward: rows
//                                         `row` + 8 i, keys `key` + 8 j + c. Transposed: keys
//                                         `key` + 8 i, rows `row` + 8 j + c. Bit 2 j + c of bits[i]
//
// Rows and keys past the end may be asked for; the answer does not matter, and nothing outside of
// the mask's tensors is read. Walks (hopper/forward/walk.cuh) and the lists' kernels
// (common/tile_lists.cuh) take the type as an argument.
#pragma once

#include <cstdint>

#include "attn/tile_mask.h"
#include "core/geometry.h"
#include "prim/warp.cuh"

namespace pantile::attn {

// What a mask is asked about: a sequence and a head of queries.
struct MaskPlace {
  int batch, head;
  int rows, keys;  // of the sequence
  int shift;       // query i sits at key position i + shift
};

enum class Sight { none, some, all };

namespace detail {

struct Seen {
  bool any, all;
};

// ---- blocks

PANTILE_DEVICE const std::uint8_t* block_row(const MaskParams& p, const MaskPlace& at, int row) {
  return p.blocks + at.batch * p.blocks_batch + at.head * p.blocks_head +
         (row >> p.block_shift) * p.blocks_row;
}

PANTILE_DEVICE Seen see_blocks(const MaskParams& p, const MaskPlace& at, const core::Span& rows,
                               const core::Span& keys) {
  Seen seen{false, true};
  const int size = 1 << p.block_shift;
  for (int row = rows.begin; row < rows.end; row = ((row >> p.block_shift) + 1) * size) {
    const std::uint8_t* const line = block_row(p, at, row);
    for (int k = keys.begin >> p.block_shift; k <= (keys.end - 1) >> p.block_shift; ++k) {
      const bool shown = line[k] != 0;
      seen.any = seen.any || shown;
      seen.all = seen.all && shown;
    }
  }
  return seen;
}

// ---- elements

PANTILE_DEVICE const std::uint8_t* element_row(const MaskParams& p, const MaskPlace& at, int row) {
  return p.elements + at.batch * p.elements_batch + at.head * p.elements_head +
         row * p.elements_row;
}

PANTILE_DEVICE bool has_zero_byte(std::uint32_t word) {
  return ((word - 0x01010101u) & ~word & 0x80808080u) != 0;
}

// 16 bytes of a lane at a time; rows and keys begin at multiples of 16 bytes.
PANTILE_DEVICE Seen see_words(const std::uint8_t* first, std::int64_t stride, int rows, int words) {
  constexpr int kAtOnce = 4;
  bool any = false, hidden = false;
  const int count = rows * words;
#pragma unroll 1
  for (int i = prim::lane_index(); i - prim::lane_index() < count; i += 32 * kAtOnce) {
    uint4 word[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = core::min_of(i + 32 * j, count - 1);
      word[j] = *reinterpret_cast<const uint4*>(first + at / words * stride + at % words * 16);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint4& x = word[j];
      any = any || (x.x | x.y | x.z | x.w) != 0;
      hidden = hidden || has_zero_byte(x.x) || has_zero_byte(x.y) || has_zero_byte(x.z) ||
               has_zero_byte(x.w);
    }
    if (prim::any(any) && prim::any(hidden)) {
      break;
    }
  }
  return Seen{prim::any(any), !prim::any(hidden)};
}

PANTILE_DEVICE Seen see_elements(const MaskParams& p, const MaskPlace& at, const core::Span& rows,
                                 const core::Span& keys) {
  const std::uint8_t* const first = element_row(p, at, rows.begin) + keys.begin;
  const int count = p.elements_row == 0 ? 1 : rows.size();  // rows may share theirs
  if (reinterpret_cast<std::uintptr_t>(first) % 16 == 0 && p.elements_row % 16 == 0 &&
      keys.size() % 16 == 0) {
    return see_words(first, p.elements_row, count, keys.size() / 16);
  }
  bool any = false, hidden = false;
#pragma unroll 1
  for (int row = 0; row < count; ++row) {
#pragma unroll 4
    for (int key = prim::lane_index(); key < keys.size(); key += 32) {
      const bool shown = first[row * p.elements_row + key] != 0;
      any = any || shown;
      hidden = hidden || !shown;
    }
  }
  return Seen{prim::any(any), !prim::any(hidden)};
}

// ---- documents

struct IdRange {
  int low, high;
};

PANTILE_DEVICE IdRange id_range(const std::int32_t* ids, const core::Span& span) {
  int low = ids[span.begin];
  int high = low;
#pragma unroll 4
  for (int i = span.begin + prim::lane_index(); i < span.end; i += 32) {
    low = core::min_of(low, ids[i]);
    high = core::max_of(high, ids[i]);
  }
  return IdRange{__reduce_min_sync(prim::kAllLanes, low), __reduce_max_sync(prim::kAllLanes, high)};
}

// Ids may come in any order: ranges that overlap may still have none in common.
PANTILE_DEVICE Seen see_documents(const MaskParams& p, const MaskPlace& at, const core::Span& rows,
                                  const core::Span& keys) {
  const IdRange q = id_range(p.query_ids + at.batch * p.query_ids_batch, rows);
  const IdRange k = id_range(p.key_ids + at.batch * p.key_ids_batch, keys);
  return Seen{q.low <= k.high && k.low <= q.high,
              q.low == q.high && k.low == k.high && q.low == k.low};
}

// ---- prefixes

// Keys that a row sees: those of the prefix, and those up to its own position.
PANTILE_DEVICE int prefix_end(const MaskParams& p, const MaskPlace& at, int row) {
  return core::max_of(p.prefixes[at.batch * p.prefixes_batch], row + at.shift + 1);
}

PANTILE_DEVICE Seen see_prefix(const MaskParams& p, const MaskPlace& at, const core::Span& rows,
                               const core::Span& keys) {
  return Seen{keys.begin < prefix_end(p, at, rows.end - 1),
              keys.end <= prefix_end(p, at, rows.begin)};
}

}  // namespace detail

// The masks of pantile/variant.h: clauses of the forms kForms (MaskForm); kSeveral: more than one
// clause.
template <std::uint32_t kForms, bool kSeveral>
struct StoredMask {
  PANTILE_DEVICE static bool visible(const MaskParams& p, const MaskPlace& at, int row, int key) {
    for (std::uint32_t clause = p.clauses; clause != 0; clause >>= kMaskForms) {
      bool shown = true;
      if (has<kMaskBlocks>(clause)) {
        shown = shown && detail::block_row(p, at, row)[key >> p.block_shift] != 0;
      }
      if (has<kMaskElements>(clause)) {
        shown = shown && detail::element_row(p, at, row)[key] != 0;
      }
      if (has<kMaskDocuments>(clause)) {
        shown = shown && p.query_ids[at.batch * p.query_ids_batch + row] ==
                             p.key_ids[at.batch * p.key_ids_batch + key];
      }
      if (has<kMaskPrefix>(clause)) {
        shown = shown && key < detail::prefix_end(p, at, row);
      }
      if (shown) {
        return true;
      }
    }
    return false;
  }

  // Two sets of forms: of which something may be visible, and, 4 bits higher, of which all is.
  PANTILE_DEVICE static std::uint32_t see(const MaskParams& p, const MaskPlace& at,
                                          const core::Span& rows, const core::Span& keys) {
    std::uint32_t seen = kMaskDocuments | kMaskElements;
    if ((forms(p) & kMaskBlocks) != 0) {
      seen |= of(kMaskBlocks, detail::see_blocks(p, at, rows, keys));
    }
    if ((forms(p) & kMaskPrefix) != 0) {
      seen |= of(kMaskPrefix, detail::see_prefix(p, at, rows, keys));
    }
    return seen;
  }

  // Nothing that a warp finds out makes more visible.
  PANTILE_DEVICE static bool look_on(const MaskParams& p, std::uint32_t seen) {
    return (forms(p) & (kMaskDocuments | kMaskElements)) != 0 && sight(p, seen) == Sight::some;
  }

  PANTILE_DEVICE static std::uint32_t see_closely(const MaskParams& p, const MaskPlace& at,
                                                  const core::Span& rows, const core::Span& keys,
                                                  std::uint32_t seen) {
    if ((forms(p) & kMaskDocuments) != 0) {
      seen =
          (seen & ~kMaskDocuments) | of(kMaskDocuments, detail::see_documents(p, at, rows, keys));
    }
    if ((forms(p) & kMaskElements) != 0 && sight(p, seen) == Sight::some) {
      seen = (seen & ~kMaskElements) | of(kMaskElements, detail::see_elements(p, at, rows, keys));
    }
    return seen;
  }

  PANTILE_DEVICE static Sight sight(const MaskParams& p, std::uint32_t seen) {
    bool any = false, all = false;
    for (std::uint32_t rest = p.clauses; rest != 0; rest >>= kMaskForms) {
      const std::uint32_t clause = rest & ((1u << kMaskForms) - 1);
      any = any || (clause & ~seen) == 0;
      all = all || (clause & ~(seen >> kMaskForms)) == 0;
    }
    return all ? Sight::all : any ? Sight::some : Sight::none;
  }

  // kGroups of 8 columns (transposed: rows), 16 at most.
  template <bool kTransposed, int kGroups>
  PANTILE_DEVICE static void fragment(const MaskParams& p, const MaskPlace& at, int row, int key,
                                      std::uint32_t (&bits)[2]) {
    static_assert(kGroups <= 16);
    const Lines<kTransposed> lines(at, row, key);
    if constexpr (!kSeveral) {
      bits[0] = bits[1] = 0xffffffffu;
      keep_clause<kTransposed, kGroups>(bits, p, at, lines, p.clauses);
    } else {
      bits[0] = bits[1] = 0;
#pragma unroll 1
      for (std::uint32_t clause = p.clauses; clause != 0; clause >>= kMaskForms) {
        std::uint32_t all[2] = {0xffffffffu, 0xffffffffu};
        keep_clause<kTransposed, kGroups>(all, p, at, lines, clause);
        bits[0] |= all[0];
        bits[1] |= all[1];
      }
    }
  }

 private:
  PANTILE_DEVICE static std::uint32_t of(std::uint32_t form, const detail::Seen& seen) {
    return (seen.any ? form : 0u) | (seen.all ? form << kMaskForms : 0u);
  }

  // Those that occur; `p` has one clause of all kForms, or several.
  PANTILE_DEVICE static std::uint32_t forms(const MaskParams& p) {
    std::uint32_t found = kSeveral ? 0 : kForms;
    for (std::uint32_t rest = kSeveral ? p.clauses : 0; rest != 0; rest >>= kMaskForms) {
      found |= rest & kForms;
    }
    return found;
  }

  // Whether a form is in a clause. One clause has all forms.
  template <std::uint32_t kBit>
  PANTILE_DEVICE static bool has(std::uint32_t clause) {
    return (kForms & kBit) != 0 && (!kSeveral || (clause & kBit) != 0);
  }

  // Rows and keys of a fragment, kept inside the sequence.
  template <bool kTransposed>
  struct Lines {
    int first_row, first_key, last_row, last_key;
    PANTILE_DEVICE Lines(const MaskPlace& at, int row, int key)
        : first_row(row), first_key(key), last_row(at.rows - 1), last_key(at.keys - 1) {}
    // Of line i, 0 or 1, and element `other` of it.
    PANTILE_DEVICE int row(int i, int other) const {
      return core::min_of(first_row + (kTransposed ? other : 8 * i), last_row);
    }
    PANTILE_DEVICE int key(int i, int other) const {
      return core::min_of(first_key + (kTransposed ? 8 * i : other), last_key);
    }
    // Whether a line is at hand with `other` and the element after it as neighbouring keys.
    PANTILE_DEVICE bool has_pair(int other) const {
      return !kTransposed && first_key + other < last_key;
    }
  };

  // Clears the bits of elements that are not shown.
  template <int kGroups, class Shows>
  PANTILE_DEVICE static void keep(std::uint32_t (&bits)[2], const Shows& shows) {
    std::uint32_t shown[2] = {0, 0};
#pragma unroll 1
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          shown[i] |= (shows(i, 8 * j + c) ? 1u : 0u) << (2 * j + c);
        }
      }
    }
    bits[0] &= shown[0];
    bits[1] &= shown[1];
  }

  template <int kGroups, bool kTransposed>
  PANTILE_DEVICE static void keep_documents(std::uint32_t (&bits)[2], const MaskParams& p,
                                            const MaskPlace& at, const Lines<kTransposed>& lines) {
    const std::int32_t* const query_ids = p.query_ids + at.batch * p.query_ids_batch;
    const std::int32_t* const key_ids = p.key_ids + at.batch * p.key_ids_batch;
    const auto own = [&](int i) {
      return kTransposed ? key_ids[lines.key(i, 0)] : query_ids[lines.row(i, 0)];
    };
    const int ids[2] = {own(0), own(1)};
    std::uint32_t shown[2] = {0, 0};
#pragma unroll 4
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int o = 8 * j + c;
        const int id = kTransposed ? query_ids[lines.row(0, o)] : key_ids[lines.key(0, o)];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          shown[i] |= (id == ids[i] ? 1u : 0u) << (2 * j + c);
        }
      }
    }
    bits[0] &= shown[0];
    bits[1] &= shown[1];
  }

  template <int kGroups, bool kTransposed>
  PANTILE_DEVICE static void keep_elements(std::uint32_t (&bits)[2], const MaskParams& p,
                                           const MaskPlace& at, const Lines<kTransposed>& lines) {
    if (kTransposed || !p.element_pairs) {
      keep<kGroups>(bits, [&](int i, int o) {
        return detail::element_row(p, at, lines.row(i, o))[lines.key(i, o)] != 0;
      });
      return;
    }
    const std::uint8_t* const from[2] = {detail::element_row(p, at, lines.row(0, 0)),
                                         detail::element_row(p, at, lines.row(1, 0))};
    std::uint32_t shown[2] = {0, 0};
#pragma unroll 4
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The last key of an odd number stands alone.
        const int key = lines.key(i, 8 * j);
        const std::uint32_t both = lines.has_pair(8 * j)
                                       ? *reinterpret_cast<const std::uint16_t*>(from[i] + key)
                                       : from[i][key];
        shown[i] |= (((both & 0xffu) != 0 ? 1u : 0u) | ((both >> 8) != 0 ? 2u : 0u)) << (2 * j);
      }
    }
    bits[0] &= shown[0];
    bits[1] &= shown[1];
  }

  template <bool kTransposed, int kGroups>
  PANTILE_DEVICE static void keep_clause(std::uint32_t (&bits)[2], const MaskParams& p,
                                         const MaskPlace& at, const Lines<kTransposed>& lines,
                                         std::uint32_t clause) {
    if (has<kMaskBlocks>(clause)) {
      keep<kGroups>(bits, [&](int i, int o) {
        return detail::block_row(p, at, lines.row(i, o))[lines.key(i, o) >> p.block_shift] != 0;
      });
    }
    if (has<kMaskElements>(clause)) {
      keep_elements<kGroups>(bits, p, at, lines);
    }
    if (has<kMaskDocuments>(clause)) {
      keep_documents<kGroups>(bits, p, at, lines);
    }
    if (has<kMaskPrefix>(clause)) {
      keep<kGroups>(bits, [&](int i, int o) {
        return lines.key(i, o) < detail::prefix_end(p, at, lines.row(i, o));
      });
    }
  }
};

}  // namespace pantile::attn
