// The loader of the Hopper forward: one thread that claims tiles, describes them to the other roles
// and keeps Q, K and V flowing into shared memory, across the borders of tiles.
#pragma once

#include "core/geometry.h"
#include "hopper/forward/key_source.cuh"
#include "hopper/forward/storage.cuh"
#include "hopper/forward/walk.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// Which rows work item `work` stands for. False: none, a slot past the end of its sequence.
//
// Packed queries have no table of tiles. Sequence b owns the slots cu_seqlens[b] / kTileRows + b up
// to the same of b + 1: at least as many as it has tiles, and found by bisection.
template <int kTileRows>
PANTILE_DEVICE bool locate_rows(const ForwardParams& p, int work, TileInfo& info) {
  const core::WorkTile place = p.order.tile(work);
  int row_tile = place.tile;
  int batch = place.batch;
  info.head = place.head;
  info.q_row = 0;
  info.rows = p.seqlen_q;
  if (p.cu_seqlens_q != nullptr) {
    batch = core::sequence_of_slot(p.cu_seqlens_q, p.batch, kTileRows, row_tile);
    info.q_row = p.cu_seqlens_q[batch];
    info.rows = p.cu_seqlens_q[batch + 1] - info.q_row;
    row_tile -= info.q_row / kTileRows + batch;
  }
  if (p.seqused_q != nullptr) {
    info.rows = core::clamp(p.seqused_q[batch], 0, info.rows);
  }
  info.batch = batch;
  info.row0 = row_tile * kTileRows;
  return info.row0 < info.rows;
}

// kAllMasked: the variant may hide pairs of any tile.
template <ForwardConfig kConfig, MaskKind kMask, class Walk, KeySource kSource,
          bool kAllMasked = false>
