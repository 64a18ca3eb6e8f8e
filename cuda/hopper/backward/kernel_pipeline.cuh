// Backward for head dims above 128. One block a multiprocessor works on tiles of 64 keys of a key
// head, one after the other, claimed from a counter; for each it walks over all tiles of 64 rows
// that see them, of all query heads that share the head. The warpgroups form a pipeline and meet
// only in shared memory:
//
//   1 producer       Q, dO tiles and their row terms             -> q, grad_o, lse, delta
//   2 probabilities  S^T = K Q^T - lse / scale, P = exp2(..)     -> P (fp16)
//   3                dV += P^T dO, P^T from registers               (registers)
//   4 score grads    dP^T = V dO^T - delta, dS = P * dP          -> dS
//   5                dK += dS^T Q, dS^T from registers              (registers)
//   6 query grads    dQ = dS K, 64 columns at a time             -> added into global memory,
//                    integers of head dim 192 by way of dQ and an adder thread beside the producer
//   7 2 and 4        dV, dK * scale                              -> global memory
//
// P goes from 2 to 4 without a transpose: both warpgroups hold the same elements of S and dP in the
// same thread. As fp16 it is half the bytes of fp32, and dS is as exact as with fp32 P after it has
// been rounded to 16 bits.
//
// The two accumulating warpgroups issue their next 64 x 64 product before they wait for the
// accumulation before it, so that the element-wise work runs under the latter. The mbarrier wait in
// that work is what keeps ptxas from hoisting the second wgmma wait above it.
#pragma once

#include "hopper/backward/accumulator.cuh"
#include "hopper/backward/clean_keys.cuh"
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/query_gradients.cuh"
#include "hopper/backward/score_gradients.cuh"
#include "hopper/backward/storage.cuh"
#include "hopper/backward/variant_steps.cuh"
#include "hopper/backward/walk.cuh"
#include "prim/registers.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

