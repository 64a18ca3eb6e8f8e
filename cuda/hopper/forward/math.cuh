// The math warpgroups of the Hopper forward, 64 rows each. The products of one overlap the softmax
// of the others, and its own. A step is one tile of keys:
//   1. wait for its turn; issue S = Q K^T of this step        (S: registers, fresh)
//   2. issue O += P V of the step before                      (P, O: registers)
//   3. pass the turn on; wait for S; free the stage of K; change S as the variant says (plain
//      attention has none, attn/variant.cuh); mask S if this tile needs it
//   4. the first part of P = exp2(S - shift)
//   5. wait for the next K (this also keeps the next wait where it is: ptxas moves it up over the
//      exponentials unless a basic block ends here) and for O; free the stage of V
//   6. the rest of P, in 16 bits; if its sums are too large, all of it again, and O made smaller
// Between two tiles it runs on: step 1 of the next tile's first step goes with step 2 of the last.
#pragma once

#include "attn/mask.cuh"
#include "attn/softmax.cuh"
#include "attn/variant.cuh"
#include "hopper/forward/low_bits.cuh"
#include "hopper/forward/output.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/roles.cuh"
#include "hopper/forward/storage.cuh"
#include "hopper/forward/walk.cuh"
#include "prim/named_barrier.cuh"
#include "prim/registers.cuh"
#include "tile/fragment.cuh"

namespace pantile::hopper {

template <ForwardConfig kConfig, DType kDType, MaskKind kMask, class Variant, class Walk,
          KeySource kSource>
class MathWarpgroup {
 public:
  PANTILE_DEVICE MathWarpgroup(ForwardStorage<kConfig>& storage, const ForwardParams& params,
                               const attn::VariantParams& variant_params, int group, int warp)
      : s_(storage),
        p_(params),
        variant_params_(variant_params),
        group_(group),
        warp_(warp),
        lane_(prim::lane_index()),
        products_(storage, group),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    if (group_ == 0) {
      prim::barrier_arrive(Barriers::turn(0), Barriers::kTurnThreads);
    }
    await_tile();
    while (visit_end_ > 0) {
      first_step();
      do {
        remaining_steps();
      } while (kInQ ? next_tile_overlapped() : next_tile());
      if (!kInQ || !kRowsDiffer || info(tile_).keys == 0) {
        break;
      }
      release(s_.o_full[buffer_of<kQ>(tile_)]);  // passes the mark on
      ++tile_;
      await_tile();
    }
    say_goodbye();
  }

 private:
  static constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k;
  static constexpr int kDimV = kConfig.head_dim_v;
  static constexpr int kKStages = kConfig.k_stages, kVStages = kConfig.v_stages;
  static constexpr int kGroups = kConfig.math_warpgroups;
  static constexpr int kQ = kConfig.q_buffers;
  static constexpr int kAhead = kConfig.ahead_groups;
  static constexpr bool kInQ = kConfig.output_in_q(), kOutputFirst = kConfig.output_first;
  // Rows of one tile may see different keys; steps that need the mask also come last.
  static constexpr bool kRowsDiffer = kMask != MaskKind::full || Walk::kListed;
  static constexpr bool kMaskedAtEnd = kMask == MaskKind::window && !Walk::kListed;
  using Barriers = MathBarriers<kGroups>;

  // ---- tiles

  PANTILE_DEVICE const TileInfo& info(std::uint32_t tile) const {
    return s_.tiles[buffer_of<ForwardConfig::kTiles>(tile)];
  }

  // Waits for the Q of tile `tile_`, or for the mark in its place.
  PANTILE_DEVICE void await_tile() {
    q_buffer_ = buffer_of<kQ>(tile_);
    prim::wait(s_.q_full[q_buffer_], parity_of<kQ>(tile_));
    visit_end_ = prim::uniform(info(tile_).visit_end);
  }

  // The rest of what must be known of the tile; after its first product is on its way.
  PANTILE_DEVICE void take_bounds() {
    const TileInfo& next = info(tile_);
    full_end_ = prim::uniform(next.full_end);
    clear_tail_ = prim::uniform(next.clear_tail) != 0;
    walk_.template begin<kTileQ>(p_, next);
    if constexpr (kMask != MaskKind::causal) {
      keys_ = prim::uniform(next.keys);
    }
    if constexpr (kMask != MaskKind::full) {
      position0_ = prim::uniform(position_of<kSource>(p_, next, next.row0));
    }
    if constexpr (kRowsDiffer) {
      careful_ = prim::uniform(next.careful) != 0;
    }
    if constexpr (kMaskedAtEnd) {
      visit_begin_ = prim::uniform(next.visit_begin);
      full_begin_ = prim::uniform(next.full_begin);
    }
    begin_variant(visit_end_ - 1);
  }

