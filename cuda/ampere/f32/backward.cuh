// Attention backward on fp32 tensors, by TF32 tensor cores (tile/products_f32.cuh). dQ and dK, dV
// come from two launches of one kernel, whose blocks own rows of one side and walk over the rows of
// the other side that see them. Scores are computed twice, but no sum leaves its block: no atomic
// additions, always the same bits, and no workspace but two numbers a row.
//
//                 own rows x, y     other rows x, y    weights s            gradients
//   queries       Q, dO             K, V               dS = P * (dP - delta)  dQ += dS K
//   keys, values  K, V              Q, dO              P^T, dS^T              dK += dS^T Q
//                                                                             dV += P^T dO
//   1 locate   block -> (tile, head, sequence), the tiles of the other side
//   2 fetch    own x and y once, those of the other side step by step
//   3 step     S = own x (other x)^T, dP = own y (other y)^T, weights in registers, in whose order
//              they are operands of the gradients' products
//   4 store    by way of the warp's own rows of the buffers of x and y
//
//   buffer                       written by              read by                   until
//   storage.own_x, own_y         cp.async, all threads   the warp that owns a row  the end,
//   gradients storage.stages[].x, .y       cp.async, all threads   all warps                 the
//   next barrier
#pragma once

#include <cstdint>

#include "ampere/f32/backward_params.cuh"
#include "common/attended.h"
#include "core/geometry.h"
#include "pantile/dtype.h"
#include "prim/cp_async.cuh"
#include "prim/math.cuh"
#include "prim/special_registers.cuh"
#include "prim/warp.cuh"
#include "tile/accumulators_sm80.cuh"
#include "tile/products_f32.cuh"

namespace pantile::ampere {

template <class Config, Float32Precision kPrecision, GradientsF32 kGradients>
class BackwardBlockF32 {
  using Storage = BackwardStorageF32<Config>;
  using Stage = typename Storage::Stage;
  using Products = tile::ProductsF32<kPrecision>;
  using Rows = tile::SwizzledRows<Config::kColumns>;
  using OwnCopy = typename Config::OwnCopy;
  using OtherCopy = typename Config::OtherCopy;
  static constexpr bool kOwnsQueries = kGradients == GradientsF32::queries;
  static constexpr bool kGradX = kGradients != GradientsF32::values;
  static constexpr bool kGradY =
      kGradients == GradientsF32::values || kGradients == GradientsF32::keys_and_values;
  static constexpr int kOwn = Config::kOwn;
  static constexpr int kOther = Config::kOther;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kOtherTiles = Config::kWarpOthers / 8;
  static constexpr int kColumnTiles = Config::kDepth / 8;
  // dP behind a warp barrier: started early by the compiler, it makes dQ of 256 columns spill in
  // the tile of small GPUs. Other kernels spill with it.
  static constexpr bool kHoldsBack = kOwnsQueries && Config::kDepth == 256 && kOther == 16;
  using Scores = float[kRowTiles][kOtherTiles][4];

 public:
  PANTILE_DEVICE static OwnTileF32 locate(const BackwardParamsF32& params) {
    const core::TileOrder& order = kOwnsQueries ? params.query_order : params.key_order;
    const core::WorkTile work = order.tile(prim::fresh_block_index());
    OwnTileF32 own;
    own.head = work.head;
    own.tile = work.tile;
    own.queries = sequence_rows(params.queries, work.batch);
    own.keys = sequence_rows(params.keys, work.batch);
    const core::Mask mask{own.queries.length, own.keys.length, params.window_left,
                          params.window_right};
    own.part = common::attended_part(mask);
    own.others = core::TilePlan{{0, 0}, {0, 0}};
    const int count = own_count(own);
    const int first = own.tile * kOwn;
    if (first < count) {
      const core::Span rows{first, core::min_of(first + kOwn, count)};
      own.others = kOwnsQueries ? core::plan_row_tile(own.part.mask, rows, kOther)
                                : core::plan_key_tile(own.part.mask, rows, kOther);
    }
    return own;
  }

  PANTILE_DEVICE BackwardBlockF32(const BackwardParamsF32& params, Storage& storage)
      : params_(params), storage_(storage) {
    if (threadIdx.x == 0) {
      storage.own = locate(params);
    }
    tile::clear_accumulators(grad_x_);
    tile::clear_accumulators(grad_y_);
    const int own_columns = kOwnsQueries ? params.q_columns : params.head_dim;
    const int other_columns = kOwnsQueries ? params.head_dim : params.q_columns;
    if (params.q_columns < Config::kColumns || params.head_dim_v < Config::kColumns) {
      OwnCopy(own_columns).clear_missing_columns(storage.own_x);
      OwnCopy(params.head_dim_v).clear_missing_columns(storage.own_y);
      for (Stage& stage : storage.stages) {
        OtherCopy(other_columns).clear_missing_columns(stage.x);
        OtherCopy(params.head_dim_v).clear_missing_columns(stage.y);
      }
    }
    __syncthreads();
  }

