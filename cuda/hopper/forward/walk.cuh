// Which tiles of keys a tile of rows of the Hopper forward visits, and in which step. Steps are
// numbered by how many come after them. A walk is a type:
//
//   SpanWalk   consecutive tiles: causal masks, windows, no mask. A step's number is its tile
//   NearWalk   all tiles, from the one that the rows' positions lie in down, and around. Scores
//   that
//              fall with the distance have their largest there, and need no other shift later
//   ListWalk   tiles of a list in global memory (attn/tile_mask.h), from the list's end. Its first
//              steps, those from full_end on, need the mask, which `Mask` is asked for
//              (attn/tile_mask.cuh); the others have none
//
// Every role has a walk of its own, which starts anew with each tile of rows.
#pragma once

#include "attn/mask.cuh"
#include "attn/tile_mask.cuh"
#include "attn/variant_params.h"
#include "core/geometry.h"
#include "hopper/forward/key_source.cuh"
#include "hopper/forward/storage.cuh"
#include "tile/fragment.cuh"

namespace pantile::hopper {

// Which keys these rows visit. A tile of rows without keys visits one tile, wholly masked, so that
// its output comes out as zeros like any other.
template <int kTileRows, int kTileKeys, KeySource kSource>
PANTILE_DEVICE void locate_keys(const ForwardParams& p, TileInfo& info) {
  locate_sequence_keys<kSource>(p, info);
  info.k_head = info.head / p.group * p.k_steps.head;
  info.k_batch = info.batch * p.k_steps.batch;
  const auto mask = mask_of<kSource>(p, info);
  const core::Span rows{info.row0, core::min_of(info.row0 + kTileRows, info.rows)};
  core::TilePlan plan = core::plan_row_tile(mask, rows, kTileKeys);
  if (plan.visit.empty()) {
    plan = core::TilePlan{{0, 1}, {0, 0}};
  }
  info.visit_begin = plan.visit.begin;
  info.visit_end = plan.visit.end;
  info.full_begin = plan.full.begin;
  info.full_end = plan.full.end;
  info.careful = 0;
  info.clear_tail = p.zero_tail && info.keys < plan.visit.end * kTileKeys;
}

// Hides what the window hides in a fragment of scores. `end`: where the keys end, `position`: the
// key that the thread's first row faces, both counted from its first column.
template <MaskKind kMask, int kCount>
PANTILE_DEVICE void hide_outside_window(float (&S)[kCount], const ForwardParams& p, int end,
                                        int position) {
  if constexpr (kMask == MaskKind::full) {
    attn::mask_from(S, {end, end});
  } else if constexpr (kMask == MaskKind::causal) {
    attn::mask_from(S, {position + 1, position + 9});
  } else {
    attn::mask_outside(
        S, {position - p.window_left, position + 8 - p.window_left},
        {min(end, position + p.window_right + 1), min(end, position + p.window_right + 9)});
  }
}

struct SpanWalk {
  static constexpr bool kListed = false;

  PANTILE_DEVICE explicit SpanWalk(const attn::VariantParams&) {}

  // The work item that the `claimed`-th claim is for.
  PANTILE_DEVICE static int work(int claimed) { return claimed; }

  // Completes the description of a tile of rows by what it visits.
  template <int kTileRows, int kTileKeys, KeySource kSource>
  PANTILE_DEVICE static void locate(const ForwardParams& p, TileInfo& info) {
    locate_keys<kTileRows, kTileKeys, kSource>(p, info);
  }

  template <int kTileRows>
  PANTILE_DEVICE static void begin(const ForwardParams&, const TileInfo&) {}

  PANTILE_DEVICE static int tile(int step) { return step; }

  // Whether the mask beside the window shows a pair.
  PANTILE_DEVICE static bool shows(const TileInfo&, int, int) { return true; }

  // For the scores of a step that needs the mask: looks it up, hides what it hides.
  template <int kTileKeys>
  PANTILE_DEVICE static void fetch(const TileInfo&, int, int, int) {}
  template <int kCount>
  PANTILE_DEVICE static void hide(float (&)[kCount]) {}
};

// A ragged last tile comes before all others, as it needs the mask. Without a mask only.
template <int kTileKeys>
struct NearWalk : SpanWalk {
  PANTILE_DEVICE explicit NearWalk(const attn::VariantParams& params) : SpanWalk(params) {}

