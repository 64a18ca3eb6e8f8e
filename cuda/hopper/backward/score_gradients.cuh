// The warpgroup of the pipeline kernel that makes dS and sums dK.
#pragma once

#include "hopper/backward/accumulator.cuh"
#include "hopper/backward/clean_keys.cuh"
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/storage.cuh"
#include "hopper/backward/variant_steps.cuh"
#include "hopper/backward/walk.cuh"
#include "prim/matrix.cuh"
#include "prim/registers.cuh"
#include "prim/unpack.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper::pipeline {

inline constexpr int kKeysCleaned = 1, kValuesCleaned = 2;  // named barriers; lists only

// Stages 4 and 5.
template <class Config, attn::GradHooks kHooks, class Walk>
class ScoreGradients {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE ScoreGradients(Storage& storage, const BackwardParams& params,
                                const attn::VariantParams& variant_params)
      : storage_(storage),
        params_(params),
        variant_params_(variant_params),
        ones_(prim::ones_descriptor(prim::shared_address(storage.ones))),
        terms_(prim::terms_descriptor(prim::shared_address(storage.delta))),
        v_(prim::descriptor(prim::shared_address(&storage.v))),
        grad_o_(prim::descriptor(prim::shared_address(storage.grad_o))),
        q_(prim::descriptor(prim::shared_address(storage.q), Config::kTileQ * 128)),
        walk_(variant_params) {
    const int lane = prim::lane_index();
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    dS_store_ = prim::shared_address(storage.dS) + ((lane & 7) + (lane >> 4) * 8) * 128 +
                (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16);
  }

