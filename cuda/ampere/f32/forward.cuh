// Attention forward on fp32 tensors, by TF32 tensor cores (tile/products_f32.cuh). One thread block
// computes O and LSE of `tile_q` rows of one head, each warp those of 16 or 32 of them.
//
//   1 locate     block -> (row tile, head, sequence)
//   2 fetch      Q once, K and V tile by tile from the last seen key down, in turn: V under S, the
//                next K under P V
//   3 for each key tile
//       S = Q K^T     scaled to base-2 logits, masked where some row does not see the whole tile
//       softmax       references that may be stale by 2^8, as in softmax.cuh; row sums
//       O += P V      P straight from the accumulators of S
//   4 store      O by way of the warp's own rows of Q's buffer, LSE from registers
//
//   buffer              written by              read by                    until
//   storage.q           cp.async, all threads   the warp that owns a row   its last S; then O
//   storage.stages[0].k cp.async, all threads   all warps                  barrier after their S
//   storage.stages[0].v cp.async, all threads   all warps                  barrier after their P V
//
// An infinity or a NaN in V goes straight into the outputs that attend to it, and a zero takes its
// place: beside hidden keys, whose P is 0, and as two TF32 parts it would turn into NaN.
#pragma once

#include <cstdint>

#include "ampere/f32/config.h"
#include "ampere/forward/keys.cuh"
#include "ampere/forward/params.cuh"
#include "ampere/storage.cuh"
#include "attn/max_logit.cuh"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "pantile/registry.h"
#include "prim/cp_async.cuh"
#include "prim/math.cuh"
#include "prim/special_registers.cuh"
#include "prim/warp.cuh"
#include "tile/products_f32.cuh"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

// Copies and buffers count columns of 16 bits, two for each float.
template <int kHeadDimOf, ForwardTileF32 kTile>
struct ForwardConfigF32 {
  static constexpr int kDepth = kHeadDimOf;  // floats
  static constexpr int kHeadDim = 2 * kHeadDimOf;
  static constexpr int kHeadDimV = 2 * kHeadDimOf;
  static constexpr int kTileQ = kTile.tile_q;
  static constexpr int kTileK = kTile.tile_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = 1;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kTileQ / kTile.warps;
  static constexpr int kRowTiles = kWarpRows / 16;
  using QCopy = tile::RowCopy<kTileQ, kHeadDim, kThreads>;
  using KCopy = tile::RowCopy<kTileK, kHeadDim, kThreads>;
  using VCopy = tile::RowCopy<kTileK, kHeadDimV, kThreads>;
  static_assert(kWarpRows % 16 == 0 && kTileK % 16 == 0);
};

