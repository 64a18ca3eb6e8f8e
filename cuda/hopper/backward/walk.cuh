// Which tiles of rows a tile of keys of the Hopper backward visits, for one head of queries after
// the other. A walk is a type, as in the forward (hopper/forward/walk.cuh):
//
//   SpanRows   consecutive tiles, the same for all heads of a group: KeyTile::rows
//   ListRows   tiles of a list in global memory, each head's own; KeyTile::rows counts from 0 to
//              the steps of all heads together
//
// Every role has a walk of its own.
#pragma once

#include "attn/tile_mask.cuh"
#include "attn/variant_grad.cuh"
#include "attn/variant_params.h"
#include "hopper/backward/params.cuh"
#include "prim/grid_dependency.cuh"

namespace pantile::hopper {

struct SpanRows {
  static constexpr bool kListed = false;

  PANTILE_DEVICE explicit SpanRows(const attn::VariantParams&) {}

  // Before the first description.
  PANTILE_DEVICE static void wait_for_lists() {}

  // Describes the `claimed`-th work item; as describe_key_tile().
  template <class Config, MaskKind kMask>
  PANTILE_DEVICE static bool describe(const BackwardParams& params, int claimed,
                                      KeyTile& key_tile) {
    return describe_key_tile<Config, kMask>(params, claimed, key_tile);
  }

  // The visits of a head are numbered from begin() to end().
  PANTILE_DEVICE static void begin_head(const KeyTile&, int) {}
  PANTILE_DEVICE static int begin(const KeyTile& key_tile) { return key_tile.rows.begin; }
  PANTILE_DEVICE static int end(const KeyTile& key_tile) { return key_tile.rows.end; }
  PANTILE_DEVICE static int tile(int visit) { return visit; }

  // Before the first step of a tile of keys, or of a head: where it begins.
  PANTILE_DEVICE static void begin_steps(const KeyTile&, int, int) {}

  // Whether some of tile `tile` is hidden; `before`, `from`: KeyTile::masked_before, masked_from.
  template <MaskKind kMask>
  PANTILE_DEVICE static bool needs_mask(int tile, int before, int from) {
    return tile < before || (kMask == MaskKind::window && tile >= from);
  }
  template <int kCount>
  PANTILE_DEVICE static void hide(float (&)[kCount], float) {}
};

template <class Mask>
class ListRows {
 public:
  static constexpr bool kListed = true;

  PANTILE_DEVICE explicit ListRows(const attn::VariantParams& params) : p_(params) {}

  // The kernel before has made them.
  PANTILE_DEVICE static void wait_for_lists() { prim::wait_for_previous_grid(); }

  template <class Config, MaskKind kMask>
  PANTILE_DEVICE bool describe(const BackwardParams& params, int claimed, KeyTile& key_tile) const {
    const int4 item = reinterpret_cast<const int4*>(p_.lists.order)[claimed];
    if (!describe_key_tile<Config, kMask>(params, item.x, key_tile)) {
      return false;
    }
    const bool packed = params.keys.cu_seqlens != nullptr;
    key_tile.masked_from = key_tile.tile + (packed ? params.key_tiles.first(key_tile.batch)
                                                   : key_tile.batch * p_.lists.batch_step);
    key_tile.masked_before = item.y;
    key_tile.rows = core::Span{0, item.z};
    return true;
  }

  PANTILE_DEVICE void begin_head(const KeyTile& key_tile, int head) {
    const std::int64_t list = list_of(key_tile, head);
    entries_ = p_.lists.entries + list * p_.lists.capacity;
    count_ = p_.lists.counts[2 * list + 1];
  }
  PANTILE_DEVICE int begin(const KeyTile&) const { return 0; }
  PANTILE_DEVICE int end(const KeyTile&) const { return count_; }
  PANTILE_DEVICE int tile(int visit) const { return attn::tile_of_entry(entries_[visit]); }

  // Step by step through all heads. The first step of a tile of keys that has some; `head` is then
  // the first head with a step.
  PANTILE_DEVICE void start(const KeyTile& key_tile, int& head) {
    begin_head(key_tile, head);
    while (count_ == 0) {
      begin_head(key_tile, ++head);
    }
    visit_ = 0;
    entry_ = entries_[0];
  }

  PANTILE_DEVICE void begin_steps(const KeyTile& key_tile, int& head, int& tile) {
    if (!key_tile.rows.empty()) {
      start(key_tile, head);
      tile = this->tile();
    }
  }

  // Whether the step before was the head's last. Then start() for a later head, else step().
  PANTILE_DEVICE bool ends_head() const { return visit_ + 1 == count_; }
  PANTILE_DEVICE void step() { entry_ = entries_[++visit_]; }

  // Of the step.
  PANTILE_DEVICE int tile() const { return attn::tile_of_entry(entry_); }
  template <MaskKind kMask>
  PANTILE_DEVICE bool needs_mask(int, int, int) const {
    return attn::sight_of_entry(entry_) != attn::TileSight::whole;
  }

  // Asks the mask about a fragment of the step; before its scores are waited for.
  template <int kQueries>
  PANTILE_DEVICE void fetch(int batch, int head, const attn::TransposedPlace& at) {
    static_assert(kQueries <= 64);
    shown_ = 0xffffffffu;
    if (attn::sight_of_entry(entry_) == attn::TileSight::partial) {
      std::uint32_t bits[2];
      Mask::template fragment<true, kQueries / 8>(
          p_.mask, attn::MaskPlace{batch, head, at.rows, at.keys, at.keys - at.rows}, at.row,
          at.key, bits);
      shown_ = (bits[0] & 0xffffu) | bits[1] << 16;
    }
  }

  // Hides what the mask hides.
  template <int kCount>
  PANTILE_DEVICE void hide(float (&S)[kCount], float masked_score) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if ((shown_ & 1u << (16 * i + 2 * j + c)) == 0) {
            S[4 * j + 2 * i + c] = masked_score;
          }
        }
      }
    }
  }

 private:
  // masked_from: the number of the tile of keys, of a walk that does not need it otherwise; as
  // masked_before, which is not 0 if some tile is visible in part.
  PANTILE_DEVICE std::int64_t list_of(const KeyTile& key_tile, int head) const {
    return std::int64_t{head * p_.lists.head_step} * p_.lists.tiles + key_tile.masked_from;
  }

  const attn::VariantParams& p_;
  const std::int32_t* entries_ = nullptr;  // of a head
  int count_ = 0;
  int visit_ = 0, entry_ = 0;  // these three: of the step
  std::uint32_t shown_ = 0;    // bit 16 i + 2 j + c, see Mask::fragment
};

}  // namespace pantile::hopper
