// Backward for head dims up to 128. One block a multiprocessor works on tiles of 128 keys of a key
// head, one after the other, claimed from a counter; for each it walks over all tiles of rows that
// see them, of all query heads that share the head:
//
//   1 producer    Q, dO tiles and their row terms            -> q, grad_o, lse, delta
//   2 consumers   S^T  = K Q^T - lse / scale                    (registers)
//   3             P^T  = exp2(S^T * scale * log2 e), masked     (registers)
//   4             dV  += P^T dO                                 (registers, P^T from registers)
//   5             dP^T = V dO^T - delta                         (registers)
//   6             dS^T = P^T * dP^T                          -> dS, both warpgroups
//   7             dQ   = dS K, half of it each, and sums of dS -> dQ
//   8             dK  += dS^T Q, dS^T from shared memory        (registers)
//   9 reducers    dQ fragments are added into global memory
//   10 consumers  dK * scale, dV                             -> global memory
//
// Owners: the producer fills q, grad_o and frees nothing; each consumer warpgroup has 64 keys, half
// of dS (one panel) and one dQ fragment: 64 columns, or at head dim 64 with 128 rows a step, 64
// rows. The terms of steps 2 and 5 come in through the tensor cores (prim/wgmma_row_terms.cuh), so
// the loop has neither shared loads nor subtractions. dK reads dS^T back from shared memory because
// keeping it as a register operand makes ptxas serialise the products (advisory C7512).
#pragma once

#include "hopper/backward/clean_keys.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/paired_steps.cuh"
#include "hopper/backward/storage.cuh"
#include "prim/named_barrier.cuh"
#include "prim/registers.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

enum PairedBarrier : int {
  kScoreGradsWritten = 1,    // both consumer warpgroups
  kOwnScoreGradsWritten = 2  // one consumer warpgroup; the other has the next number
};

template <class Config, MaskKind kMask, SumKind kSum, attn::GradHooks kHooks, class Walk>
class PairedConsumer {
 public:
  PANTILE_DEVICE PairedConsumer(PairedStorage<Config>& storage, const BackwardParams& params,
                                const attn::VariantParams& variant_params, int warpgroup)
      : on_(storage, params, variant_params, warpgroup), dS_ring_(storage.dS_ring) {}

  PANTILE_DEVICE void run() {
    WorkReader work(on_.storage().work);
    while (const KeyTile* key_tile = work.next()) {
      const int steps = on_.begin(*key_tile);
      hides_keys_ = Walk::kListed && key_tile->masked_before != 0;
      if (steps > 0) {
        if constexpr (Steps::kRowSplit) {
          run_query_grads_late<true>(steps);  // always careful: two loops would spill
        } else if (prim::uniform(work.is_careful()) != 0) {
          run_values_early<true>(steps);
        } else {
          run_values_early<false>(steps);
        }
      }
      on_.store(*key_tile);
      __syncwarp();
      work.done(on_.first_lane());
    }
  }

 private:
  using Steps = PairedSteps<Config, kMask, kSum, kHooks, Walk>;
  enum class Step { first, later };

