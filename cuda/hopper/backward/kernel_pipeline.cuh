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
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/query_gradients.cuh"
#include "hopper/backward/storage.cuh"
#include "prim/matrix.cuh"
#include "prim/registers.cuh"
#include "prim/tma.cuh"
#include "prim/unpack.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

namespace pipeline {

// Stages 2 and 3.
template <class Config, MaskKind kMask>
class Probabilities {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE Probabilities(Storage& storage, const BackwardParams& params)
      : storage_(storage),
        params_(params),
        ones_(prim::ones_descriptor(prim::shared_address(storage.ones))),
        terms_(prim::terms_descriptor(prim::shared_address(storage.lse))),
        k_(prim::descriptor(prim::shared_address(&storage.k))),
        q_(prim::descriptor(prim::shared_address(storage.q))),
        grad_o_(prim::descriptor(prim::shared_address(storage.grad_o), Config::kTileQ * 128)) {}

  PANTILE_DEVICE void run() {
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      dV_.clear();
      run_tile(*key_tile);
      dV_.store(params_.grad_v, params_.grad_v_layout, params_.head_dim_v, 1.0f, params_,
                *key_tile);
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
    const int steps = params_.group * (end_tile_ - first_tile_);
    if (steps > 0) {
      prim::wait(storage_.key.full[0], keys_.parity);
      keys_.advance();
      issue_S();
      prim::wgmma_wait<0>();
      send_P();
      pack_fragment<Config::kDType>(packed_P_, S_);
      next();
#pragma unroll 1
      for (int i = 1; i < steps; ++i) {
        issue_S();   // of this step
        issue_dV();  // of the step before
        prim::wgmma_wait<1>();
        send_P();
        prim::wgmma_wait<0>();
        release(storage_.grad.empty[previous_.stage]);
        pack_fragment<Config::kDType>(packed_P_, S_);
        next();
      }
      release(storage_.key.empty[0]);
      issue_dV();
      dV_.finish();
      release(storage_.grad.empty[previous_.stage]);
    }
  }

  PANTILE_DEVICE void issue_S() {
    prim::wait(storage_.query.full[cursor_.stage], cursor_.parity);
    issue_square<Config, Config::kHeadDim>(
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
    release(storage_.query.empty[cursor_.stage]);
    if (tile_ < masked_before_ || (kMask == MaskKind::window && tile_ >= masked_from_)) {
      mask_scores<kMask>(S_, key_tile_->mask, key_tile_->tile * Config::kTileK,
                         tile_ * Config::kTileQ, params_.masked_score);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      S_[i] = prim::exp2_approx(S_[i] * params_.scale_log2);
    }
    prim::wait(storage_.p_empty, p_parity_);
    p_parity_ ^= 1;
    // The halves are swapped against packed_P_'s. For f16 ptxas would otherwise take the words made
    // here, while dV still reads packed_P_, as the next packed_P_ and serialise the loop (C7513).
    uint4* to = &storage_.P[0][threadIdx.x % kWarpgroup];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[j * kWarpgroup] = make_uint4(prim::pack<DType::f16>(S_[8 * j + 1], S_[8 * j]),
                                      prim::pack<DType::f16>(S_[8 * j + 3], S_[8 * j + 2]),
                                      prim::pack<DType::f16>(S_[8 * j + 5], S_[8 * j + 4]),
                                      prim::pack<DType::f16>(S_[8 * j + 7], S_[8 * j + 6]));
    }
    prim::arrive(storage_.p_full);
  }

  PANTILE_DEVICE void next() {
    if (++tile_ == end_tile_) {
      tile_ = first_tile_;
    }
    previous_ = cursor_;
    cursor_.advance();
  }

  Storage& storage_;
  const BackwardParams& params_;
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
};

// Stages 4 and 5.
template <class Config>
class ScoreGradients {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE ScoreGradients(Storage& storage, const BackwardParams& params)
      : storage_(storage),
        params_(params),
        ones_(prim::ones_descriptor(prim::shared_address(storage.ones))),
        terms_(prim::terms_descriptor(prim::shared_address(storage.delta))),
        v_(prim::descriptor(prim::shared_address(&storage.v))),
        grad_o_(prim::descriptor(prim::shared_address(storage.grad_o))),
        q_(prim::descriptor(prim::shared_address(storage.q), Config::kTileQ * 128)) {
    const int lane = prim::lane_index();
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    dS_store_ = prim::shared_address(storage.dS) + ((lane & 7) + (lane >> 4) * 8) * 128 +
                (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16);
  }