  PANTILE_DEVICE void run() {
    const int tiles = own().others.visit.size();
    const int steps = tiles * (kOwnsQueries ? 1 : params_.group);
    if (steps == 0) {
      return;
    }
    fetch_own();
    take_own_terms();
    int head = own().head * (kOwnsQueries ? 1 : params_.group);  // of the queries
    int tile = own().others.visit.begin;
    fetch_other(head, tile, 0);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const bool wraps = tile + 1 == own().others.visit.end;
      const int next_head = head + (wraps ? 1 : 0);
      const int next_tile = wraps ? own().others.visit.begin : tile + 1;
      prim::wait_copies<0>();
      __syncthreads();
      if (Config::kStages == 2 && i + 1 < steps) {
        fetch_other(next_head, next_tile, i + 1);
      }
      add_step(head, tile, stage_of(i));
      if (Config::kStages == 1) {
        __syncthreads();
        if (i + 1 < steps) {
          fetch_other(next_head, next_tile, i + 1);
        }
      }
      head = next_head;
      tile = next_tile;
    }
    if constexpr (Config::kOtherWarps == 2) {
      __syncthreads();
      if constexpr (kGradX) {
        join(grad_x_);
      }
      if constexpr (kGradY) {
        join(grad_y_);
      }
    }
  }

  // Attended rows get their gradients, the others of this block's slice of the sequence zeros.
  PANTILE_DEVICE void store() {
    if constexpr (kGradX) {
      store_gradient(grad_x_, storage_.own_x, kOwnsQueries ? params_.grad_q : params_.grad_k,
                     params_.head_dim, params_.scale);
    }
    if constexpr (kGradY) {
      store_gradient(grad_y_, storage_.own_y, params_.grad_v, params_.head_dim_v, 1.0f);
    }
  }

 private:
  PANTILE_DEVICE const OwnTileF32& own() const { return storage_.own; }

  PANTILE_DEVICE static int own_count(const OwnTileF32& own) {
    return kOwnsQueries ? own.part.mask.rows : own.part.mask.keys;
  }

  PANTILE_DEVICE Stage& stage_of(int i) const { return storage_.stages[i & (Config::kStages - 1)]; }

  // Row 0 of the attended rows or keys of a head.
  PANTILE_DEVICE tile::HeadRows attended_rows(const Operand& x, bool queries, int head) const {
    SequenceRows rows = queries ? own().queries : own().keys;
    rows.first += queries ? own().part.first_row : own().part.first_key;
    return head_rows(x, rows, head);
  }

  // ---- fetching

  PANTILE_DEVICE void fetch_own() {
    const int first = own().tile * kOwn;
    const int existing = own_count(own()) - first;
    const auto fetch = [&](const Operand& operand, int columns, std::uint16_t* to) {
      const OwnCopy copy(columns);
      const tile::HeadRows rows = attended_rows(operand, kOwnsQueries, own().head);
      copy.copy_ragged_if(true, prim::shared_address(to), OwnCopy::source(rows, first),
                          rows.stride * OwnCopy::kPassRows * 2, existing);
    };
    fetch(kOwnsQueries ? params_.q : params_.k, kOwnsQueries ? params_.q_columns : params_.head_dim,
          storage_.own_x);
    fetch(kOwnsQueries ? params_.grad_o : params_.v, params_.head_dim_v, storage_.own_y);
  }

  PANTILE_DEVICE void fetch_other(int head, int tile, int i) {
    const int first = tile * kOther;
    const int existing = (kOwnsQueries ? own().part.mask.keys : own().part.mask.rows) - first;
    const int other_head = kOwnsQueries ? head / params_.group : head;
    const auto fetch = [&](const Operand& operand, int columns, std::uint16_t* to) {
      const OtherCopy copy(columns);
      const tile::HeadRows rows = attended_rows(operand, !kOwnsQueries, other_head);
      copy.copy_ragged_if(true, prim::shared_address(to), OtherCopy::source(rows, first),
                          rows.stride * OtherCopy::kPassRows * 2, existing);
    };
    fetch(kOwnsQueries ? params_.k : params_.q, kOwnsQueries ? params_.head_dim : params_.q_columns,
          stage_of(i).x);
    fetch(kOwnsQueries ? params_.v : params_.grad_o, params_.head_dim_v, stage_of(i).y);
    prim::commit_copies();
  }

