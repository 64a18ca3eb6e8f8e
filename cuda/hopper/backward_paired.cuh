// Backward for head dims up to 128. A block owns 128 keys of one key head and walks over all tiles
// of rows that see them, of all query heads that share the head:
//
//   1 producer    Q, dO tiles and their row terms            -> q, grad_o, lse, delta
//   2 consumers   S^T  = K Q^T - lse / scale                    (registers)
//   3             P^T  = exp2(S^T * scale * log2 e), masked     (registers)
//   4             dV  += P^T dO                                 (registers, P^T from registers)
//   5             dP^T = V dO^T - delta                         (registers)
//   6             dS^T = P^T * dP^T                          -> dS, both warpgroups
//   7             dQ   = dS K, half of it each               -> dQ
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

#include "hopper/backward_fragment.cuh"
#include "hopper/backward_producer.cuh"
#include "hopper/backward_storage.cuh"
#include "prim/matrix.cuh"
#include "prim/named_barrier.cuh"
#include "prim/registers.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

enum PairedBarrier : int {
  kScoreGradsWritten = 1,    // both consumer warpgroups
  kOwnScoreGradsWritten = 2  // one consumer warpgroup; the other has the next number
};

template <class Config, MaskKind kMask, SumKind kSum>
class PairedConsumer {
 public:
  PANTILE_DEVICE PairedConsumer(PairedStorage<Config>& storage, const BackwardParams& params,
                                const KeyTile& key_tile, int warpgroup)
      : storage_(storage),
        params_(params),
        key_tile_(key_tile),
        warpgroup_(warpgroup),
        lane_(prim::lane_index()),
        warp_(static_cast<int>(threadIdx.x & 127) / 32),
        k_(prim::descriptor(prim::shared_address(&storage.k) + warpgroup * 64 * 128)),
        v_(prim::descriptor(prim::shared_address(&storage.v) + warpgroup * 64 * 128)),
        k_columns_(prim::descriptor(prim::shared_address(&storage.k) +
                                    (kRowSplit ? 0 : warpgroup * storage.k.kPanelBytes))),
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
        tile_(key_tile.rows.begin) {
    if constexpr (kRowSplit) {
      ones_ = prim::ones_descriptor(prim::shared_address(storage.ones));
    } else {
      ones_ = prim::ones_fragment_word(lane_);
    }
  }