  PANTILE_DEVICE void run() {
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      dK_.clear();
      hides_keys_ = key_tile->masked_before != 0;
      begin_tile(*key_tile);
      run_tile((Walk::kListed ? 1 : params_.group) * prim::uniform(key_tile->rows.size()));
      dK_.store(params_.grad_k, params_.grad_k_layout, params_.head_dim,
                kHooks.dropout ? variant_params_.keep_scale * params_.scale : params_.scale,
                params_, *key_tile);
      __syncwarp();
      work.done(prim::lane_index() == 0);
    }
  }

 private:
  PANTILE_DEVICE void run_tile(int steps) {
    if (steps > 0) {
      prim::wait(storage_.value.full[0], values_.parity);
      values_.advance();
      if constexpr (Walk::kListed) {
        if (hides_keys_) {
          zero_nonfinite_rows<Config::kDType, Config::kTileK>(storage_.v, 0);
          prim::barrier_sync(kValuesCleaned, kWarpgroup);
        }
      }
      issue_dP();
      prim::wgmma_wait<0>();
      multiply_by_P();
      send_dS();
      next(steps > 1);
#pragma unroll 1
      for (int i = 1; i < steps; ++i) {
        issue_dP();  // of this step
        issue_dK();  // of the step before
        prim::wgmma_wait<1>();
        multiply_by_P();
        prim::wgmma_wait<0>();
        release(storage_.query.empty[previous_.stage]);
        send_dS();
        next(i + 1 < steps);
      }
      release(storage_.value.empty[0]);
      issue_dK();
      dK_.finish();
      release(storage_.query.empty[previous_.stage]);
    }
  }

  PANTILE_DEVICE void issue_dP() {
    prim::wait(storage_.grad.full[cursor_.stage], cursor_.parity);
    issue_square<Config, Config::kHeadDimV, true>(
        dP_, ones_, terms_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.delta[0])), v_,
        grad_o_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.grad_o[0])));
  }

  PANTILE_DEVICE void issue_dK() {
    prim::wait(storage_.query.full[previous_.stage], previous_.parity);
    dK_.issue(dS_, q_ + prim::descriptor_step(previous_.stage * sizeof(storage_.q[0])));
  }

  PANTILE_DEVICE void multiply_by_P() {
    prim::pin(dP_);
    if constexpr (!kHooks.dropout) {
      release(storage_.grad.empty[cursor_.stage]);
    }
    if constexpr (kHooks.grads()) {
      variant_.begin_notes(variant_params_, place_of<Config>(*key_tile_, tile_, 0));
    }
    prim::wait(storage_.p_full, p_parity_);
    p_parity_ ^= 1;
    const uint4* from = &storage_.P[0][threadIdx.x % kWarpgroup];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 words = from[j * kWarpgroup];
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 P = prim::unpack<DType::f16>(word[k]);  // halves swapped
        dP_[8 * j + 2 * k] = score_gradient(8 * j + 2 * k, P.y);
        dP_[8 * j + 2 * k + 1] = score_gradient(8 * j + 2 * k + 1, P.x);
      }
    }
    if constexpr (kHooks.dropout) {
      __syncwarp();  // all lanes have read the terms of delta
      release(storage_.grad.empty[cursor_.stage]);
    }
    prim::arrive(storage_.p_empty);
    prim::wait(storage_.ds.empty[dS_cursor_.stage], dS_cursor_.parity ^ 1);
  }

  PANTILE_DEVICE void send_dS() {
    pack_fragment<Config::kDType>(dS_, dP_);
    const std::uint32_t to =
        dS_store_ + dS_cursor_.stage * static_cast<int>(sizeof(storage_.dS[0]));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      prim::store_matrix_x4_transposed(to + k * 2048, dS_[k][0], dS_[k][1], dS_[k][2], dS_[k][3]);
    }
    prim::fence_async_proxy();
    arrive_warp(storage_.ds.full[dS_cursor_.stage]);
    dS_cursor_.advance();
  }

  // `more`: a step follows.
  PANTILE_DEVICE void next(bool more) {
    previous_ = cursor_;
    cursor_.advance();
    if constexpr (kHooks.grads() && Walk::kListed) {
      if (!more || walk_.ends_head()) {
        end_head();
      }
      if (more && walk_.ends_head()) {
        walk_.start(*key_tile_, ++head_);
        variant_.begin_head(variant_params_, key_tile_->batch, head_);
      } else if (more) {
        walk_.step();
      }
      tile_ = walk_.tile();
    } else if constexpr (kHooks.grads()) {
      if (++tile_ == key_tile_->rows.end) {
        tile_ = key_tile_->rows.begin;
        end_head();
        if (more) {
          variant_.begin_head(variant_params_, key_tile_->batch, ++head_);
        }
      }
    }
  }

  // ---- variant

  PANTILE_DEVICE void begin_tile(const KeyTile& key_tile) {
    if constexpr (kHooks.grads()) {
      key_tile_ = &key_tile;
      tile_ = key_tile.rows.begin;
      head_ = key_tile.key_head * params_.group;
      walk_.begin_steps(key_tile, head_, tile_);
      variant_.begin_head(variant_params_, key_tile.batch, head_);
    }
  }

  // All rows of a head are done; their last step may be another head's next().
  PANTILE_DEVICE void end_head() {
    if constexpr (kHooks.grad_alibi) {
      store_slope_part(variant_params_, params_, *key_tile_, head_,
                       static_cast<int>(threadIdx.x) % kWarpgroup / 32, variant_.slope_sum());
    }
    variant_.finish_head(variant_params_);
  }

  // dS of register i. Weights that dropout removed are negative.
  PANTILE_DEVICE float score_gradient(int i, float P) {
    float dP = dP_[i];
    if constexpr (kHooks.dropout) {
      dP = P < 0.0f ? minus_delta(storage_.delta[cursor_.stage], i) : dP;
      P = fabsf(P);
    }
    const float dS = dP * P;
    if constexpr (kHooks.grads()) {
      variant_.note(variant_params_, i, dS);
    }
    return dS;
  }

  Storage& storage_;
  const BackwardParams& params_;
  const attn::VariantParams& variant_params_;
  const std::uint32_t ones_, terms_, v_, grad_o_, q_;
  std::uint32_t dS_store_;
  StageCursor<Config::kStages> cursor_, previous_;
  StageCursor<Config::kScoreGradStages> dS_cursor_;
  StageCursor<1> values_;
  std::uint32_t p_parity_ = 0;
  float dP_[32];
  std::uint32_t dS_[4][4];
  Accumulator<Config, Config::kHeadDim> dK_;
  attn::GradVariant<kHooks, Config::kTileQ> variant_;
  const KeyTile* key_tile_ = nullptr;  // these three: where gradients of the variant are wanted
  int tile_ = 0, head_ = 0;            // of rows, and of queries
  Walk walk_;
  bool hides_keys_ = false;  // lists only
};

}  // namespace pantile::hopper::pipeline