  // Of a row of the sequence's attended queries; those past the last one get the last one's.
  PANTILE_DEVICE float2 row_terms(int head, int row) const {
    const std::int64_t first =
        params_.queries.cu_seqlens != nullptr
            ? own().queries.first
            : static_cast<std::int64_t>(own().queries.batch) * params_.queries.max_length;
    return params_.row_terms[head * params_.term_rows + first + own().part.first_row +
                             core::min_of(row, own().part.mask.rows - 1)];
  }

  // The row within the attended own rows of accumulators 0 and 1 of row tile 0.
  PANTILE_DEVICE int lane_row() const {
    const int thread = prim::fresh_thread_index();
    return own().tile * kOwn + thread / 32 % Config::kRowWarps * Config::kWarpRows +
           thread % 32 / 4;
  }

  // The first row of a step's tile that the warp takes.
  PANTILE_DEVICE static int warp_others() {
    return prim::fresh_thread_index() / 32 / Config::kRowWarps * Config::kWarpOthers;
  }

  PANTILE_DEVICE void take_own_terms() {
    if constexpr (kOwnsQueries) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          own_terms_[m][r] = row_terms(own().head, lane_row() + m * 16 + r * 8);
        }
      }
    }
  }

  // ---- products

  PANTILE_DEVICE void add_step(int head, int tile, const Stage& stage) {
    const int lane = prim::fresh_thread_index() % 32;
    const int first = tile * kOther + warp_others();
    Scores p;
    multiply(p, storage_.own_x, stage.x);
    Scores grad_s;
    if constexpr (kGradX) {
      if constexpr (kHoldsBack) {
        __syncwarp();
      }
      multiply(grad_s, storage_.own_y, stage.y);
    }
    float2 terms[kOtherTiles][2];
    if constexpr (!kOwnsQueries) {
#pragma unroll
      for (int j = 0; j < kOtherTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          terms[j][c] = row_terms(head, first + j * 8 + lane % 4 * 2 + c);
        }
      }
    }
    const bool masked = tile < own().others.full.begin || tile >= own().others.full.end ||
                        (own().tile + 1) * kOwn > own_count(own());
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const core::Span seen =
            masked ? seen_others(lane_row() + m * 16 + r * 8, first) : core::Span{0, kOther};