  template <int kTileRows>
  PANTILE_DEVICE void begin(const ForwardParams&, const TileInfo& info) {
    const bool ragged = info.full_end < info.visit_end;
    around_ = prim::uniform(ragged ? info.visit_end - 1 : info.visit_end);
    const int position = info.row0 + kTileRows - 1 + info.keys - info.rows;
    const int first = core::clamp(position / kTileKeys, 0, core::max_of(around_ - 1, 0));
    turn_ = prim::uniform(first - (around_ - 1));
  }

  PANTILE_DEVICE int tile(int step) const {
    const int turned = step + turn_;
    return step == around_ ? step : turned < 0 ? turned + around_ : turned;
  }

 private:
  int around_;  // tiles that take turns
  int turn_;    // what a step's number is less than its tile, or `around_` more
};

// kSource: of the kernel.
template <class Mask, KeySource kSource = KeySource{}>
class ListWalk {
 public:
  static constexpr bool kListed = true;

  PANTILE_DEVICE explicit ListWalk(const attn::VariantParams& params) : p_(params) {}

  PANTILE_DEVICE int work(int claimed) {
    item_ = reinterpret_cast<const int4*>(p_.lists.order)[claimed];
    return item_.x;
  }

  // Of the work item asked for last.
  template <int kTileRows, int kTileKeys, KeySource kOfKernel>
  PANTILE_DEVICE void locate(const ForwardParams& p, TileInfo& info) const {
    static_assert(kOfKernel == kSource);
    locate_keys<kTileRows, kTileKeys, kSource>(p, info);
    info.visit_begin = info.full_begin = 0;
    info.full_end = item_.y;
    info.visit_end = item_.z;
    const int last = item_.w;
    if (attn::sight_of_entry(last) == attn::TileSight::hidden) {
      info.keys = 0;  // the mask hides the scores, and the guards clear V
      info.clear_tail = 1;
    } else {
      info.clear_tail =
          p.zero_tail && info.keys < (attn::tile_of_entry(last) + 1) * kTileKeys ? 1 : 0;
    }
  }

  template <int kTileRows>
  PANTILE_DEVICE void begin(const ForwardParams& p, const TileInfo& info) {
    entries_ = p_.lists.entries + list_of<kTileRows>(p, info) * p_.lists.capacity;
    if constexpr (kSource.shift) {
      shift_ = mask_of<kSource>(p, info).shift();
    }
  }

  PANTILE_DEVICE int tile(int step) const { return attn::tile_of_entry(entries_[step]); }

  PANTILE_DEVICE bool shows(const TileInfo& info, int row, int key) const {
    return Mask::visible(p_.mask, place(info), row, key);
  }

  // Asks the mask about the fragment of a step, whose first row lies `row` behind the tile's.
  // Before its scores are waited for.
  template <int kTileKeys>
  PANTILE_DEVICE void fetch(const TileInfo& info, int step, int row, int lane) {
    const int entry = entries_[step];
    shown_[0] = shown_[1] = 0xffffffffu;
    if (attn::sight_of_entry(entry) == attn::TileSight::partial) {
      Mask::template fragment<false, kTileKeys / 8>(
          p_.mask, place(info), info.row0 + row,
          attn::tile_of_entry(entry) * kTileKeys + tile::fragment_column(lane), shown_);
    } else if (attn::sight_of_entry(entry) == attn::TileSight::hidden) {
      shown_[0] = shown_[1] = 0;
    }
  }

  // Hides what the mask hides.
  template <int kCount>
  PANTILE_DEVICE void hide(float (&S)[kCount]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if ((shown_[i] & 1u << (2 * j + c)) == 0) {
            S[4 * j + 2 * i + c] = attn::kMaskedScore;
          }
        }
      }
    }
  }

 private:
  template <int kTileRows>
  PANTILE_DEVICE std::int64_t list_of(const ForwardParams& p, const TileInfo& info) const {
    const attn::TileLists& lists = p_.lists;
    const int first = p.cu_seqlens_q != nullptr ? info.q_row / kTileRows + info.batch
                                                : info.batch * lists.batch_step;
    return std::int64_t{info.head * lists.head_step} * lists.tiles + first + info.row0 / kTileRows;
  }

  PANTILE_DEVICE attn::MaskPlace place(const TileInfo& info) const {
    return attn::MaskPlace{info.batch, info.head, info.rows, info.keys,
                           kSource.shift ? shift_ : info.keys - info.rows};
  }

  const attn::VariantParams& p_;
  const std::int32_t* entries_ = nullptr;  // of the current tile of rows
  std::uint32_t shown_[2];                 // of the step, see Mask::fragment
  int4 item_;                              // the loader's: see TileLists::order
  int shift_ = 0;                          // of the mask, where the source gives one
};

}  // namespace pantile::hopper
