// The math warpgroups of the Hopper FP8 forward, 64 rows each, without any turns between them. A
// step is one tile of 128 keys, from the last one down:
//   1. issue S = Q K^T of this step              (S: registers, pairs of fp16, fresh)
//   2. issue P V of the step before              (P: registers; V: with rows of ones below)
//   3. wait for S; free the stage of K; mask S if this tile needs it
//   4. raise the row maxima; P as e4m3 codes     (attn/fp8_softmax.cuh)
//   5. wait for the next K, then for P V; free the stage of V
//   6. take P V over into O                      (sums.cuh)
// The loop is unrolled by two where there are registers for two P, so that none is moved.
#pragma once

#include "attn/fp8_mask.cuh"
#include "attn/fp8_softmax.cuh"
#include "core/softmax_state.h"
#include "hopper/fp8/output.cuh"
#include "hopper/fp8/storage.cuh"
#include "hopper/fp8/sums.cuh"
#include "prim/registers.cuh"
#include "tile/fragment.cuh"

namespace pantile::hopper {

template <class Variant>
class Fp8MathWarpgroup {
 public:
  PANTILE_DEVICE Fp8MathWarpgroup(Fp8Storage<Variant::kConfig>& storage, const Fp8Maps& maps,
                                  const Fp8Params& params, int group, int warp)
      : s_(storage),
        maps_(maps),
        p_(params),
        warp_(prim::uniform(4 * group + warp)),
        lane_(prim::lane_index()),
        sums_(make_sums(params)) {
    q_descriptor_ = uniform_descriptor(s_.q[0][group]);
    k_descriptor_ = uniform_descriptor(s_.k[0]);
    v_descriptor_ = uniform_descriptor(s_.v[0]);
  }

  PANTILE_DEVICE void run() {
    for (;; ++tile_) {
      prim::wait(s_.q_full[buffer_of<kQ>(tile_)], parity_of<kQ>(tile_));
      visit_end_ = prim::uniform(info().visit_end);
      if (visit_end_ < 0) {
        break;
      }
      if (visit_end_ > 0) {
        all_steps();
      } else {  // no keys: no product is issued, and the registers of one hold an earlier tile's
        begin_tile();
        prim::arrive(s_.q_empty[buffer_of<kQ>(tile_)]);
      }
      finish_tile();
    }
    if (lane_ == 0) {
      prim::bulk_wait<0>();
    }
  }

 private:
  static constexpr Fp8Config kConfig = Variant::kConfig;
  static constexpr MaskKind kMask = Variant::kMask;
  static constexpr int kTileK = Fp8Config::kTileK;
  using Place = Fp8Place<kConfig.stages>;
  static constexpr int kQ = kConfig.q_buffers;
  static constexpr int kQSteps = kConfig.q_in_registers ? kConfig.k_steps() : 1;
  static constexpr int kPanel = kConfig.panel_bytes();
  static constexpr std::uint32_t kHigh =
      kPanel == 128 ? prim::kSwizzle128High : prim::kSwizzle64High;
  // Two P, or one that is made from S after the wait for P V.
  static constexpr bool kTwoP = kConfig.sums == Fp8Sums::every_step;
  using Softmax = attn::Fp8Softmax<Variant::kExp, kTileK / 8>;
  using Sums = std::conditional_t<kConfig.sums == Fp8Sums::every_step, Fp8StepSums<kConfig>,
                                  Fp8FoldedSums<kConfig>>;
  using Operand = std::uint32_t[4][4];

  static PANTILE_DEVICE Sums make_sums(const Fp8Params& params) {
    if constexpr (kConfig.sums == Fp8Sums::every_step) {
      return Sums();
    } else {
      return Sums(params.zero);
    }
  }

  PANTILE_DEVICE const Fp8TileInfo& info() const {
    return s_.tiles[buffer_of<Fp8Config::kTiles>(tile_)];
  }

  // Of what only products have read.
  PANTILE_DEVICE void release(prim::Mbarrier& barrier) {
    if (lane_ == 0) {
      prim::arrive(barrier);
    }
  }

  // ---- tiles

  PANTILE_DEVICE void begin_tile() {
    sums_.begin_tile();
    softmax_.begin_tile();
    if (visit_end_ == 0) {
      return;
    }
    const Fp8TileInfo& tile = info();
    visit_begin_ = kMask == MaskKind::window ? prim::uniform(tile.visit_begin) : 0;
    const int first = tile.row0 + warp_ / 4 * kRowsPerWarpgroup;
    const core::Mask mask{tile.rows, tile.keys, p_.window_left, p_.window_right};
    const core::Span rows{core::min_of(first, tile.rows - 1),
                          core::min_of(first + kRowsPerWarpgroup, tile.rows)};
    const core::Span full = core::plan_row_tile(mask, rows, kTileK).full;
    full_begin_ = prim::uniform(full.begin);
    full_end_ = prim::uniform(full.end);
    take_q_scales(tile);
  }