template <class Config, Float32Precision kPrecision>
class ForwardBlockF32 {
  using Storage = ForwardStorage<Config>;
  using Keys = ForwardKeys<Config, MaskKind::any>;
  using Products = tile::ProductsF32<kPrecision>;
  using Rows = tile::SwizzledRows<Config::kHeadDim>;
  static constexpr int kTileK = Config::kTileK;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kKeyTiles = kTileK / 8;
  static constexpr int kValueTiles = Config::kDepth / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];

 public:
  // Before all else, so that the copy runs while the rest is worked out.
  PANTILE_DEVICE static void fetch_queries(const ForwardParams& params, Storage& storage,
                                           const ForwardWork& work) {
    const typename Config::QCopy copy(params.head_dim);
    const tile::HeadRows q = head_rows(params.q, work.sequence, work.head);
    copy.copy_ragged_if(true, prim::shared_address(storage.q), Config::QCopy::source(q, work.row0),
                        params.q_pass_bytes, work.sequence.length - work.row0);
  }

  PANTILE_DEVICE ForwardBlockF32(const ForwardParams& params, Storage& storage,
                                 const ForwardWork& work)
      : params_(params), storage_(storage), keys_(params, work) {
    if (threadIdx.x == 0) {
      storage.work = work;  // read behind the first barrier
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) {
        o_[m][j][0] = o_[m][j][1] = o_[m][j][2] = o_[m][j][3] = 0.0f;
      }
      row_sum_[m][0] = row_sum_[m][1] = 0.0f;
      minus_max_[m][0] = minus_max_[m][1] = kNothingSeen;
    }
    if (params.head_dim < Config::kHeadDim || params.head_dim_v < Config::kHeadDimV) {
      typename Config::QCopy(params.head_dim).clear_missing_columns(storage.q);
      typename Config::KCopy(params.head_dim).clear_missing_columns(stage().k);
      typename Config::VCopy(params.head_dim_v).clear_missing_columns(stage().v);
    }
  }

  PANTILE_DEVICE void run() {
    const core::TilePlan tiles = keys_.tiles();
    int n = tiles.visit.end - 1;
    keys_.template fetch_keys<true>(n, stage().k);
    prim::commit_copies();
    prim::wait_copies<0>();
    if (params_.zero_q) {
      Config::QCopy::template multiply<DType::f32>(storage_.q, 0.0f);
    }
    __syncthreads();
#pragma unroll 1
    for (; n >= tiles.visit.begin; --n) {
      keys_.template fetch_values<true>(n, stage().v);
      prim::commit_copies();
      Scores s;
      multiply_scores(s);
      if (n < tiles.full.begin || n >= tiles.full.end) {
        keys_.mask_scores(s, n);
      }
      prim::wait_copies<0>();
      publish_values(n);
      keys_.template fetch_keys<true>(n - 1, stage().k);
      prim::commit_copies();
      raise_references(s);
      exponentials(s);
      const int lane = prim::lane_index();
      Products::template add_rows<Rows>(
          o_, s, prim::shared_address(stage().v) + Products::template lane_offset_down<Rows>(lane));
      prim::wait_copies<0>();
      __syncthreads();
    }
  }

  // Every warp is past its last S, so each may overwrite its own rows of Q. Rows past the
  // sequence's length, as far as the tensor has them, are those of an empty row.
  PANTILE_DEVICE void store() {
    const ForwardWork work = storage_.work;
    const int thread = prim::fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread / 32 * Config::kWarpRows;
    const int first = work.row0 + warp_row;
    char* const rows = reinterpret_cast<char*>(storage_.q) + warp_row * Rows::kRowBytes;
    float* const lse = lse_rows(work);
    int largest = attn::kSmallestLogit;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = row_sum_[m][r];
        sum += __shfl_xor_sync(prim::kAllLanes, sum, 1);
        sum += __shfl_xor_sync(prim::kAllLanes, sum, 2);
        const float normaliser = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = m * 16 + r * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j) {
          const int chunk = 2 * j + lane % 4 / 2;
          *reinterpret_cast<float2*>(rows + Rows::offset(row, chunk) + lane % 2 * 8) =
              make_float2(o_[m][j][2 * r] * normaliser, o_[m][j][2 * r + 1] * normaliser);
        }
        if (first + row < work.sequence.length) {
          largest =
              max(largest, attn::row_logit_order(
                               (params_.references.p_offset - minus_max_[m][r]) * core::kLn2, sum));
        }
        if (lse != nullptr && lane % 4 == 0 && first + row < work.sequence.allocated) {
          const bool empty = sum == 0.0f || first + row >= work.sequence.length;
          lse[first + row] = empty ? -INFINITY : log_sum_exp(sum, minus_max_[m][r]);
        }
      }
    }
    if (params_.max_logit != nullptr) {
      attn::raise_max_logit(
          params_.max_logit + work.sequence.batch * std::int64_t{params_.heads_q} + work.head,
          largest);
    }
    __syncwarp();
    const tile::HeadRows o = head_rows(params_.o, work.sequence, work.head);