  // The last step of the current tile; only windows start later than at key 0.
  PANTILE_DEVICE int visit_begin() const { return kMaskedAtEnd ? visit_begin_ : 0; }

  // ---- waiting and releasing

  PANTILE_DEVICE void wait_k(std::uint32_t use) {
    prim::wait(s_.k_full[buffer_of<kKStages>(use)], parity_of<kKStages>(use));
  }

  PANTILE_DEVICE void wait_v(std::uint32_t use) {
    prim::wait(s_.v_full[buffer_of<kVStages>(use)], parity_of<kVStages>(use));
  }

  // If the guards have an order for the V to be multiplied next: until they have carried it out.
  // Called outside the unmasked loop, where it would cost a branch in every step.
  PANTILE_DEVICE void wait_for_guards() {
    if (v_guarded_) {
      constexpr int kOrders = ForwardStorage<kConfig>::kOrders;
      prim::wait(s_.order_done[buffer_of<kOrders>(orders_)], parity_of<kOrders>(orders_));
      ++orders_;
      v_guarded_ = false;
    }
  }

  PANTILE_DEVICE void release(prim::Mbarrier& barrier) {
    if (lane_ == 0) {
      prim::arrive(barrier);
    }
  }

  PANTILE_DEVICE void take_turn() {
    prim::barrier_sync(Barriers::turn(group_), Barriers::kTurnThreads);
  }

  PANTILE_DEVICE void pass_turn() {
    prim::barrier_arrive(Barriers::turn(Barriers::next(group_)), Barriers::kTurnThreads);
  }

  // ---- softmax

  // Hides what the masks hide in the scores of step `step`.
  PANTILE_DEVICE void mask(int step) {
    walk_.hide(S);
    const int column0 = walk_.tile(step) * kTileK + tile::fragment_column(lane_);
    const int position =
        position0_ + group_ * kRowsPerWarpgroup + tile::fragment_row(warp_, lane_) - column0;
    hide_outside_window<kMask>(S, p_, keys_ - column0, position);
  }

  // ---- variant

  // For a tile whose first step is `step`; before its scores are waited for.
  PANTILE_DEVICE void begin_variant(int step) {
    if constexpr (Variant::kAny) {
      const TileInfo& now = info(tile_);
      const int row = now.row0 + group_ * kRowsPerWarpgroup + tile::fragment_row(warp_, lane_);
      variant_.begin(
          variant_params_,
          attn::FragmentPlace{now.batch, now.head, row, position_of<kSource>(p_, now, row),
                              now.rows, now.keys, s_.bias_part(group_, warp_)});
      variant_.load_ahead(walk_.tile(step) * kTileK);
    }
    fetch<true>(step);
  }

  // What the variant, and the mask of a listed step, need for the scores of step `step`.
  template <bool kMasked>
  PANTILE_DEVICE void fetch(int step) {
    if constexpr (Variant::kAny) {
      variant_.fetch(variant_params_, walk_.tile(step) * kTileK + tile::fragment_column(lane_));
    }
    if constexpr (kMasked && Walk::kListed) {
      walk_.template fetch<kTileK>(
          info(tile_), step, group_ * kRowsPerWarpgroup + tile::fragment_row(warp_, lane_), lane_);
    }
  }

  PANTILE_DEVICE void change_scores(int step) {
    variant_.score(S);
    if (Variant::kSharedBytes > 0 && step > visit_begin()) {
      variant_.load_ahead(walk_.tile(step - 1) * kTileK);
    }
  }

  PANTILE_DEVICE auto logits() const {
    return variant_.logits(Variant::kAny ? variant_params_.unit : p_.scale_log2);
  }

  // P of the scores and its sums. `before`: the use of V whose product is in flight; none is when a
  // tile's first step runs alone.
  template <bool kFirst, bool kMasked, bool kInFlight = true>
  PANTILE_DEVICE void softmax(std::uint32_t before, bool last) {
    if (p_.max_logit != nullptr) {
      softmax_.note_max(S, logits());
    }
    if constexpr (kMasked) {
      softmax_.open(S, logits());
    }
    if constexpr (kOutputFirst && kInFlight) {
      await_output(before, last);
    }
    float ahead[4 * kAhead];
    softmax_.template exponentiate<kMasked>(ahead, S, logits());
    if constexpr (!kOutputFirst && kInFlight) {
      prim::pin(ahead);
      await_output(before, last);
    }
    const bool holds =
        softmax_.template finish<kDType, kMasked, kAhead>(products_.P, ahead, S, logits());
    if (!holds) {
      softmax_.template correct<kDType>(products_.P, S, logits());
      if constexpr (!kFirst) {
        softmax_.rescale(O);
      }
    }
    softmax_.add();
    variant_.drop(products_.P);
  }