namespace pipeline {

// Stages 2 and 3.
template <class Config, MaskKind kMask, attn::GradHooks kHooks, class Walk>
class Probabilities {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE Probabilities(Storage& storage, const BackwardParams& params,
                               const attn::VariantParams& variant_params)
      : storage_(storage),
        params_(params),
        variant_params_(variant_params),
        ones_(prim::ones_descriptor(prim::shared_address(storage.ones))),
        terms_(prim::terms_descriptor(prim::shared_address(storage.lse))),
        k_(prim::descriptor(prim::shared_address(&storage.k))),
        q_(prim::descriptor(prim::shared_address(storage.q))),
        grad_o_(prim::descriptor(prim::shared_address(storage.grad_o), Config::kTileQ * 128)),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      dV_.clear();
      run_tile(*key_tile);
      dV_.store(params_.grad_v, params_.grad_v_layout, params_.head_dim_v,
                kHooks.dropout ? variant_params_.keep_scale : 1.0f, params_, *key_tile);
      __syncwarp();
      work.done(prim::lane_index() == 0);
    }
  }

 private:
  PANTILE_DEVICE void run_tile(const KeyTile& key_tile) {
    key_tile_ = &key_tile;
    first_tile_ = prim::uniform(key_tile.rows.begin);
    end_tile_ = prim::uniform(key_tile.rows.end);
    masked_before_ = prim::uniform(key_tile.masked_before);
    masked_from_ = prim::uniform(key_tile.masked_from);
    tile_ = first_tile_;
    begin_head(key_tile.key_head * params_.group);
    const int steps = Walk::kListed ? end_tile_ : params_.group * (end_tile_ - first_tile_);
    if (steps > 0) {
      prim::wait(storage_.key.full[0], keys_.parity);
      keys_.advance();
      if constexpr (Walk::kListed) {
        if (masked_before_ != 0) {
          zero_nonfinite_rows<Config::kDType, Config::kTileK>(storage_.k, 0);
          prim::barrier_sync(kKeysCleaned, kWarpgroup);
        }
      }
      issue_S();
      fetch();
      prim::wgmma_wait<0>();
      send_P();
      pack_P();
      next(steps > 1);
#pragma unroll 1
      for (int i = 1; i < steps; ++i) {
        issue_S();   // of this step
        issue_dV();  // of the step before
        fetch();
        prim::wgmma_wait<1>();
        send_P();
        prim::wgmma_wait<0>();
        release(storage_.grad.empty[previous_.stage]);
        pack_P();
        next(i + 1 < steps);
      }
      release(storage_.key.empty[0]);
      issue_dV();
      dV_.finish();
      release(storage_.grad.empty[previous_.stage]);
    }
  }

  PANTILE_DEVICE void issue_S() {
    prim::wait(storage_.query.full[cursor_.stage], cursor_.parity);
    issue_square<Config, Config::kHeadDim, !kHooks.raw()>(
        S_, ones_, terms_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.lse[0])), k_,
        q_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.q[0])));
  }

  PANTILE_DEVICE void issue_dV() {
    prim::wait(storage_.grad.full[previous_.stage], previous_.parity);
    dV_.issue(packed_P_,
              grad_o_ + prim::descriptor_step(previous_.stage * sizeof(storage_.grad_o[0])));
  }

  PANTILE_DEVICE void send_P() {
    prim::pin(S_);
    float weights[kHooks.raw() ? 32 : 1];  // P; stage 4 then gets P times the slope
    if constexpr (!kHooks.raw()) {
      release(storage_.query.empty[cursor_.stage]);
      if (walk_.template needs_mask<kMask>(tile_, masked_before_, masked_from_)) {
        mask_scores<kMask>(S_, key_tile_->mask, key_tile_->tile * Config::kTileK,
                           tile_ * Config::kTileQ, params_.masked_score);
        walk_.hide(S_, params_.masked_score);
      }
    }
    if constexpr (kHooks.raw()) {
      raw_weights<Config, kMask, kHooks>(
          weights, S_, walk_.template needs_mask<kMask>(tile_, masked_before_, masked_from_), walk_,
          *key_tile_, tile_, 0, storage_.lse[cursor_.stage], variant_, variant_params_);
      __syncwarp();  // all lanes have read the terms of LSE
      release(storage_.query.empty[cursor_.stage]);
    } else {
      if constexpr (kHooks.adds()) {
        added_logits(S_, params_.scale_log2, variant_, variant_params_,
                     place_of<Config>(*key_tile_, tile_, 0));
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        S_[i] = prim::exp2_approx(kHooks.adds() ? S_[i] : S_[i] * params_.scale_log2);
      }
    }
    prim::wait(storage_.p_empty, p_parity_);
    p_parity_ ^= 1;
    // The halves are swapped against packed_P_'s. For f16 ptxas would otherwise take the words made
    // here, while dV still reads packed_P_, as the next packed_P_ and serialise the loop (C7513).
    uint4* to = &storage_.P[0][threadIdx.x % kWarpgroup];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[j * kWarpgroup] =
          variant_.with_signs(j, make_uint4(prim::pack<DType::f16>(S_[8 * j + 1], S_[8 * j]),
                                            prim::pack<DType::f16>(S_[8 * j + 3], S_[8 * j + 2]),
                                            prim::pack<DType::f16>(S_[8 * j + 5], S_[8 * j + 4]),
                                            prim::pack<DType::f16>(S_[8 * j + 7], S_[8 * j + 6])));
    }
    prim::arrive(storage_.p_full);
    if constexpr (kHooks.raw()) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        S_[i] = weights[i];
      }
    }
  }

  // The operand of dV.
  PANTILE_DEVICE void pack_P() {
    pack_fragment<Config::kDType>(packed_P_, S_);
    if constexpr (kHooks.dropout) {
      variant_.drop(packed_P_);
    }
  }

  // ---- variant

  PANTILE_DEVICE void begin_head(int head) {
    if constexpr (kHooks.any()) {
      head_ = prim::uniform(head);
      walk_.begin_steps(*key_tile_, head_, tile_);
      variant_.begin_head(variant_params_, key_tile_->batch, head_);
    }
  }

  PANTILE_DEVICE void fetch() {
    if constexpr (kHooks.dropout) {
      variant_.fetch(variant_params_, place_of<Config>(*key_tile_, tile_, 0),
                     begins_with_cell(variant_params_, *key_tile_));
    }
    if constexpr (Walk::kListed) {
      walk_.template fetch<Config::kTileQ>(key_tile_->batch, head_,
                                           place_of<Config>(*key_tile_, tile_, 0));
    }
  }

  // `more`: a step follows.
  PANTILE_DEVICE void next(bool more) {
    if constexpr (Walk::kListed) {
      if (more && walk_.ends_head()) {
        begin_head(head_ + 1);
      } else if (more) {
        walk_.step();
        tile_ = walk_.tile();
      }
    } else if (++tile_ == end_tile_) {
      tile_ = first_tile_;
      if (more) {
        begin_head(head_ + 1);  // there may be no such head: it would read past the slopes
      }
    }
    previous_ = cursor_;
    cursor_.advance();
  }

  Storage& storage_;
  const BackwardParams& params_;
  const attn::VariantParams& variant_params_;
  const std::uint32_t ones_, terms_, k_, q_, grad_o_;
  const KeyTile* key_tile_ = nullptr;
  int first_tile_ = 0, end_tile_ = 0;  // of rows
  int masked_before_ = 0, masked_from_ = 0;
  int tile_ = 0;                                    // at work
  StageCursor<Config::kStages> cursor_, previous_;  // Q and dO stages advance together
  StageCursor<1> keys_;
  std::uint32_t p_parity_ = 1;
  float S_[32];
  std::uint32_t packed_P_[4][4];
  Accumulator<Config, Config::kHeadDimV> dV_;
  attn::GradVariant<kHooks, Config::kTileQ> variant_;
  int head_ = 0;  // of queries, at work; variants only
  Walk walk_;
};

}  // namespace pipeline