#pragma unroll
        for (int j = 0; j < kOtherTiles; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float2 term = kOwnsQueries ? own_terms_[m][r] : terms[j][c];
            const int column = 8 * j + lane % 4 * 2 + c;
            const bool visible = column >= seen.begin && column < seen.end;
            float& x = p[m][j][2 * r + c];
            x = visible ? prim::exp2_approx(fmaf(x, params_.scale_log2, term.x)) : 0.0f;
            if constexpr (kGradX) {
              float& y = grad_s[m][j][2 * r + c];
              y = visible ? x * (y + term.y) : 0.0f;
            }
          }
        }
      }
    }
    const int down =
        warp_others() * Rows::kRowBytes + Products::template lane_offset_down<Rows>(lane);
    if constexpr (kGradY) {
      Products::template add_rows<Rows>(grad_y_, p, prim::shared_address(stage.y) + down);
    }
    if constexpr (kGradX) {
      Products::template add_rows<Rows>(grad_x_, grad_s, prim::shared_address(stage.x) + down);
    }
  }

  PANTILE_DEVICE void multiply(Scores& s, const std::uint16_t* own,
                               const std::uint16_t* other) const {
    const int thread = prim::fresh_thread_index();
    Products::template multiply_rows<Rows, Config::kDepth>(
        s,
        prim::shared_address(own) +
            thread / 32 % Config::kRowWarps * Config::kWarpRows * Rows::kRowBytes +
            Rows::lane_offset_rows_first(thread % 32),
        prim::shared_address(other) + warp_others() * Rows::kRowBytes +
            Rows::lane_offset_columns_first(thread % 32));
  }

  // Rows of the other side, counted from `first`, that see own row `row`.
  PANTILE_DEVICE core::Span seen_others(int row, int first) const {
    if (row >= own_count(own())) {
      return core::Span{0, 0};
    }
    const core::Span seen = kOwnsQueries ? core::visible_keys(own().part.mask, row)
                                         : core::visible_rows(own().part.mask, row);
    return core::Span{seen.begin - first, seen.end - first};
  }

  // ---- output

  // Adds the sums of the two warps that share rows, in the first one's registers, by way of the
  // stages, which no warp reads any more.
  PANTILE_DEVICE void join(float (&sums)[kRowTiles][kColumnTiles][4]) {
    constexpr int kWords = kRowTiles * kColumnTiles * 4 * 32;  // of one warp
    static_assert(Config::kRowWarps * kWords * sizeof(float) <= sizeof(storage_.stages));
    const int thread = prim::fresh_thread_index();
    const int warp = thread / 32;
    float* const words =
        reinterpret_cast<float*>(storage_.stages) + warp % Config::kRowWarps * kWords + thread % 32;
    const bool gives = warp >= Config::kRowWarps;
    if (gives) {
      for_sums(sums, [&](int i, float& x) { words[i * 32] = x; });
    }
    __syncthreads();
    if (!gives) {
      for_sums(sums, [&](int i, float& x) { x += words[i * 32]; });
    }
    __syncthreads();
  }

  template <class Visit>
  PANTILE_DEVICE static void for_sums(float (&sums)[kRowTiles][kColumnTiles][4], Visit visit) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          visit((m * kColumnTiles + j) * 4 + c, sums[m][j][c]);
        }
      }
    }
  }

  PANTILE_DEVICE void store_gradient(const float (&sums)[kRowTiles][kColumnTiles][4],
                                     std::uint16_t* tile, const Operand& to, int columns,
                                     float scale) {
    clear_unattended(to, columns);
    const int thread = prim::fresh_thread_index();
    if (thread / 32 >= Config::kRowWarps) {
      return;  // joined
    }
    const int lane = thread % 32;
    const int warp_row = thread / 32 * Config::kWarpRows;
    char* const rows = reinterpret_cast<char*>(tile) + warp_row * Rows::kRowBytes;
    __syncwarp();  // these rows were operands of this warp's last products
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          const int offset = Rows::offset(m * 16 + r * 8 + lane / 4, 2 * j + lane % 4 / 2);
          *reinterpret_cast<float2*>(rows + offset + lane % 2 * 8) =
              make_float2(sums[m][j][2 * r] * scale, sums[m][j][2 * r + 1] * scale);
        }
      }
    }
    __syncwarp();
    const int first = own().tile * kOwn + warp_row;
    const tile::HeadRows attended = attended_rows(to, kOwnsQueries, own().head);
#pragma unroll 4
    for (int i = lane; i < Config::kWarpRows * Rows::kChunks; i += 32) {
      const int row = i / Rows::kChunks;
      const int chunk = i % Rows::kChunks;
      if (first + row < own_count(own()) && chunk * 8 < columns) {
        *reinterpret_cast<uint4*>(attended.rows + (first + row) * attended.stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(rows + Rows::offset(row, chunk));
      }
    }
  }

  PANTILE_DEVICE void clear_unattended(const Operand& to, int columns) const {
    const SequenceRows& sequence = kOwnsQueries ? own().queries : own().keys;
    const int attended = kOwnsQueries ? own().part.first_row : own().part.first_key;
    const int attended_end = attended + own_count(own());
    const int begin = own().tile * kOwn;
    const int end = core::min_of(begin + kOwn, sequence.allocated);
    if (begin >= attended && end <= attended_end) {
      return;
    }
    const tile::HeadRows rows = head_rows(to, sequence, own().head);
    const int chunks = columns / 8;
    for (int i = prim::fresh_thread_index(); i < (end - begin) * chunks; i += Config::kThreads) {
      const int row = begin + i / chunks;
      if (row < attended || row >= attended_end) {
        *reinterpret_cast<uint4*>(rows.rows + row * rows.stride + i % chunks * 8) =
            uint4{0, 0, 0, 0};
      }
    }
  }

  const BackwardParamsF32& params_;
  Storage& storage_;
  float2 own_terms_[kRowTiles][2];
  float grad_x_[kRowTiles][kColumnTiles][4];
  float grad_y_[kRowTiles][kColumnTiles][4];
};

template <class Config, Float32Precision kPrecision, GradientsF32 kGradients>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    backward_kernel_f32(const __grid_constant__ BackwardParamsF32 params) {
  extern __shared__ __align__(1024) char shared[];
  BackwardBlockF32<Config, kPrecision, kGradients> block(
      params, *reinterpret_cast<BackwardStorageF32<Config>*>(shared));
  block.run();
  block.store();
}

}  // namespace pantile::ampere