  PANTILE_DEVICE void take_q_scales(const Fp8TileInfo& tile) {
    const int row = tile.row0 + tile::fragment_row(warp_, lane_);
    float scale[2] = {tile.q_scale[warp_ / 4], tile.q_scale[warp_ / 4]};
    if (p_.q_scale_rows == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = row + 8 * i < tile.rows ? p_.q_scale[tile.q_block * kTileK + row + 8 * i] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows past the end have no scale, and whatever lies there must not sway the warp's votes.
      q_scale_[i] = row + 8 * i < tile.rows ? scale[i] * (p_.scale_log2 * Softmax::kSlope) : 0.0f;
    }
    far_k_ = __fdividef(Softmax::kLimit * Softmax::kSlope,
                        fmaxf(q_scale_[0], q_scale_[1]) * p_.score_bound);
  }

  // Q as the A operand: 16 rows x 32 bytes a step, like 16-bit matrices of half as many columns.
  PANTILE_DEVICE void load_q() {
    const std::uint32_t q = prim::shared_address(s_.q[buffer_of<kQ>(tile_)][warp_ / 4]);
    const int row = warp_ % 4 * 16 + (lane_ & 15);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const int chunk = 2 * (step % (kPanel / 32)) + lane_ / 16;
      const int place = kPanel == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
      prim::load_matrix_x4(q_[step], q + step / (kPanel / 32) * kRowsPerWarpgroup * kPanel +
                                         row * kPanel + place * 16);
    }
    __syncwarp();
  }

  // ---- products

  static PANTILE_DEVICE std::uint32_t uniform_descriptor(const unsigned char* tile) {
    return static_cast<std::uint32_t>(
        prim::uniform(static_cast<int>(prim::descriptor(prim::shared_address(tile)))));
  }

  PANTILE_DEVICE static std::uint32_t descriptor_at(std::uint32_t first, int stage, int bytes,
                                                    std::uint32_t nothing = 0) {
    return first + static_cast<std::uint32_t>(prim::uniform_here(
                       static_cast<int>(prim::descriptor_step(stage * bytes) + nothing)));
  }

  // Where the next products' operands lie: ahead of them, off their critical path. `nothing` is 0.
  PANTILE_DEVICE void take_stages(std::uint32_t nothing = 0) {
    if constexpr (kQ == 1) {
      q_at_ = q_descriptor_;
    } else if constexpr (!kConfig.q_in_registers) {
      q_at_ = descriptor_at(q_descriptor_, buffer_of<kQ>(tile_),
                            kConfig.math_warpgroups * kConfig.q_bytes());
    }
    v_at_ = descriptor_at(v_descriptor_, v_place_.stage, kConfig.v_bytes(), nothing);
    k_at_ = descriptor_at(k_descriptor_, k_place_.stage, kConfig.k_bytes());
  }