#pragma unroll 4
    for (int i = lane; i < Config::kWarpRows * Rows::kChunks; i += 32) {
      const int row = i / Rows::kChunks;
      const int chunk = i % Rows::kChunks;
      if (first + row < work.sequence.allocated && chunk * 8 < params_.head_dim_v) {
        uint4 value = *reinterpret_cast<const uint4*>(rows + Rows::offset(row, chunk));
        if (first + row >= work.sequence.length) {
          value = uint4{0, 0, 0, 0};
        }
        *reinterpret_cast<uint4*>(o.rows + (first + row) * o.stride + chunk * 8) = value;
      }
    }
  }

 private:
  PANTILE_DEVICE typename Storage::Stage& stage() const { return storage_.stages[0]; }

  PANTILE_DEVICE void multiply_scores(Scores& s) const {
    const int thread = prim::fresh_thread_index();
    const std::uint32_t q_lane = prim::shared_address(storage_.q) +
                                 thread / 32 * Config::kWarpRows * Rows::kRowBytes +
                                 Rows::lane_offset_rows_first(thread % 32);
    const std::uint32_t k_lane =
        prim::shared_address(stage().k) + Rows::lane_offset_columns_first(thread % 32);
    Products::template multiply_rows<Rows, Config::kDepth>(s, q_lane, k_lane);
    const float scale = params_.negate_q ? -params_.scale : params_.scale;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[m][j][c] *= scale;
        }
      }
    }
  }

  // The barrier behind the fetch of V tile n, and another one behind a look at what was fetched.
  PANTILE_DEVICE void publish_values(int n) {
    float* const v = reinterpret_cast<float*>(stage().v);
    constexpr int kFloats = kTileK * Config::kDepth;
    __syncthreads();
    bool found = false;
#pragma unroll
    for (int i = 0; i < kFloats / 4; i += Config::kThreads) {
      const float4 x = reinterpret_cast<const float4*>(v)[i + prim::fresh_thread_index()];
      found |= !((fabsf(x.x) + fabsf(x.y)) + (fabsf(x.z) + fabsf(x.w)) < INFINITY);
    }
    if (__syncthreads_or(found) == 0) {
      return;
    }
    attend_nonfinite(v, n);
    __syncthreads();
#pragma unroll 1
    for (int i = prim::fresh_thread_index(); i < kFloats; i += Config::kThreads) {
      v[i] = fabsf(v[i]) < INFINITY ? v[i] : 0.0f;
    }
    __syncthreads();
  }

  PANTILE_DEVICE void attend_nonfinite(const float* v, int n) {
    const int row = keys_.lane_row();
    const int lane = prim::lane_index();
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j) {
#pragma unroll 1
      for (int key = 0; key < kTileK; ++key) {
        const char* const chunk =
            reinterpret_cast<const char*>(v) + Rows::offset(key, 2 * j + lane % 4 / 2);
        const float2 pair = *reinterpret_cast<const float2*>(chunk + lane % 2 * 8);
        const float x = fabsf(pair.x) < INFINITY ? 0.0f : pair.x;
        const float y = fabsf(pair.y) < INFINITY ? 0.0f : pair.y;
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
          const core::Span seen = keys_.seen_keys(row + i * 8);
          if (n * kTileK + key >= seen.begin && n * kTileK + key < seen.end) {
            o_[i / 2][j][i % 2 * 2] += x;
            o_[i / 2][j][i % 2 * 2 + 1] += y;
          }
        }
      }
    }
  }

  // A reference is raised, and O shrinks, when some logit of its row exceeds it by too much. Each
  // row decides for itself, so that its bits do not depend on its neighbours.
  PANTILE_DEVICE void raise_references(const Scores& s) {
    float tile_max[kRowTiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[m][r] = -INFINITY;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          tile_max[m][r] = fmaxf(tile_max[m][r], fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
        }
        outgrown |= tile_max[m][r] + minus_max_[m][r] > params_.references.look_limit;
      }
    }
    if (!__any_sync(prim::kAllLanes, outgrown)) {
      return;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float row_max = tile_max[m][r];
        row_max = fmaxf(row_max, __shfl_xor_sync(prim::kAllLanes, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(prim::kAllLanes, row_max, 2));
        const float before = minus_max_[m][r];
        if (row_max + before > params_.references.raise_limit) {
          minus_max_[m][r] = params_.references.p_offset - row_max;
        }
        const float factor = prim::exp2_approx(minus_max_[m][r] - before);
        row_sum_[m][r] *= factor;
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j) {
          o_[m][j][2 * r] *= factor;
          o_[m][j][2 * r + 1] *= factor;
        }
      }
    }
  }

  // Logits to P, and P into the row sums.
  PANTILE_DEVICE void exponentials(Scores& s) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[m][j][2 * r + c];
            x = prim::exp2_approx(x + minus_max_[m][r]);
            sums[c] += x;
          }
        }
        row_sum_[m][r] += sums[0] + sums[1];
      }
    }
  }

  // Natural logarithm of sum * 2^-minus_max. The mantissa's logarithm is small, so that two
  // roundings count: log2(sum) - minus_max, times ln 2, would take three of twice their size.
  PANTILE_DEVICE static float log_sum_exp(float sum, float minus_max) {
    constexpr int kRootOfHalf = 0x3f3504f3;  // mantissas from there to twice that
    const int bits = __float_as_int(sum);
    const int exponent = (bits - kRootOfHalf) >> 23;
    const float mantissa = __int_as_float(bits - (exponent << 23));
    const float lse = fmaf(static_cast<float>(exponent), core::kLn2,
                           fmaf(-minus_max, core::kLn2, logf(mantissa)));
    return sum < INFINITY ? lse : sum;  // NaN stays
  }

  // LSE of the sequence's first row; null when it is not wanted.
  PANTILE_DEVICE float* lse_rows(const ForwardWork& work) const {
    if (params_.lse == nullptr) {
      return nullptr;
    }
    const std::int64_t heads_before =
        params_.lse_packed
            ? work.head
            : static_cast<std::int64_t>(work.sequence.batch) * params_.heads_q + work.head;
    return params_.lse + heads_before * params_.lse_head_stride + work.sequence.first;
  }

  const ForwardParams& params_;
  Storage& storage_;
  Keys keys_;
  float o_[kRowTiles][kValueTiles][4];
  float row_sum_[kRowTiles][2];    // of the columns that this lane holds
  float minus_max_[kRowTiles][2];  // minus the row's reference logit
};

template <class Config, Float32Precision kPrecision>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel_f32(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  using Block = ForwardBlockF32<Config, kPrecision>;
  const core::WorkTile tile = params.order.tile(static_cast<int>(blockIdx.x));
  const ForwardWork work{tile.head, tile.tile * Config::kTileQ,
                         sequence_rows(params.queries, tile.batch)};
  if (work.row0 >= work.sequence.allocated) {
    return;  // packed sequences are shorter than the grid allows for
  }
  ForwardStorage<Config>& storage = *reinterpret_cast<ForwardStorage<Config>*>(shared);
  Block::fetch_queries(params, storage, work);
  Block block(params, storage, work);
  block.run();
  block.store();
}

}  // namespace pantile::ampere