  // Waits for the next K, unless this is the last step of its tile, and for O.
  PANTILE_DEVICE void await_output(std::uint32_t before, bool last) {
    if (!last) {
      wait_k(use_ + 1);
    }
    prim::wgmma_wait<0>();
    prim::pin(O);
    release(s_.v_empty[buffer_of<kVStages>(before)]);
  }

  // ---- steps

  // The first step of a tile that no other tile's last step can hide.
  PANTILE_DEVICE void first_step() {
    wait_k(use_);
    products_.issue_scores(S, use_, q_buffer_);
    take_bounds();
    prim::wgmma_wait<0>();
    prim::pin(S);
    release(s_.k_empty[buffer_of<kKStages>(use_)]);
    if (!kInQ && visit_end_ - visit_begin() == 1) {
      release(s_.q_empty[0]);
    }
    begin_tile();
    softmax<true, kRowsDiffer, false>(0, false);
    if (visit_end_ - visit_begin() > 1) {
      wait_k(use_ + 1);
    }
  }

  // After the scores of a tile's first step.
  PANTILE_DEVICE void begin_tile() {
    o_started_ = 0;
    v_guarded_ = clear_tail_ || (careful_ && visit_end_ > full_end_);
    change_scores(visit_end_ - 1);
    if (kRowsDiffer || visit_end_ > full_end_) {  // under a causal mask nearly always
      mask(visit_end_ - 1);
    }
    softmax_.start(S, logits());
    if (p_.sinks != nullptr) {
      softmax_.add_sink(p_.sinks[info(tile_).head], (lane_ & 3) == 0);
    }
  }

  template <bool kMasked>
  PANTILE_DEVICE void step(int key_tile) {
    static_assert(kMasked || !Variant::kMasks);
    const std::uint32_t before = use_++;  // the use of V that is still to be multiplied
    if constexpr (kMasked) {
      wait_for_guards();
    }
    take_turn();
    products_.issue_scores(S, use_, q_buffer_);
    wait_v(before);
    products_.issue_output(O, before, o_started_);
    o_started_ = 1;
    if constexpr (kMasked) {
      v_guarded_ = careful_;
    }
    pass_turn();
    fetch<kMasked>(key_tile);
    prim::wgmma_wait<1>();
    prim::pin(S);
    release(s_.k_empty[buffer_of<kKStages>(use_)]);
    if (!kInQ && key_tile == visit_begin()) {
      release(s_.q_empty[0]);
    }
    change_scores(key_tile);
    if constexpr (kMasked) {
      mask(key_tile);
    }
    softmax<false, kMasked>(before, key_tile == visit_begin());
  }

  // All steps of a tile but the first: masked, unmasked, and for windows masked again.
  PANTILE_DEVICE void remaining_steps() {
    int key_tile = visit_end_ - 2;
    if constexpr (kRowsDiffer) {
#pragma unroll 1
      for (; key_tile >= full_end_; --key_tile) {
        step<true>(key_tile);
      }
    }
    const int full_begin = kMaskedAtEnd ? full_begin_ : 0;
    wait_for_guards();
    if constexpr (!Variant::kMasks) {
#pragma unroll 1
      for (; key_tile >= full_begin; --key_tile) {
        step<false>(key_tile);
      }
    }
    if constexpr (kMaskedAtEnd) {
#pragma unroll 1
      for (; key_tile >= visit_begin_; --key_tile) {
        step<true>(key_tile);
      }
    }
  }

  // ---- borders of tiles