  // Head dims 96 and 128. Products in order: S(i+1) dQ(i) dK(i) dP(i+1) dV(i+1); the exponentials
  // run under dK and dP, the next dS under dV. Only dV crosses the loop's back edge: an accumulator
  // that the loop also reads would make ptxas serialise (C7514).
  template <bool kCareful>
  PANTILE_DEVICE void run_values_early(int steps) {
    on_.wait_keys();
    clean(on_.storage().k);
    on_.issue_S();
    on_.wait_values();
    clean(on_.storage().v);
    on_.issue_dP();
    on_.fetch();
    on_.template take_S<1>();
    on_.compute_P();
    on_.pack_P();
    on_.issue_dV();
    on_.template take_dP<1>();
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      const int query = on_.query_stage();
      on_.compute_dS();
      on_.issue_S();
      sync_consumers();
      prim::wgmma_wait<1>();  // dV done
      on_.release_grad();
      QueryGradient<kCareful> dQ;
      on_.template issue_dQ<kCareful>(dQ, on_.buffer());
      on_.issue_dK(query);
      if constexpr (Steps::kVariant) {
        on_.next_tile();
        on_.fetch();
      }
      on_.wait_dQ_buffer();
      on_.read_row_scale(query);
      on_.template take_S<1>();  // dQ done, too
      prim::pin(dQ);
      on_.template send_dQ<kCareful>(dQ, query);
      on_.issue_dP();
      if constexpr (!Steps::kVariant) {
        on_.next_tile();
      }
      on_.compute_P();
      on_.pack_P();
      on_.issue_dV();
      on_.template take_dP<1>();  // dK done, too
      on_.release_query(query);
    }
    on_.release_values();
    on_.compute_dS();
    sync_consumers();
    finish<kCareful>();
  }

  // Head dim 64. Products in order: dV(i) dQ(i-1) S(i+1) dP(i+1) dK(i); dK(i) covers dS(i+1),
  // S(i+1) covers the handing over of dQ. dQ lags by a step, so that the warpgroups, which need
  // each other's dS for it, may drift apart by a step instead of meeting in each.
  template <bool kCareful>
  PANTILE_DEVICE void run_query_grads_late(int steps) {
    on_.wait_keys();
    on_.issue_S();
    on_.wait_values();
    on_.issue_dP();
    on_.fetch();
    on_.template take_S<1>();
    on_.compute_P();
    on_.template take_dP<0>();
    int behind = 0;  // stage of Q of the tile before the one at work
    if (steps > 1) {
      late_step<kCareful, Step::first>(behind);
#pragma unroll 1
      for (int i = 2; i < steps; ++i) {
        late_step<kCareful, Step::later>(behind);
      }
    }
    on_.release_values();
    send_dS();
    on_.issue_dV();
    sync_warpgroup();
    if (steps > 1) {
      QueryGradient<kCareful> dQ;
      issue_late_dQ<kCareful>(dQ);
      on_.wait_dQ_buffer();
      on_.read_row_scale(behind);
      prim::wgmma_wait<0>();
      prim::pin(dQ);
      release_late_dS();
      on_.template send_dQ<kCareful>(dQ, behind);
      on_.release_query(behind);
    }
    prim::wait(dS_ring_.full[dS_read_.stage], dS_read_.parity);
    finish<kCareful>();
    release_late_dS();
  }

  template <bool kCareful, Step kStep>
  PANTILE_DEVICE void late_step(int& behind) {
    const int query = on_.query_stage();
    send_dS();
    on_.issue_dV();
    sync_warpgroup();
    QueryGradient<kCareful> dQ;
    if constexpr (kStep == Step::later) {
      issue_late_dQ<kCareful>(dQ);
    }
    on_.issue_S();
    if constexpr (kStep == Step::later) {
      on_.wait_dQ_buffer();
      on_.read_row_scale(behind);
    }
    prim::wgmma_wait<1>();  // the dK and dQ before, dV done
    on_.release_grad();
    if constexpr (kStep == Step::later) {
      prim::pin(dQ);
      release_late_dS();
      on_.template send_dQ<kCareful>(dQ, behind);
      on_.release_query(behind);
    }
    behind = query;
    on_.issue_dP();
    if constexpr (kStep == Step::first) {
      prim::wgmma_fence();  // dK's zeros
    }
    on_.issue_dK(query);
    on_.next_tile();
    on_.fetch();
    on_.template take_S<2>();
    on_.compute_P();
    on_.pin_exponentials();
    on_.template take_dP<1>();
  }

  PANTILE_DEVICE void send_dS() {
    prim::wait(dS_ring_.empty[dS_write_.stage], dS_write_.parity ^ 1);
    on_.compute_dS();
    on_.arrive_warp(dS_ring_.full[dS_write_.stage]);
    dS_write_.advance();
  }

  template <bool kCareful>
  PANTILE_DEVICE void issue_late_dQ(QueryGradient<kCareful>& dQ) {
    prim::wait(dS_ring_.full[dS_read_.stage], dS_read_.parity);
    on_.template issue_dQ<kCareful>(dQ, dS_read_.stage);
  }

  PANTILE_DEVICE void release_late_dS() {
    on_.release(dS_ring_.empty[dS_read_.stage]);
    dS_read_.advance();
  }

  // The warpgroup's keys. The other one reads them after it has met with this one.
  template <class Tile>
  PANTILE_DEVICE void clean(Tile& tile) {
    if constexpr (Walk::kListed) {
      if (hides_keys_) {
        zero_nonfinite_rows<Config::kDType, 64>(tile, on_.warpgroup() * 64);
        sync_warpgroup();
      }
    }
  }

  PANTILE_DEVICE void sync_consumers() {
    prim::barrier_sync(kScoreGradsWritten, Config::kConsumers * kWarpgroup);
  }

  // dK reads what all four warps of the warpgroup have written.
  PANTILE_DEVICE void sync_warpgroup() {
    prim::barrier_sync(kOwnScoreGradsWritten + on_.warpgroup(), kWarpgroup);
  }

  // The last step's dQ and dK.
  template <bool kCareful>
  PANTILE_DEVICE void finish() {
    QueryGradient<kCareful> dQ;
    on_.template issue_dQ<kCareful>(dQ, on_.buffer());
    on_.issue_dK(on_.query_stage());
    on_.wait_dQ_buffer();
    on_.read_row_scale(on_.query_stage());
    prim::wgmma_wait<1>();
    prim::pin(dQ);
    on_.release_keys();
    on_.release_grad();
    on_.template send_dQ<kCareful>(dQ, on_.query_stage());
    on_.finish();
    on_.release_query(on_.query_stage());
  }

  Steps on_;
  Ring<2>& dS_ring_;  // head dim 64 only, as are the two cursors
  StageCursor<2> dS_write_, dS_read_;
  bool hides_keys_ = false;  // lists only
};