  PANTILE_DEVICE void issue_scores() {
    const std::uint64_t k = prim::whole_descriptor(k_at_, kHigh);
    const std::uint64_t q = prim::whole_descriptor(q_at_, kHigh);
    prim::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kConfig.k_steps(); ++step) {
      constexpr int kInPanel = kPanel / 32;
      const int inside = step % kInPanel * 32;
      const std::uint64_t b = k + prim::descriptor_step(step / kInPanel * kTileK * kPanel + inside);
      const std::uint64_t a =
          q + prim::descriptor_step(step / kInPanel * kRowsPerWarpgroup * kPanel + inside);
      if constexpr (kConfig.q_in_registers) {
        if (step == 0) {
          prim::wgmma_e4m3_f16_rs<true>(S, q_[step], b);
        } else {
          prim::wgmma_e4m3_f16_rs<false>(S, q_[step], b);
        }
      } else {
        if (step == 0) {
          prim::wgmma_e4m3_f16_ss<true>(S, a, b);
        } else {
          prim::wgmma_e4m3_f16_ss<false>(S, a, b);
        }
      }
    }
    prim::wgmma_commit();
  }

  PANTILE_DEVICE void issue_output(const Operand& P) {
    prim::wait(s_.stages[v_place_.stage].v_full, v_place_.parity);
    Sums::Product::template issue<Sums::kFreshProduct>(sums_.D, P, v_at_);
  }

  // For the K of the next step; in a tile's last step for the V of this one, which comes next then.
  PANTILE_DEVICE void wait_next(bool last) {
    prim::Mbarrier& k_full = s_.stages[k_place_.stage].k_full;
    prim::Mbarrier& v_full = s_.stages[v_place_.stage].v_full;
    prim::wait(last ? v_full : k_full, last ? v_place_.parity : k_place_.parity);
  }

  // ---- scores

  // Their scale. Rare: some could be out of range.
  PANTILE_DEVICE std::uint32_t scale_of(float k) {
    if (prim::any(k > far_k_)) [[unlikely]] {
      return Softmax::clamp(S, q_scale_, k);
    }
    return Softmax::scale(q_scale_, k);
  }

  PANTILE_DEVICE void mask(int step) {
    const Fp8TileInfo& tile = info();
    const int column0 = step * kTileK + tile::fragment_column(lane_);
    const int end = tile.keys - column0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.row0 + tile::fragment_row(warp_, lane_) + 8 * i;
      const int position = row + tile.keys - tile.rows - column0;
      if constexpr (kMask == MaskKind::full) {
        attn::mask_row<false>(S, i, 0, end);
      } else if constexpr (kMask == MaskKind::causal) {
        attn::mask_row<false>(S, i, 0, min(end, position + 1));
      } else {
        attn::mask_row<true>(S, i, position - p_.window_left,
                             min(end, position + p_.window_right + 1));
      }
    }
  }

  PANTILE_DEVICE bool needs_mask(int step) const {
    return step >= full_end_ || (kMask == MaskKind::window && step < full_begin_);
  }

  // ---- steps

  PANTILE_DEVICE void first_step(int step, Operand& P) {
    Fp8Stage& stage = s_.stages[k_place_.stage];
    if constexpr (kConfig.q_in_registers) {
      load_q();
      prim::arrive(s_.q_empty[buffer_of<kQ>(tile_)]);
    }
    take_stages();
    prim::wait(stage.k_full, k_place_.parity);
    issue_scores();
    begin_tile();  // in the shadow of the product
    const float k_scale = stage.scales.k;
    v_scale_ = stage.scales.v;
    prim::wgmma_wait<0>();
    prim::pin(S);
    prim::arrive(stage.k_empty);  // every lane: each has read the scales
    release_single_q(step);
    const std::uint32_t scale = scale_of(k_scale);
    if (needs_mask(step)) {
      mask(step);
    }
    softmax_.template exponentiate<true>(S, scale);
    softmax_.pack(P, S);
    v_place_ = k_place_;
    k_place_ = k_place_.after();
    wait_next(step == visit_begin_);
    take_stages();
  }

  PANTILE_DEVICE void next_step(int step, Operand& before, Operand& after) {
    Fp8Stage& stage = s_.stages[k_place_.stage];
    const Fp8StepScales scales = stage.scales;
    issue_scores();
    issue_output(before);
    prim::wgmma_wait<1>();
    prim::pin(S);
    prim::arrive(stage.k_empty);  // every lane: each has read the scales
    release_single_q(step);
    const std::uint32_t scale = scale_of(scales.k);
    if (kMask != MaskKind::full && needs_mask(step)) {
      mask(step);
    }
    softmax_.template exponentiate<false>(S, scale);
    if constexpr (kTwoP) {
      softmax_.pack(after, S);
    }
    Fp8Stage& done = s_.stages[v_place_.stage];
    v_place_ = k_place_;
    k_place_ = k_place_.after();
    // Weights are made before the wait for P V, in whose shadow they cost little.
    take_stages(weights_made(after));
    wait_next(step == visit_begin_);
    prim::wgmma_wait<0>();
    prim::pin(sums_.D);
    release(done.v_empty);
    if constexpr (!kTwoP) {
      softmax_.pack(after, S);
    }
    sums_.next_step(softmax_.alpha, softmax_.raised, scales.unit, v_scale_, scales.most,
                    visit_end_ - 1 - step, step - visit_begin_ + 1, fold_place());
    v_scale_ = scales.v;
  }

  PANTILE_DEVICE std::uint32_t weights_made(const Operand& P) const {
    if constexpr (kTwoP) {
      return prim::made_of(P[0], p_.zero) ^ prim::made_of(P[1], p_.zero) ^
             prim::made_of(P[2], p_.zero) ^ prim::made_of(P[3], p_.zero);
    } else {
      return prim::made_of(S, p_.zero);
    }
  }

  // A single buffer of Q is free after the last product of scores. Until then the loader can begin
  // no other tile, not even with its K and V.
  PANTILE_DEVICE void release_single_q(int step) {
    if (kQ == 1 && step == visit_begin_) {
      prim::arrive(s_.q_empty[0]);
    }
  }

  // Loops end on a vote, or ptxas holds the warp for divergent in them (prim::any).
  PANTILE_DEVICE void all_steps() {
    Operand P, Q;  // Q: the other P
    int step = visit_end_ - 1;
    first_step(step--, P);
    bool in_other = false;
    if constexpr (kTwoP) {
#pragma unroll 1
      for (; prim::any(step > visit_begin_); step -= 2) {
        next_step(step, P, Q);
        next_step(step - 1, Q, P);
      }
      in_other = step == visit_begin_;
      if (in_other) {
        next_step(step, P, Q);
      }
    } else {
#pragma unroll 1
      while (prim::any(step >= visit_begin_)) {
        next_step(step--, P, P);
      }
    }
    if (in_other) {
      issue_output(Q);
    } else {
      issue_output(P);
    }
    if constexpr (!kConfig.q_in_registers && kQ > 1) {
      prim::arrive(s_.q_empty[buffer_of<kQ>(tile_)]);
    }
    prim::wgmma_wait<0>();
    prim::pin(sums_.D);
    release(s_.stages[v_place_.stage].v_empty);
  }

  // ---- the end of a tile

  PANTILE_DEVICE unsigned char* place() { return s_.o[warp_]; }

  PANTILE_DEVICE std::uint32_t fold_place() {
    return prim::shared_address(place()) + static_cast<std::uint32_t>(lane_) * 16;
  }

  PANTILE_DEVICE void finish_tile() {
    const Fp8TileInfo& tile = info();
    // The loader tells the scale of V of tiles that visit some.
    const float unit = visit_end_ > 0 ? sums_.end_tile(tile.v_scale, fold_place()) : 0.0f;
    const int row0 = tile.row0 + warp_ * 16;
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = sums_.divisor(i) == 0.0f ? 0.0f : __fdividef(unit, sums_.divisor(i));
      write_lse(tile, i, row0 + lane_ / 4 + 8 * i);
    }
    if (lane_ == 0) {
      prim::bulk_wait_read<0>();
    }
    __syncwarp();
    const std::uint32_t to = prim::shared_address(place());
    if (p_.o_is_f16) {
      stage_output<DType::f16, kConfig>(to, sums_, factor, lane_);
    } else {
      stage_output<DType::bf16, kConfig>(to, sums_, factor, lane_);
    }
    Fp8RowStore<kConfig, kMask> store(p_, tile, place(), row0, lane_);
    __syncwarp();
    if (visit_end_ > 0 && tile.v_nonfinite) {
      store.restore_nonfinite();
    }
    prim::fence_async_proxy();
    __syncwarp();
    store.store(maps_.o);
    if (lane_ == 0) {
      prim::bulk_commit();
    }
  }

  PANTILE_DEVICE void write_lse(const Fp8TileInfo& tile, int i, int row) {
    if (p_.lse == nullptr || (lane_ & 3) != 0 || row >= tile.rows) {
      return;
    }
    const float sum = sums_.l[i];
    float lse = -INFINITY;
    if (sum != 0.0f) {  // also NaN; a row that sees no key must not read what its Q makes of a mean
      lse = (prim::log2_approx(sum) - softmax_.offset(i)) * core::kLn2;
      if (p_.q_dot_mean != nullptr) {
        lse += p_.scale * p_.q_dot_mean[std::int64_t{tile.q_block} * kTileK + row];
      }
    }
    p_.lse[tile.batch * p_.lse_batch + tile.head * p_.lse_head + tile.q_row + row] = lse;
  }

  Fp8Storage<kConfig>& s_;
  const Fp8Maps& maps_;
  const Fp8Params& p_;
  int warp_, lane_;  // warp among those of all math warpgroups, lane
  std::uint32_t q_descriptor_, k_descriptor_, v_descriptor_;
  std::uint32_t q_at_, k_at_, v_at_;  // of what the next products read

  std::uint32_t S[32];
  std::uint32_t q_[kQSteps][4];
  Sums sums_;
  Softmax softmax_;

  Place k_place_, v_place_;  // of the next step's K, of the next product's V
  std::uint32_t tile_ = 0;   // counts tiles

  // Of the current tile.
  int visit_begin_ = 0, visit_end_, full_begin_, full_end_;
  float q_scale_[2];  // times all that scores are multiplied with, but for the scale of K
  float far_k_;       // larger scales of K could bring scores out of range
  float v_scale_;     // of the step before
};

}  // namespace pantile::hopper