  // With more than one Q buffer: the last product of this tile runs with the first one of the next.
  // False when there is no next tile.
  PANTILE_DEVICE bool next_tile_overlapped() {
    wait_for_guards();
    const std::uint32_t before = use_++;
    const int finished_buffer = q_buffer_;
    ++tile_;
    await_tile();
    if (visit_end_ == 0) {
      wait_v(before);
      products_.issue_output(O, before, o_started_);
      finish_rows(tile_ - 1);
      prim::wgmma_wait<0>();
      prim::pin(O);
      release(s_.v_empty[buffer_of<kVStages>(before)]);
      prim::barrier_sync(Barriers::warpgroup(group_), kWarpgroupThreads);
      write_output(tile_ - 1, finished_buffer);
      return false;
    }
    wait_k(use_);
    take_turn();  // also: all warps of this group are past their last product with the old Q
    products_.issue_scores(S, use_, q_buffer_);
    wait_v(before);
    products_.issue_output(O, before, o_started_);
    pass_turn();
    finish_rows(tile_ - 1);
    take_bounds();
    prim::wgmma_wait<1>();
    prim::pin(S);
    release(s_.k_empty[buffer_of<kKStages>(use_)]);
    begin_tile();
    softmax<true, kRowsDiffer>(before, visit_end_ - visit_begin() == 1);
    write_output(tile_ - 1, finished_buffer);
    return true;
  }

  // With one Q buffer.
  PANTILE_DEVICE bool next_tile() {
    wait_for_guards();
    wait_v(use_);
    products_.issue_output(O, use_, o_started_);
    finish_rows(tile_);
    prim::wgmma_wait<0>();
    prim::pin(O);
    release(s_.v_empty[buffer_of<kVStages>(use_)]);
    // O goes where V is: all warps must be past their last product.
    prim::barrier_sync(Barriers::all_math(), kGroups * kWarpgroupThreads);
    write_output(tile_, kConfig.o_apart ? buffer_of<kVStages>(use_) : 0);
    ++use_;
    ++tile_;
    await_tile();
    if (visit_end_ == 0) {
      return false;
    }
    first_step();
    return true;
  }

  PANTILE_DEVICE void finish_rows(std::uint32_t tile) {
    const float logit_scale = Variant::kAny ? variant_params_.logit_scale : p_.scale;
    hopper::finish_rows(p_, info(tile), softmax_, logit_scale, inverse_);
    if constexpr (Variant::kDrops) {
      inverse_[0] *= variant_params_.keep_scale;
      inverse_[1] *= variant_params_.keep_scale;
    }
  }

  // Divides O by the row sums and writes it to shared memory; to global memory in fp32 or its low
  // bits, where wanted. A tile that is done again writes both again, in the same threads.
  PANTILE_DEVICE void write_output(std::uint32_t tile, int place) {
    if (p_.output_f32) {
      store_float32(p_, info(tile), O, inverse_);
    }
    if (p_.o_low != nullptr) {
      store_low_bits<kDType>(p_, info(tile), O, inverse_);
    }
    const bool taints = store_fragment<kConfig, kDType, kRowsDiffer>(
        prim::shared_address(s_.o_tile(place, group_)), O, inverse_, warp_, lane_);
    prim::fence_async_proxy();
    if (taints && lane_ == 0 && info(tile).careful == 0) {
      s_.tainted[buffer_of<ForwardConfig::kTiles>(tile)] = 1;
    }
    __syncwarp();
    release(s_.o_full[kInQ ? place : 0]);
  }

  // Tells the storer to look at the last description. With one buffer of O, the storer must have
  // seen the last tile first: a phase that completes unseen would hide the next one.
  PANTILE_DEVICE void say_goodbye() {
    if (!kInQ && tile_ > 0) {
      prim::wait(s_.o_empty, parity_of<1>(tile_ - 1));
    }
    __syncwarp();
    release(s_.o_full[q_buffer_]);
  }

  ForwardStorage<kConfig>& s_;
  const ForwardParams& p_;
  const attn::VariantParams& variant_params_;
  int group_, warp_, lane_;  // math warpgroup, warp in it, lane
  Products<kConfig, kDType, kMask> products_;

  float O[kDimV / 2], S[kTileK / 2];
  attn::OnlineSoftmax<kTileK / 2> softmax_;
  float inverse_[2];  // of the row sums of the finished tile
  Variant variant_;
  Walk walk_;

  std::uint32_t use_ = 0, tile_ = 0;  // count uses of the rings of K and V, and tiles
  int q_buffer_ = 0, o_started_ = 0;  // o_started: 0: the next product overwrites O
  std::uint32_t orders_ = 0;          // to the guards, seen carried out
  bool v_guarded_ = false;            // the guards have an order for the next V to be multiplied

  // Of the current tile. position0: key position of its first row.
  int position0_ = 0, keys_ = 0, visit_begin_ = 0, visit_end_, full_begin_ = 0, full_end_;
  bool clear_tail_ = false, careful_ = false;
};

}  // namespace pantile::hopper