class Loader {
 public:
  PANTILE_DEVICE Loader(ForwardStorage<kConfig>& storage, const ForwardMaps& maps,
                        const ForwardParams& params, const attn::VariantParams& variant_params)
      : s_(storage),
        my_(storage.loader),
        maps_(maps),
        p_(params),
        claimed_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    State next = State::unknown;
    for (my_.tile = 0;; ++my_.tile) {
      if (next == State::unknown || next == State::none) {
        describe();
      }
      const TileInfo& info = described(my_.tile);
      const int steps = info.visit_end - info.visit_begin;
      take_keys(info);
      if (info.visit_end > 0) {
        load_k(steps - 1, use_);
      }
      if (next != State::requested) {
        request_q(my_.tile, true);
      }
      if (info.visit_end > 0) {
        next = load_tile(steps);
      } else if (info.keys != 0) {
        await_outputs();
        next = State::unknown;
      } else {
        break;
      }
    }
    finish();
  }

 private:
  static constexpr int kKStages = kConfig.k_stages;
  static constexpr int kVStages = kConfig.v_stages;
  static constexpr int kQ = kConfig.q_buffers;
  static constexpr bool kInQ = kConfig.output_in_q();
  // Only where rows of one tile see different keys can a value spoil a row that does not attend.
  static constexpr bool kMayRepeat = kMask != MaskKind::full || Walk::kListed;
  // The next tile is claimed this many steps before the end of the current one, and described two
  // steps later, when the counter's answer has come. Claiming at the start of a tile undoes the
  // longest-first order (measured: -15 % at head dim 256, causal, 16k).
  static constexpr int kClaimSteps = 5;
  static constexpr int kDescribeSteps = kClaimSteps - 2;

  // How far the loader is with the tile after the current one; none: there is no work for it.
  enum class State { unknown, claimed, none, described, requested };

  // What the keys of a tile ask for: copies, also the guards for some V, or not even copies because
  // there are no keys at all (the guards clear V).
  enum class Need { plain, guards, nothing };

  PANTILE_DEVICE TileInfo& described(std::uint32_t tile) {
    return s_.tiles[buffer_of<ForwardConfig::kTiles>(tile)];
  }

  // Nothing here uses the counter's answer, which takes about a step to come.
  PANTILE_DEVICE void claim() {
    if (my_.has_claim) {
      return;
    }
    my_.has_claim = true;
    if (p_.counter != nullptr) {
      claimed_ = atomicAdd(p_.counter, 1);
    } else {
      claimed_ += static_cast<int>(gridDim.x);
    }
  }

  // The first round of work needs no claim.
  PANTILE_DEVICE int work() const { return claimed_ + static_cast<int>(gridDim.x); }

  // Describes tile `tile`, whose first use of the rings will be `use`: a finished tile that must be
  // done again, or else the claimed work, or the first after it that has rows. False: there is
  // none.
  PANTILE_DEVICE bool describe_work(std::uint32_t tile, std::uint32_t use) {
    TileInfo& info = described(tile);
    if (kMayRepeat && find_tainted()) {
      info = described(my_.checked - 1);
      info.careful = 1;
    } else if (!find_work(info)) {
      return false;
    }
    if constexpr (kConfig.o_apart) {
      info.o_stage = buffer_of<kVStages>(use + info.visit_end - info.visit_begin - 1);
    }
    return true;
  }

  PANTILE_DEVICE bool find_work(TileInfo& info) {
    while (true) {
      claim();
      if (work() >= p_.order.count()) {
        return false;
      }
      my_.has_claim = false;
      if (locate_rows<kConfig.tile_q()>(p_, walk_.work(work()), info)) {
        walk_.template locate<kConfig.tile_q(), kConfig.tile_k, kSource>(p_, info);
        if constexpr (kAllMasked) {
          info.full_begin = info.full_end = info.visit_begin;
        }
        return true;
      }
    }
  }

  // The next tainted one of the finished tiles, as checked - 1.
  PANTILE_DEVICE bool find_tainted() {
    while (my_.checked < my_.finished) {
      int& tainted = s_.tainted[buffer_of<ForwardConfig::kTiles>(my_.checked)];
      ++my_.checked;
      if (tainted != 0) {
        tainted = 0;
        return true;
      }
    }
    return false;
  }

  // Describes the current tile, if need be as a mark.
  PANTILE_DEVICE void describe() {
    if (describe_work(my_.tile, use_)) {
      return;
    }
    if (kMayRepeat && !kInQ && my_.tile > 0) {
      // With one buffer of O the last tile is finished without a mark; it may have to be done
      // again.
      await_stored();
      my_.finished = my_.tile;
      if (describe_work(my_.tile, use_)) {
        return;
      }
    }
    TileInfo& info = described(my_.tile);
    info.visit_end = 0;
    info.keys = kMayRepeat && my_.checked < my_.tile;
  }

  // After a mark: the outputs of all tiles before it are complete. Those whose Q buffer was needed
  // again are known to be.
  PANTILE_DEVICE void await_outputs() {
    for (std::uint32_t tile = my_.finished; tile < my_.tile; ++tile) {
      prim::wait(s_.o_full[buffer_of<kQ>(tile)], parity_of<kQ>(tile));
    }
    my_.finished = my_.tile + 1;
  }

  // With one buffer of O: the output of the tile before this one has left shared memory. To be
  // called once a tile, before its last V is loaded: later, the next phase could have passed
  // unseen.
  PANTILE_DEVICE void await_stored() {
    if (my_.tile > 0) {
      prim::wait(s_.o_empty, parity_of<1>(my_.tile - 1));
    }
  }

  // What every load of the current tile needs, in registers: one instruction more in each step
  // costs the math warps of the same scheduler an issue slot, and at head dim 64 they use nine of
  // ten.
  PANTILE_DEVICE void take_keys(const TileInfo& info) {
    row_ = info.k_row + info.visit_begin * kConfig.tile_k;
    walk_.template begin<kConfig.tile_q()>(p_, info);
    head_ = info.k_head;
    batch_ = info.k_batch;
    need_ = p_.no_keys                              ? Need::nothing
            : (info.clear_tail | info.careful) != 0 ? Need::guards
                                                    : Need::plain;
  }

  // All steps of one tile, the first K excepted. Steps are counted by how many come after them.
  PANTILE_DEVICE State load_tile(int steps) {
    if constexpr (!kInQ) {
      if (steps > 1) {
        load_k(steps - 2, use_ + 1);
      }
      if constexpr (!kConfig.o_apart) {
        await_stored();  // O of the tile before lay in both stages of V
      }
    }
    State next = State::unknown;
    for (int left = steps - 1; left >= 0; --left, ++use_) {
      const bool may_describe = next == State::claimed || left == 0;
      if (next == State::unknown && left <= kClaimSteps) {
        claim();
        next = State::claimed;
      }
      if (left > 0 && (kInQ || left < steps - 1)) {
        load_k(left - 1, use_ + 1);
      }
      if (kConfig.o_apart && left == core::max_of(steps - 2, 0)) {
        await_stored();  // O of the tile before lay in the second stage of V to be loaded
      }
      load_v(left);
      // Last, because V is the one that is waited for soonest.
      if (may_describe && next == State::claimed && left <= kDescribeSteps) {
        if (!kInQ) {
          my_.finished = my_.tile;
        }
        next = describe_work(my_.tile + 1, use_ + left + 1) ? State::described : State::none;
      }
      if (kInQ && next == State::described && request_q(my_.tile + 1, false)) {
        next = State::requested;
      }
    }
    return next;
  }

  PANTILE_DEVICE void load_k(int left, std::uint32_t use) {
    const int stage = buffer_of<kKStages>(use);
    prim::wait(s_.k_empty[stage], parity_of<kKStages>(use) ^ 1);
    load_panels<kConfig.k_tile()>(s_.k[stage], maps_.k, s_.k_full[stage], left, p_.qk_panels);
  }

  PANTILE_DEVICE void load_v(int left) {
    const int stage = buffer_of<kVStages>(use_);
    prim::wait(s_.v_empty[stage], parity_of<kVStages>(use_) ^ 1);
    if (need_ != Need::plain) {
      order_guards(left);
    }
    load_panels<kConfig.v_tile()>(s_.v[stage], maps_.v, s_.v_full[stage], left, p_.v_panels);
  }

  // Tells the guards what to do with the V about to be loaded, if anything.
  PANTILE_DEVICE void order_guards(int left) {
    const TileInfo& info = described(my_.tile);
    const int key_tile = info.visit_begin + left;
    const bool masked = key_tile >= info.full_end || key_tile < info.full_begin;
    const bool scan = kMayRepeat && info.careful && masked;
    const bool has_tail = info.clear_tail && key_tile == info.visit_end - 1;
    if (has_tail || scan) {
      give_order(GuardOrder{buffer_of<kVStages>(use_), parity_of<kVStages>(use_),
                            has_tail
                                ? core::max_of(info.keys - walk_.tile(key_tile) * kConfig.tile_k, 0)
                                : kConfig.tile_k,
                            scan, buffer_of<ForwardConfig::kTiles>(my_.tile)});
    }
  }

  template <tile::PanelTile kTile>
  PANTILE_DEVICE void load_panels(unsigned char* to, const CUtensorMap& map, prim::Mbarrier& full,
                                  int left, int panels_per_copy) {
    if (need_ == Need::nothing) {
      prim::arrive(full);  // K is masked, V is cleared by the guards
      return;
    }
    prim::arrive_and_expect(full, kTile.bytes());
    if constexpr (kSource.pages) {
      const TileInfo& info = described(my_.tile);
      copy_pages<kTile>(to, map, full, p_, info,
                        walk_.tile(info.visit_begin + left) * kConfig.tile_k, panels_per_copy);
    } else {
      copy_panels<kTile>(to, map, full, row_ + walk_.tile(left) * kConfig.tile_k, head_, batch_,
                         panels_per_copy);
    }
  }

  // More than one copy only where the rows of the tensor are not whole panels.
  template <tile::PanelTile kTile>
  PANTILE_DEVICE void copy_panels(unsigned char* to, const CUtensorMap& map, prim::Mbarrier& full,
                                  int row, int head, int batch, int panels_per_copy) {
    prim::tma_load(to, &map, full, prim::TileOrigin{0, row, 0, head, batch});
    if constexpr (kTile.panels() > 1) {
#pragma unroll 1
      for (int panel = panels_per_copy; panel < kTile.panels(); panel += panels_per_copy) {
        prim::tma_load(to + panel * kTile.panel_bytes(), &map, full,
                       prim::TileOrigin{panel * tile::kPanelColumns, row, 0, head, batch});
      }
    }
  }

  // Requests the Q of a described tile, which publishes the description. False: the buffer is still
  // in use and `block` is false.
  PANTILE_DEVICE bool request_q(std::uint32_t tile, bool block) {
    const int buffer = buffer_of<kQ>(tile);
    const std::uint32_t parity = parity_of<kQ>(tile) ^ 1;
    if (block) {
      prim::wait(s_.q_empty[buffer], parity);
    } else if (!prim::test(s_.q_empty[buffer], parity)) {
      return false;
    }
    if (kInQ && tile >= kQ) {
      // O of the tile kQ before it lay there.
      my_.finished = core::max_of<std::uint32_t>(my_.finished, tile + 1 - kQ);
    }
    const TileInfo& info = described(tile);
    if (info.visit_end == 0) {
      prim::arrive(s_.q_full[buffer]);
      return true;
    }
    const int row = info.q_row + info.row0;
    prim::arrive_and_expect(s_.q_full[buffer], kConfig.math_warpgroups * kConfig.q_tile().bytes());
#pragma unroll
    for (int group = 0; group < kConfig.math_warpgroups; ++group) {
      copy_panels<kConfig.q_tile()>(s_.q[buffer][group], maps_.q, s_.q_full[buffer],
                                    row + group * kRowsPerWarpgroup, info.head * p_.q_steps.head,
                                    info.batch * p_.q_steps.batch, p_.qk_panels);
    }
    return true;
  }

  PANTILE_DEVICE void give_order(const GuardOrder& order) {
    constexpr int kOrders = ForwardStorage<kConfig>::kOrders;
    const int slot = buffer_of<kOrders>(my_.orders);
    prim::wait(s_.order_done[slot], parity_of<kOrders>(my_.orders) ^ 1);
    s_.orders[slot] = order;
    prim::arrive(s_.order_full[slot]);
    ++my_.orders;
  }

  // Sends the guards home, and leaves the counter as it was found when this block is the last.
  PANTILE_DEVICE void finish() {
    give_order(GuardOrder{0, 0, -1, 0, 0});
    if (p_.counter != nullptr && atomicAdd(p_.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p_.counter[0] = 0;
      p_.counter[1] = 0;
    }
  }

  ForwardStorage<kConfig>& s_;
  LoaderState& my_;
  const ForwardMaps& maps_;
  const ForwardParams& p_;
  int claimed_;             // last
  std::uint32_t use_ = 0;   // of the rings of K and V, over all tiles
  int row_, head_, batch_;  // where the keys that the tile visits begin in the maps of K and V
  Need need_;
  Walk walk_;
};

}  // namespace pantile::hopper