// The kernel, whose parameters are the launch's. Walk: see walk.cuh.
template <class Config, MaskKind kMask, SumKind kSum, attn::GradHooks kHooks, class Walk = SpanRows>
PANTILE_DEVICE void pipeline_body(const BackwardMaps& maps, const BackwardParams& params,
                                  const attn::VariantParams& variant_params) {
  enum Role : int { kCopies, kProbabilities, kScoreGradients, kQueryGradients };
  extern __shared__ std::uint8_t dynamic_smem[];
  using Storage = PipelineStorage<Config>;
  Storage& storage = aligned_storage<Storage>(dynamic_smem);
  if (kSum == SumKind::integer && !has_work(params)) {
    return;
  }
  const int warp = prim::uniform(static_cast<int>(threadIdx.x) / 32);
  const int role = warp / 4;
  if (threadIdx.x < prim::kOnesTileBytes / 4) {
    storage.ones[threadIdx.x] = prim::ones_tile_word(static_cast<int>(threadIdx.x));
    prim::fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    constexpr int kCopyThreads = Config::kBulkAdds ? 2 : 1;  // loader, adder
    storage.key.init(8);                                     // stages 2 and 6
    storage.value.init(4);                                   // stage 4
    storage.work.init(3 * 4 + kCopyThreads);                 // stages 2, 4, 6
    if constexpr (Config::kBulkAdds) {
      storage.dQ.ring.init(1, 4);
    }
    storage.query.init(8);  // warps of the two accumulating warpgroups
    storage.grad.init(8);
    storage.ds.init(4, 4);
    prim::init(storage.p_full, kWarpgroup);  // every thread for its own elements
    prim::init(storage.p_empty, kWarpgroup);
    prim::fence_mbarrier_init();
  }
  storage.key_ones.init();
  clear_missing_panels<Config>(storage, params);
  __syncthreads();
  if (role == kCopies) {
    prim::shrink_registers<Config::kProducerRegisters>();
    if (warp == 0 && prim::elect_one()) {
      Loader<Config, Storage, Walk>(storage, maps, params, variant_params).run();
    } else if (warp == 1 && prim::elect_one()) {
      schedule<Config, kMask, kSum, Walk>(storage.work, params, variant_params);
    } else if (Config::kBulkAdds && warp == 2 && prim::elect_one()) {
      if constexpr (Config::kBulkAdds) {
        pipeline::FragmentAdder<Config, Walk>(storage, params, variant_params).run();
      }
    }
  } else if (role == kQueryGradients) {
    prim::shrink_registers<Config::kQueryGradRegisters>();
    pipeline::QueryGradients<Config, kSum, Walk>(storage, params, variant_params).run();
  } else {
    prim::grow_registers<Config::kAccumulatorRegisters>();
    if (role == kProbabilities) {
      pipeline::Probabilities<Config, kMask, kHooks, Walk>(storage, params, variant_params).run();
    } else {
      pipeline::ScoreGradients<Config, kHooks, Walk>(storage, params, variant_params).run();
    }
  }
}

template <class Config, MaskKind kMask, SumKind kSum>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_pipeline(const __grid_constant__ BackwardMaps maps,
                      const __grid_constant__ BackwardParams params) {
  pipeline_body<Config, kMask, kSum, attn::GradHooks{}>(maps, params, attn::VariantParams{});
}

}  // namespace pantile::hopper
