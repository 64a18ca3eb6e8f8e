// What a consumer warpgroup of the paired backward kernel does, one step a function: products and
// element-wise work on its 64 keys. The order of the steps is in kernel_paired.cuh.
#pragma once

#include "attn/variant_grad.cuh"
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/paired_scores.cuh"
#include "hopper/backward/params.cuh"
#include "hopper/backward/storage.cuh"
#include "hopper/backward/sum.cuh"
#include "hopper/backward/variant_steps.cuh"
#include "hopper/backward/walk.cuh"
#include "prim/matrix.cuh"
#include "prim/registers.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"
#include "prim/wgmma.cuh"
#include "prim/wgmma_row_terms.cuh"

namespace pantile::hopper {

template <class Config, MaskKind kMask, SumKind kSum, attn::GradHooks kHooks, class Walk>
class PairedSteps {
 public:
  static constexpr bool kVariant = kHooks.any();
  static constexpr bool kRowSplit = Config::kTileQ == 128;  // dQ is split by rows, else by columns

  PANTILE_DEVICE PairedSteps(PairedStorage<Config>& storage, const BackwardParams& params,
                             const attn::VariantParams& variant_params, int warpgroup)
      : storage_(storage),
        params_(params),
        variant_params_(variant_params),
        warpgroup_(warpgroup),
        lane_(prim::lane_index()),
        warp_(static_cast<int>(threadIdx.x & 127) / 32),
        k_(prim::descriptor(prim::shared_address(&storage.k) + warpgroup * 64 * 128)),
        v_(prim::descriptor(prim::shared_address(&storage.v) + warpgroup * 64 * 128)),
        k_columns_(kRowSplit ? columns_and_ones(prim::shared_address(&storage.k),
                                                prim::shared_address(&storage.key_ones))
                             : prim::descriptor(prim::shared_address(&storage.k) +
                                                warpgroup * storage.k.kPanelBytes)),
        key_ones_(prim::descriptor(prim::shared_address(&storage.key_ones))),
        q_(prim::descriptor(prim::shared_address(storage.q), kRowPanel)),
        grad_o_(prim::descriptor(prim::shared_address(storage.grad_o), kRowPanel)),
        dS_rows_(prim::descriptor(prim::shared_address(storage.dS) +
                                  (kRowSplit ? warpgroup * 64 * 128 : 0))),
        dS_keys_(
            prim::descriptor(prim::shared_address(storage.dS) + warpgroup * kRowPanel, kRowPanel)),
        dS_store_(prim::shared_address(storage.dS) + warpgroup * kRowPanel +
                  ((lane_ & 7) + (lane_ >> 4) * 8) * 128 +
                  (((warp_ * 2 + ((lane_ >> 3) & 1)) ^ (lane_ & 7)) * 16)),
        lse_(prim::terms_descriptor(prim::shared_address(storage.lse))),
        delta_(prim::terms_descriptor(prim::shared_address(storage.delta))),
        walk_(variant_params) {
    if constexpr (kRowSplit) {
      ones_ = prim::ones_descriptor(prim::shared_address(storage.ones));
    } else {
      ones_ = prim::ones_fragment_word(lane_);
    }
  }