  PANTILE_DEVICE void run() {
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      dK_.clear();
      run_tile(params_.group * prim::uniform(key_tile->rows.size()));
      dK_.store(params_.grad_k, params_.grad_k_layout, params_.head_dim, params_.scale, params_,
                *key_tile);
      __syncwarp();
      work.done(prim::lane_index() == 0);
    }
  }

 private:
  PANTILE_DEVICE void run_tile(int steps) {
    if (steps > 0) {
      prim::wait(storage_.value.full[0], values_.parity);
      values_.advance();
      issue_dP();
      prim::wgmma_wait<0>();
      multiply_by_P();
      send_dS();
      next();
#pragma unroll 1
      for (int i = 1; i < steps; ++i) {
        issue_dP();  // of this step
        issue_dK();  // of the step before
        prim::wgmma_wait<1>();
        multiply_by_P();
        prim::wgmma_wait<0>();
        release(storage_.query.empty[previous_.stage]);
        send_dS();
        next();
      }
      release(storage_.value.empty[0]);
      issue_dK();
      dK_.finish();
      release(storage_.query.empty[previous_.stage]);
    }
  }

  PANTILE_DEVICE void issue_dP() {
    prim::wait(storage_.grad.full[cursor_.stage], cursor_.parity);
    issue_square<Config, Config::kHeadDimV>(
        dP_, ones_, terms_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.delta[0])), v_,
        grad_o_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.grad_o[0])));
  }

  PANTILE_DEVICE void issue_dK() {
    prim::wait(storage_.query.full[previous_.stage], previous_.parity);
    dK_.issue(dS_, q_ + prim::descriptor_step(previous_.stage * sizeof(storage_.q[0])));
  }

  PANTILE_DEVICE void multiply_by_P() {
    prim::pin(dP_);
    release(storage_.grad.empty[cursor_.stage]);
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
        dP_[8 * j + 2 * k] *= P.y;
        dP_[8 * j + 2 * k + 1] *= P.x;
      }
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

  PANTILE_DEVICE void next() {
    previous_ = cursor_;
    cursor_.advance();
  }

  Storage& storage_;
  const BackwardParams& params_;
  const std::uint32_t ones_, terms_, v_, grad_o_, q_;
  std::uint32_t dS_store_;
  StageCursor<Config::kStages> cursor_, previous_;
  StageCursor<Config::kScoreGradStages> dS_cursor_;
  StageCursor<1> values_;
  std::uint32_t p_parity_ = 0;
  float dP_[32];
  std::uint32_t dS_[4][4];
  Accumulator<Config, Config::kHeadDim> dK_;
};

}  // namespace pipeline

template <class Config, MaskKind kMask, SumKind kSum>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_pipeline(const __grid_constant__ BackwardMaps maps,
                      const __grid_constant__ BackwardParams params) {
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
      Loader<Config, Storage>(storage, maps, params).run();
    } else if (warp == 1 && prim::elect_one()) {
      schedule<Config, kMask, kSum>(storage.work, params);
    } else if (Config::kBulkAdds && warp == 2 && prim::elect_one()) {
      if constexpr (Config::kBulkAdds) {
        pipeline::FragmentAdder<Config>(storage, params).run();
      }
    }
  } else if (role == kQueryGradients) {
    prim::shrink_registers<Config::kQueryGradRegisters>();
    pipeline::QueryGradients<Config, kSum>(storage, params).run();
  } else {
    prim::grow_registers<Config::kAccumulatorRegisters>();
    if (role == kProbabilities) {
      pipeline::Probabilities<Config, kMask>(storage, params).run();
    } else {
      pipeline::ScoreGradients<Config>(storage, params).run();
    }
  }
}

}  // namespace pantile::hopper