  PANTILE_DEVICE void run() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dK_[i] = dV_[i] = 0.0f;
    }
    const int steps = params_.group * key_tile_.rows.size();
    if (steps > 0) {
      if constexpr (kRowSplit) {
        run_query_grads_late(steps);
      } else {
        run_values_early(steps);
      }
    }
    store();
  }

 private:
  static constexpr DType kDType = Config::kDType;
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kCount = Config::kHeadDim / 2;  // accumulators of dK, dV a thread
  static constexpr int kScores = kTileQ / 2;           // of S, dP
  static constexpr int kSlices = kTileQ / 16;          // k steps of products over rows
  static constexpr int kRowPanel = kTileQ * 128;       // bytes of a panel of q, grad_o, dS
  static constexpr bool kRowSplit = kTileQ == 128;     // dQ is split by rows, else by columns
  static constexpr int kConsumerThreads = Config::kConsumers * kWarpgroup;

  // Whether this thread's score i is exponentiated beside the special-function unit.
  PANTILE_DEVICE static constexpr bool by_polynomial(int i) {
    if constexpr (Config::kPolynomialEvery > 0) {
      return i % Config::kPolynomialEvery == Config::kPolynomialEvery - 1;
    }
    return false;
  }

  // ---- products -------------------------------------------------------------------------------

  // A x B^T over the head dim, both k-major; `terms` are added.
  PANTILE_DEVICE void issue_scores(float (&to)[kScores], std::uint32_t a, std::uint32_t b,
                                   std::uint32_t terms) {
    prim::wgmma_fence();
    if constexpr (kRowSplit) {
      prim::wgmma_terms_ss(to, ones_, terms);
    } else {
      prim::wgmma_terms_rs(to, ones_, 0u, terms);
    }
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 16; ++k) {
      prim::wgmma_ss<kDType, prim::Major::k, prim::Major::k>(
          to, a + prim::descriptor_step(k / 4 * Config::kTileK * 128 + k % 4 * 32),
          b + prim::descriptor_step(k / 4 * kRowPanel + k % 4 * 32));
    }
    prim::wgmma_commit();
  }

  PANTILE_DEVICE void issue_S() {
    prim::wait(storage_.query.full[next_query_.stage], next_query_.parity);
    const int stage = next_query_.stage;
    issue_scores(S_, k_, q_ + prim::descriptor_step(stage * sizeof(storage_.q[0])),
                 lse_ + prim::descriptor_step(stage * sizeof(storage_.lse[0])));
    query_ = stage;
    next_query_.advance();
  }

  PANTILE_DEVICE void issue_dP() {
    prim::wait(storage_.grad.full[next_grad_.stage], next_grad_.parity);
    const int stage = next_grad_.stage;
    issue_scores(dP_, v_, grad_o_ + prim::descriptor_step(stage * sizeof(storage_.grad_o[0])),
                 delta_ + prim::descriptor_step(stage * sizeof(storage_.delta[0])));
    grad_ = stage;
    next_grad_.advance();
  }

  PANTILE_DEVICE void issue_dV() {
    const std::uint32_t b = grad_o_ + prim::descriptor_step(grad_ * sizeof(storage_.grad_o[0]));
    prim::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      prim::wgmma_rs<kDType, prim::Major::mn>(dV_, P_[k], b + prim::descriptor_step(k * 2048));
    }
    prim::wgmma_commit();
  }

  PANTILE_DEVICE void issue_dQ(float (&dQ)[32], int buffer) {
    const std::uint32_t a = dS_rows_ + prim::descriptor_step(buffer * sizeof(storage_.dS[0]));
    prim::wgmma_fence();
    prim::wgmma_ss_write<kDType, prim::Major::k, prim::Major::mn>(dQ, a, k_columns_);
#pragma unroll
    for (int k = 1; k < Config::kTileK / 16; ++k) {
      prim::wgmma_ss<kDType, prim::Major::k, prim::Major::mn>(
          dQ, a + prim::descriptor_step(k / 4 * kRowPanel + k % 4 * 32),
          k_columns_ + prim::descriptor_step(k * 2048));
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

  // ---- element-wise ---------------------------------------------------------------------------

  PANTILE_DEVICE void compute_P() {
    if (tile_ < key_tile_.masked_before ||
        (kMask == MaskKind::window && tile_ >= key_tile_.masked_from)) {
      mask_scores<kMask>(S_, key_tile_.part.mask, key_tile_.tile * Config::kTileK + warpgroup_ * 64,
                         tile_ * kTileQ, params_.masked_score);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float x = S_[i] * params_.scale_log2;
      S_[i] = by_polynomial(i) ? prim::exp2_polynomial(x) : prim::exp2_approx(x);
    }
  }

  PANTILE_DEVICE void pack_P() { pack_fragment<kDType>(P_, S_); }

  // dS replaces dP and goes to shared memory as [query][key]. kPackP interleaves the packing of P,
  // whose registers S then leaves free.
  template <bool kPackP>
  PANTILE_DEVICE void compute_dS() {
    const std::uint32_t to = dS_store_ + buffer_ * static_cast<int>(sizeof(storage_.dS[0]));
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      std::uint32_t dS[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = 8 * k + 2 * r;
        dS[r] = prim::pack<kDType>(dP_[at] * S_[at], dP_[at + 1] * S_[at + 1]);
      }
      prim::store_matrix_x4_transposed(to + k * 2048, dS[0], dS[1], dS[2], dS[3]);
      if constexpr (kPackP) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          P_[k][r] = prim::pack<kDType>(S_[8 * k + 2 * r], S_[8 * k + 2 * r + 1]);
        }
      }
    }
    prim::fence_async_proxy();
  }

  PANTILE_DEVICE void wait_dQ_buffer() {
    prim::wait(storage_.dq_empty[warpgroup_], dq_parity_);
    dq_parity_ ^= 1;
  }

  // Hands the dQ fragment to the reducer, in register order: 16-byte stores without conflicts.
  PANTILE_DEVICE void send_dQ(float (&dQ)[32], int query_stage) {
    if constexpr (kSum == SumKind::integer) {
      const RowTerms<kTileQ>& terms = storage_.lse[query_stage];
      const int row = (kRowSplit ? warpgroup_ * 64 : 0) + warp_ * 16 + lane_ / 4;
      const float row_scale[2] = {__uint_as_float(terms.row[row].z),
                                  __uint_as_float(terms.row[row + 8].z)};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        dQ[i] = __int_as_float(__float2int_rn(dQ[i] * row_scale[i / 2 % 2]));
      }
    }
    float4* to = reinterpret_cast<float4*>(storage_.dQ[warpgroup_]) + (threadIdx.x & 127);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[j * kWarpgroup] = make_float4(dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2], dQ[4 * j + 3]);
    }
    prim::fence_async_proxy();
    arrive_warp(storage_.dq_full[warpgroup_]);
  }

  PANTILE_DEVICE void arrive_warp(prim::Mbarrier& barrier) {
    __syncwarp();
    release(barrier);
  }

  PANTILE_DEVICE void release(prim::Mbarrier& barrier) {
    if (lane_ == 0) {
      prim::arrive(barrier);
    }
  }

  PANTILE_DEVICE void next_tile() {
    if (++tile_ == key_tile_.rows.end) {
      tile_ = key_tile_.rows.begin;
    }
  }

  PANTILE_DEVICE void sync_consumers() { prim::barrier_sync(kScoreGradsWritten, kConsumerThreads); }

  // ---- schedules ------------------------------------------------------------------------------

  // Head dims 96 and 128. Products in order: S(i+1) dQ(i) dK(i) dP(i+1) dV(i+1); the exponentials
  // run under dK and dP, the next dS under dV. Only dV crosses the loop's back edge: an accumulator
  // that the loop also reads would make ptxas serialise (C7514).
  PANTILE_DEVICE void run_values_early(int steps) {
    prim::wait(storage_.k_full, 0);
    issue_S();
    prim::wait(storage_.v_full, 0);
    issue_dP();
    prim::wgmma_wait<1>();
    prim::pin(S_);
    compute_P();
    pack_P();
    issue_dV();
    prim::wgmma_wait<1>();
    prim::pin(dP_);
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      const int query = query_;
      compute_dS<false>();
      issue_S();
      sync_consumers();
      prim::wgmma_wait<1>();  // dV done
      release(storage_.grad.empty[grad_]);
      float dQ[32];
      issue_dQ(dQ, buffer_);
      issue_dK(query);
      wait_dQ_buffer();
      prim::wgmma_wait<1>();  // S, dQ done
      prim::pin(dQ);
      prim::pin(S_);
      send_dQ(dQ, query);
      issue_dP();
      next_tile();
      compute_P();
      pack_P();
      issue_dV();
      prim::wgmma_wait<1>();  // dK, dP done
      prim::pin(dP_);
      release(storage_.query.empty[query]);
    }
    compute_dS<false>();
    sync_consumers();
    finish();
  }

  // Head dim 64. Products in order: dV(i) dQ(i-1) S(i+1) dP(i+1) dK(i); dK(i) covers dS(i+1),
  // S(i+1) covers the handing over of dQ. dQ lags by a step, so that the warpgroups, which need
  // each other's dS for it, may drift apart by a step instead of meeting in each.
  PANTILE_DEVICE void run_query_grads_late(int steps) {
    prim::wait(storage_.k_full, 0);
    issue_S();
    prim::wait(storage_.v_full, 0);
    issue_dP();
    prim::wgmma_wait<1>();
    prim::pin(S_);
    compute_P();
    prim::wgmma_wait<0>();
    prim::pin(dP_);
    int behind = 0;  // stage of Q of the tile before the one at work
    if (steps > 1) {
      late_step<true>(behind, steps > 2);
#pragma unroll 1
      for (int i = 2; i < steps; ++i) {
        late_step<false>(behind, i + 1 < steps);
      }
    }
    send_dS();
    issue_dV();
    sync_warpgroup();
    if (steps > 1) {
      float dQ[32];
      prim::wait(storage_.dS_ring.full[dS_read_.stage], dS_read_.parity);
      issue_dQ(dQ, dS_read_.stage);
      wait_dQ_buffer();
      prim::wgmma_wait<0>();
      prim::pin(dQ);
      dS_read_.advance();
      send_dQ(dQ, behind);
    }
    prim::wait(storage_.dS_ring.full[dS_read_.stage], dS_read_.parity);
    finish();
  }

  template <bool kFirst>
  PANTILE_DEVICE void late_step(int& behind, bool more) {
    const int query = query_;
    send_dS();
    issue_dV();
    sync_warpgroup();
    float dQ[32];
    if constexpr (!kFirst) {
      prim::wait(storage_.dS_ring.full[dS_read_.stage], dS_read_.parity);
      issue_dQ(dQ, dS_read_.stage);
    }
    issue_S();
    if constexpr (!kFirst) {
      wait_dQ_buffer();
    }
    prim::wgmma_wait<1>();  // the dK and dQ before, dV done
    release(storage_.grad.empty[grad_]);
    if constexpr (!kFirst) {
      prim::pin(dQ);
      release(storage_.dS_ring.empty[dS_read_.stage]);
      dS_read_.advance();
      send_dQ(dQ, behind);
      release(storage_.query.empty[behind]);
    }
    behind = query;
    issue_dP();
    if constexpr (kFirst) {
      prim::wgmma_fence();  // dK's zeros
    }
    issue_dK(query);
    next_tile();
    prim::wgmma_wait<2>();  // S done
    prim::pin(S_);
    compute_P();
    if (more) {
      // Needed next anyway; here it keeps ptxas from hoisting the wait above the exponentials.
      prim::wait(storage_.query.full[next_query_.stage], next_query_.parity);
    }
    prim::wgmma_wait<1>();  // dP done
    prim::pin(dP_);
  }

  PANTILE_DEVICE void send_dS() {
    prim::wait(storage_.dS_ring.empty[dS_write_.stage], dS_write_.parity ^ 1);
    compute_dS<true>();
    arrive_warp(storage_.dS_ring.full[dS_write_.stage]);
    dS_write_.advance();
  }

  // dK reads what all four warps of the warpgroup have written.
  PANTILE_DEVICE void sync_warpgroup() {
    prim::barrier_sync(kOwnScoreGradsWritten + warpgroup_, kWarpgroup);
  }

  // The last step's dQ and dK.
  PANTILE_DEVICE void finish() {
    float dQ[32];
    issue_dQ(dQ, buffer_);
    issue_dK(query_);
    wait_dQ_buffer();
    prim::wgmma_wait<1>();
    prim::pin(dQ);
    send_dQ(dQ, query_);
    prim::wgmma_wait<0>();
    prim::pin(dK_);
    prim::pin(dV_);
  }

  PANTILE_DEVICE void store() {
    const bool packed = params_.keys.cu_seqlens != nullptr;
    const int key = key_tile_.tile * Config::kTileK + warpgroup_ * 64;
    const int first_key = key_tile_.part.first_key;
    const int keys = key_tile_.part.mask.keys;
    store_fragment<kDType>(
        gradient_rows(params_.grad_v, params_.grad_v_layout, key_tile_, packed, first_key),
        params_.grad_v_layout.seq, dV_, 1.0f, key, keys, params_.head_dim_v);
    store_fragment<kDType>(
        gradient_rows(params_.grad_k, params_.grad_k_layout, key_tile_, packed, first_key),
        params_.grad_k_layout.seq, dK_, params_.scale, key, keys, params_.head_dim);
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    zero_unattended_keys<Config::kTileK, kConsumerThreads>(
        params_.grad_v, params_.grad_v_layout, params_.head_dim_v, key_tile_, packed, thread);
    zero_unattended_keys<Config::kTileK, kConsumerThreads>(
        params_.grad_k, params_.grad_k_layout, params_.head_dim, key_tile_, packed, thread);
  }

  PairedStorage<Config>& storage_;
  const BackwardParams& params_;
  const KeyTile& key_tile_;
  const int warpgroup_;
  const int lane_, warp_;
  // Descriptors: keys of this warpgroup, their head dim columns as operand of dQ, ...
  const std::uint32_t k_, v_, k_columns_, q_, grad_o_, dS_rows_, dS_keys_;
  const std::uint32_t dS_store_;
  const std::uint32_t lse_, delta_;
  std::uint32_t ones_;
  int tile_;                  // of rows
  int query_ = 0, grad_ = 0;  // stages of the tile at work
  StageCursor<Config::kQueryStages> next_query_;
  StageCursor<Config::kGradStages> next_grad_;
  std::uint32_t dq_parity_ = 1;
  int buffer_ = 0;                     // of dS, of the tile at work
  StageCursor<2> dS_write_, dS_read_;  // head dim 64 only
  float S_[kScores], dP_[kScores];
  float dK_[kCount], dV_[kCount];
  std::uint32_t P_[kSlices][4];
};