// The kernel, whose parameters are the launch's. Walk: see walk.cuh.
template <class Config, MaskKind kMask, SumKind kSum, attn::GradHooks kHooks, class Walk = SpanRows>
PANTILE_DEVICE void paired_body(const BackwardMaps& maps, const BackwardParams& params,
                                const attn::VariantParams& variant_params) {
  enum Role : int { kCopies, kConsumersFrom };
  extern __shared__ std::uint8_t dynamic_smem[];
  using Storage = PairedStorage<Config>;
  Storage& storage = aligned_storage<Storage>(dynamic_smem);
  if (kSum == SumKind::integer && !has_work(params)) {
    return;
  }
  const int warp = __shfl_sync(prim::kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int role = warp / 4;
  if (threadIdx.x < prim::kOnesTileBytes / 4) {
    storage.ones[threadIdx.x] = prim::ones_tile_word(static_cast<int>(threadIdx.x));
    prim::fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    storage.key.init(kConsumerWarps);
    storage.value.init(kConsumerWarps);
    storage.work.init(kConsumerWarps + Config::kConsumers + 1);  // and adders, loader
    storage.query.init(kConsumerWarps);
    storage.grad.init(kConsumerWarps);
    storage.dS_ring.init(kConsumerWarps, kConsumerWarps);
    for (int i = 0; i < Config::kConsumers; ++i) {
      prim::init(storage.dq_full[i], 4);
      prim::init(storage.dq_empty[i], 1);
    }
    prim::fence_mbarrier_init();
  }
  storage.key_ones.init();
  clear_missing_panels<Config>(storage, params);
  __syncthreads();
  if (role == kCopies) {
    prim::shrink_registers<Config::kProducerRegisters>();
    if (prim::elect_one()) {
      if (warp == 0) {
        Loader<Config, Storage, Walk>(storage, maps, params, variant_params).run();
      } else if (warp <= Config::kConsumers) {
        QueryGradientAdder<Config, kSum, Storage, Walk>(storage, params, variant_params, warp - 1)
            .run();
      } else {
        schedule<Config, kMask, kSum, Walk>(storage.work, params, variant_params);
      }
    }
  } else {
    prim::grow_registers<Config::kConsumerRegisters>();
    PairedConsumer<Config, kMask, kSum, kHooks, Walk>(storage, params, variant_params,
                                                      role - kConsumersFrom)
        .run();
  }
}

template <class Config, MaskKind kMask, SumKind kSum>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_paired(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardParams params) {
  paired_body<Config, kMask, kSum, attn::GradHooks{}>(maps, params, attn::VariantParams{});
}

}  // namespace pantile::hopper