  // Starts on a tile of keys; returns the number of steps.
  PANTILE_DEVICE int begin(const KeyTile& key_tile) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dK_[i] = dV_[i] = 0.0f;
    }
    key_tile_ = &key_tile;
    first_tile_ = prim::uniform(key_tile.rows.begin);
    end_tile_ = prim::uniform(key_tile.rows.end);
    masked_before_ = prim::uniform(key_tile.masked_before);
    if constexpr (kMask == MaskKind::window) {
      masked_from_ = prim::uniform(key_tile.masked_from);
    }
    tile_ = first_tile_;
    if constexpr (kVariant) {
      head_ = prim::uniform(key_tile.key_head * params_.group);
      walk_.begin_steps(key_tile, head_, tile_);
      variant_.begin_head(variant_params_, key_tile.batch, head_);
    }
    return Walk::kListed ? end_tile_ : params_.group * (end_tile_ - first_tile_);
  }

  PANTILE_DEVICE void wait_keys() { prim::wait(storage_.key.full[0], keys_.parity); }

  PANTILE_DEVICE void wait_values() { prim::wait(storage_.value.full[0], keys_.parity); }

  // Requests S of the next tile of rows, which becomes the tile at work.
  PANTILE_DEVICE void issue_S() {
    prim::wait(storage_.query.full[next_query_.stage], next_query_.parity);
    const int stage = next_query_.stage;
    issue_scores<Config, !kHooks.raw()>(
        S_, ones_, k_, q_ + prim::descriptor_step(stage * sizeof(storage_.q[0])),
        lse_ + prim::descriptor_step(stage * sizeof(storage_.lse[0])));
    next_query_.advance();
  }

  PANTILE_DEVICE void issue_dP() {
    prim::wait(storage_.grad.full[next_grad_.stage], next_grad_.parity);
    const int stage = next_grad_.stage;
    issue_scores<Config, true>(dP_, ones_, v_,
                               grad_o_ + prim::descriptor_step(stage * sizeof(storage_.grad_o[0])),
                               delta_ + prim::descriptor_step(stage * sizeof(storage_.delta[0])));
    next_grad_.advance();
  }

  // Waits until kPending batches of products are in flight; S (dP) is then complete.
  template <int kPending>
  PANTILE_DEVICE void take_S() {
    prim::wgmma_wait<kPending>();
    prim::pin(S_);
  }

  template <int kPending>
  PANTILE_DEVICE void take_dP() {
    prim::wgmma_wait<kPending>();
    prim::pin(dP_);
  }

  PANTILE_DEVICE void issue_dV() {
    const std::uint32_t b =
        grad_o_ + prim::descriptor_step(grad_stage() * sizeof(storage_.grad_o[0]));
    prim::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      prim::wgmma_rs<kDType, prim::Major::mn>(dV_, P_[k], b + prim::descriptor_step(k * 2048));
    }
    prim::wgmma_commit();
  }

  // From dS buffer `buffer`, and if careful sums of dS. Split by rows, each warpgroup sums dS of
  // its rows as 8 more columns of the product. Split by columns, both have the same rows, and each
  // sums over its own keys, in a product of its own: for one of 72 columns ptxas finds no registers
  // (C7512).
  template <bool kCareful>
  PANTILE_DEVICE void issue_dQ(QueryGradient<kCareful>& dQ, int buffer) {
    const std::uint32_t a = dS_rows_ + prim::descriptor_step(buffer * sizeof(storage_.dS[0]));
    prim::wgmma_fence();
    constexpr bool kTogether = kCareful && kRowSplit;
    auto& columns = columns_of<kTogether>(dQ);
    prim::wgmma_ss_write<kDType, prim::Major::k, prim::Major::mn>(columns, a, k_columns_);
#pragma unroll
    for (int k = 1; k < Config::kTileK / 16; ++k) {
      prim::wgmma_ss<kDType, prim::Major::k, prim::Major::mn>(
          columns, a + prim::descriptor_step(k / 4 * kRowPanel + k % 4 * 32),
          k_columns_ + (kTogether ? ones_step(k) : prim::descriptor_step(k * 2048)));
    }
    if constexpr (kCareful && !kTogether) {
      sum_keys<kDType, 4>(sums_of(dQ), a + warpgroup_ * prim::descriptor_step(kRowPanel),
                          key_ones_);
    }
    prim::wgmma_commit();
  }

  // The last reader of a dS buffer: the next dS goes to the other one.
  PANTILE_DEVICE void issue_dK(int query_stage) {
    const std::uint32_t a = dS_keys_ + prim::descriptor_step(buffer_ * sizeof(storage_.dS[0]));
    const std::uint32_t b = q_ + prim::descriptor_step(query_stage * sizeof(storage_.q[0]));
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      prim::wgmma_ss<kDType, prim::Major::mn, prim::Major::mn>(
          dK_, a + prim::descriptor_step(k * 2048), b + prim::descriptor_step(k * 2048));
    }
    prim::wgmma_commit();
    buffer_ ^= 1;
  }

  // What the variant needs for the tile at work; before its scores are waited for.
  PANTILE_DEVICE void fetch() {
    if constexpr (kHooks.dropout) {
      variant_.fetch(variant_params_, place(), begins_with_cell(variant_params_, *key_tile_));
    }
    if constexpr (Walk::kListed) {
      walk_.template fetch<kTileQ>(key_tile_->batch, head_, place());
    }
  }

  PANTILE_DEVICE void compute_P() {
    if constexpr (kHooks.raw()) {
      float P[kScores];
      raw_weights<Config, kMask, kHooks>(P, S_, is_masked(), walk_, *key_tile_, tile_, warpgroup_,
                                         storage_.lse[query_stage()], variant_, variant_params_);
      pack_fragment<kDType>(P_, P);
    } else {
      if (is_masked()) {
        mask_scores<kMask>(S_, key_tile_->mask, key_tile_->tile * Config::kTileK + warpgroup_ * 64,
                           tile_ * kTileQ, params_.masked_score);
        walk_.hide(S_, params_.masked_score);
      }
      if constexpr (kHooks.adds()) {
        added_logits(S_, params_.scale_log2, variant_, variant_params_, place());
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float x = kHooks.adds() ? S_[i] : S_[i] * params_.scale_log2;
        S_[i] = is_by_polynomial(Config::kHeadDim, kSum, i) ? prim::exp2_polynomial(x)
                                                            : prim::exp2_approx(x);
      }
    }
  }

  // Head dim 64 packs P with dS, softcap and its like with P.
  PANTILE_DEVICE void pack_P() {
    if constexpr (!kHooks.raw()) {
      pack_fragment<kDType>(P_, S_);
    }
    if constexpr (kHooks.dropout) {
      variant_.drop(P_);
    }
  }

  // dS = P * dP goes to shared memory as [query][key]. At head dim 64 the packing of P is
  // interleaved: each slice of S is dead after it.
  PANTILE_DEVICE void compute_dS() {
    if constexpr (kHooks.grads()) {
      variant_.begin_notes(variant_params_, place());
    }
    const std::uint32_t to = dS_store_ + buffer_ * static_cast<int>(sizeof(storage_.dS[0]));
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      std::uint32_t dS[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = 8 * k + 2 * r;
        dS[r] = prim::pack<kDType>(score_gradient(at), score_gradient(at + 1));
      }
      prim::store_matrix_x4_transposed(to + k * 2048, dS[0], dS[1], dS[2], dS[3]);
      if constexpr (kRowSplit && !kHooks.raw()) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          P_[k][r] = prim::pack<kDType>(S_[8 * k + 2 * r], S_[8 * k + 2 * r + 1]);
        }
      }
      if constexpr (kRowSplit && kHooks.dropout) {
        variant_.drop(P_[k], k);
      }
    }
    prim::fence_async_proxy();
  }

  PANTILE_DEVICE void wait_dQ_buffer() {
    prim::wait(storage_.dq_empty[warpgroup_], dq_parity_);
    dq_parity_ ^= 1;
  }

  // For the dQ of that stage of Q; before the wait for dQ, so that the loads' latency passes in it.
  PANTILE_DEVICE void read_row_scale(int query_stage) {
    if constexpr (kSum == SumKind::integer) {
      const RowTerms<kTileQ>& terms = storage_.lse[query_stage];
      const int row = scaled_row();
      row_scale_[0] = held_scale(terms.row[row]);
      row_scale_[1] = held_scale(terms.row[row + 8]);
    }
  }

  // Hands the dQ fragment to the adder, which orders the stores before its bulk copy: a proxy fence
  // here would wait for them, which the products in flight delay, for a tenth of the step.
  template <bool kCareful>
  PANTILE_DEVICE void send_dQ(QueryGradient<kCareful>& dQ, int query_stage) {
    if constexpr (kCareful && kSum == SumKind::integer) {
      scale_sums(dQ, row_sum_unit(params_, *key_tile_));
      if (is_measuring(row_scale_)) {
        const RowTerms<kTileQ>& terms = storage_.lse[query_stage];
        const int row = scaled_row();
        note_additions(dQ, {core::slot_of(terms.row[row].w), core::slot_of(terms.row[row + 8].w)},
                       params_.row_max);
      }
    }
    stage_fragment<kSum>(storage_.dQ[warpgroup_], dQ, row_scale_);
    arrive_warp(storage_.dq_full[warpgroup_]);
  }

  // For what only wgmma reads: the wait for it is already warp-wide.
  PANTILE_DEVICE void release(prim::Mbarrier& barrier) {
    if (lane_ == 0) {
      prim::arrive(barrier);
    }
  }

  PANTILE_DEVICE void release_keys() { release(storage_.key.empty[0]); }
  PANTILE_DEVICE void release_values() { release(storage_.value.empty[0]); }
  PANTILE_DEVICE void release_query(int stage) { release(storage_.query.empty[stage]); }
  PANTILE_DEVICE void release_grad() { release(storage_.grad.empty[grad_stage()]); }  // at work

  // For what ordinary code has written or read: all lanes first.
  PANTILE_DEVICE void arrive_warp(prim::Mbarrier& barrier) {
    __syncwarp();
    release(barrier);
  }

  // On to the next tile of rows, or the next head's first.
  PANTILE_DEVICE void next_tile() {
    if constexpr (Walk::kListed) {
      if (walk_.ends_head()) {
        end_head();
        walk_.start(*key_tile_, ++head_);
        variant_.begin_head(variant_params_, key_tile_->batch, head_);
      } else {
        walk_.step();
      }
      tile_ = walk_.tile();
    } else if (++tile_ == end_tile_) {
      tile_ = first_tile_;
      if constexpr (kVariant) {
        end_head();
        ++head_;
        variant_.begin_head(variant_params_, key_tile_->batch, head_);
      }
    }
  }

  // The first of the two rows of dQ, of a tile of rows, that the thread holds.
  PANTILE_DEVICE int scaled_row() const {
    const int thread = fresh_thread();
    return (kRowSplit ? warpgroup_ * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  }

  // Of Q of the tile at work.
  PANTILE_DEVICE int query_stage() const {
    return next_query_.stage == 0 ? Config::kQueryStages - 1 : next_query_.stage - 1;
  }
  PANTILE_DEVICE int buffer() const { return buffer_; }  // of dS of the tile at work
  PANTILE_DEVICE int warpgroup() const { return warpgroup_; }
  PANTILE_DEVICE bool first_lane() const { return lane_ == 0; }
  PANTILE_DEVICE PairedStorage<Config>& storage() { return storage_; }

  // Returns at once while a tile of keys is at work. ptxas does not hoist a wgmma wait above
  // exponentials that stand before this one.
  PANTILE_DEVICE void pin_exponentials() { wait_keys(); }

  // Everything of the tile of keys is in dK and dV.
  PANTILE_DEVICE void finish() {
    prim::wgmma_wait<0>();
    prim::pin(dK_);
    prim::pin(dV_);
    end_head();
    keys_.advance();
  }

  PANTILE_DEVICE void store(const KeyTile& key_tile) {
    const bool packed = params_.keys.cu_seqlens != nullptr;
    const int key = key_tile.tile * Config::kTileK + warpgroup_ * 64;
    const int first_key = key_tile.first_key;
    const int keys = key_tile.mask.keys;
    store_fragment<kDType>(
        gradient_rows(params_.grad_v, params_.grad_v_layout, key_tile, packed, first_key),
        params_.grad_v_layout.seq, dV_, kHooks.dropout ? variant_params_.keep_scale : 1.0f, key,
        keys, params_.head_dim_v);
    store_fragment<kDType>(
        gradient_rows(params_.grad_k, params_.grad_k_layout, key_tile, packed, first_key),
        params_.grad_k_layout.seq, dK_,
        kHooks.dropout ? variant_params_.keep_scale * params_.scale : params_.scale, key, keys,
        params_.head_dim);
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    zero_unattended_keys<Config::kTileK, kThreads>(params_.grad_v, params_.grad_v_layout,
                                                   params_.head_dim_v, key_tile, packed, thread);
    zero_unattended_keys<Config::kTileK, kThreads>(params_.grad_k, params_.grad_k_layout,
                                                   params_.head_dim, key_tile, packed, thread);
  }

 private:
  static constexpr DType kDType = Config::kDType;
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kCount = Config::kHeadDim / 2;  // accumulators of dK, dV a thread
  static constexpr int kThreads = Config::kConsumers * kWarpgroup;
  static constexpr int kScores = kTileQ / 2;      // of S, dP
  static constexpr int kSlices = kTileQ / 16;     // k steps of products over rows
  static constexpr int kRowPanel = kTileQ * 128;  // bytes of a panel of q, grad_o, dS

  // Of dO of the tile at work.
  PANTILE_DEVICE int grad_stage() const {
    static_assert(Config::kGradStages == 2);
    return next_grad_.stage ^ 1;
  }

  PANTILE_DEVICE attn::TransposedPlace place() const {
    return place_of<Config>(*key_tile_, tile_, warpgroup_);
  }

  PANTILE_DEVICE bool is_masked() const {
    return walk_.template needs_mask<kMask>(tile_, masked_before_, masked_from_);
  }

  // dS of register i.
  PANTILE_DEVICE float score_gradient(int i) {
    float dP = dP_[i];
    if constexpr (kHooks.dropout) {
      dP = variant_.select(i, dP, minus_delta(storage_.delta[grad_stage()], i));
    }
    const float dS = dP * S_[i];
    if constexpr (kHooks.grads()) {
      variant_.note(variant_params_, i, dS);
    }
    return dS;
  }

  // All rows of a head are done.
  PANTILE_DEVICE void end_head() {
    if constexpr (kHooks.grad_alibi) {
      store_slope_part(variant_params_, params_, *key_tile_, head_, 4 * warpgroup_ + warp_,
                       variant_.slope_sum());
    }
    variant_.finish_head(variant_params_);
  }

  PairedStorage<Config>& storage_;
  const BackwardParams& params_;
  const attn::VariantParams& variant_params_;
  const int warpgroup_;
  const int lane_, warp_;
  // Descriptors: keys of this warpgroup, their head dim columns as operand of dQ, ...
  const std::uint32_t k_, v_, k_columns_, key_ones_, q_, grad_o_, dS_rows_, dS_keys_;
  const std::uint32_t dS_store_;
  const std::uint32_t lse_, delta_;
  std::uint32_t ones_;
  const KeyTile* key_tile_ = nullptr;
  int first_tile_ = 0, end_tile_ = 0;  // of rows
  int masked_before_ = 0, masked_from_ = 0;
  int tile_ = 0;  // at work
  StageCursor<Config::kQueryStages> next_query_;
  StageCursor<Config::kGradStages> next_grad_;
  StageCursor<1> keys_;  // K and V
  std::uint32_t dq_parity_ = 1;
  float row_scale_[2];  // integer sums only
  int buffer_ = 0;      // of dS, of the tile at work
  float S_[kScores], dP_[kScores];
  float dK_[kCount], dV_[kCount];
  std::uint32_t P_[kSlices][4];
  attn::GradVariant<kHooks, kTileQ> variant_;
  int head_ = 0;  // of queries, at work; variants only
  Walk walk_;
};

}  // namespace pantile::hopper