template <class Config, MaskKind kMask, SumKind kSum>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_paired(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardParams params) {
  enum Role : int { kCopies, kConsumersFrom };
  extern __shared__ std::uint8_t dynamic_smem[];
  using Storage = PairedStorage<Config>;
  Storage& storage = aligned_storage<Storage>(dynamic_smem);
  const int warp = __shfl_sync(prim::kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int role = warp / 4;
  if (threadIdx.x < prim::kOnesTileBytes / 4) {
    storage.ones[threadIdx.x] = prim::ones_tile_word(static_cast<int>(threadIdx.x));
    prim::fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    prim::init(storage.k_full, 1);
    prim::init(storage.v_full, 1);
    storage.query.init(kConsumerWarps);
    storage.grad.init(kConsumerWarps);
    storage.dS_ring.init(kConsumerWarps, kConsumerWarps);
    for (int i = 0; i < Config::kConsumers; ++i) {
      prim::init(storage.dq_full[i], 4);
      prim::init(storage.dq_empty[i], 1);
    }
    prim::fence_mbarrier_init();
  }
  __syncthreads();
  const KeyTile key_tile = locate_key_tile<Config, kMask>(params, static_cast<int>(blockIdx.x));
  if (role == kCopies) {
    prim::shrink_registers<Config::kProducerRegisters>();
    if (warp == 0 && prim::elect_one()) {
      load_tiles<Config>(storage, maps, params, key_tile);
    } else if (warp >= 1 && warp <= Config::kConsumers && prim::elect_one()) {
      add_query_gradients<Config, kSum>(storage, params, key_tile, warp - 1);
    }
  } else {
    prim::grow_registers<Config::kConsumerRegisters>();
    PairedConsumer<Config, kMask, kSum>(storage, params, key_tile, role - kConsumersFrom).run();
  }
}

}  // namespace pantile::hopper
