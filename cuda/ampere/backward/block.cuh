// What one thread block of the backward does, step by step: fetching, the five products, dQ and the
// store. backward.cuh puts the steps in order.
//
// All scores are transposed, one row a key: then P^T and dS^T, as they come out of the tensor
// cores, are the A operands of dV += P^T dO and dK += dS^T Q.
#pragma once

#include <cstdint>

#include "ampere/backward/keys.cuh"
#include "ampere/backward/params.cuh"
#include "ampere/backward/queries.cuh"
#include "ampere/spread.cuh"
#include "ampere/storage.cuh"
#include "core/geometry.h"
#include "pantile/registry.h"
#include "prim/convert.cuh"
#include "prim/cp_async.cuh"
#include "prim/math.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_sync.cuh"
#include "prim/named_barrier.cuh"
#include "prim/special_registers.cuh"
#include "tile/accumulators_sm80.cuh"
#include "tile/row_copy_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

// The rows of one step: tile `tile` of the attended rows of a query head.
struct RowStep {
  int head, tile;
};

template <class Config, DType kDType, MaskKind kMask>
class BackwardBlock {
  using Storage = BackwardStorage<Config>;
  using Stage = typename Storage::Stage;
  using Keys = BackwardKeys<Config, kMask>;
  using Place = BackwardPlace<Config>;
  using WeightRows = tile::SwizzledRows<Config::kTileQ>;
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kTileK = Config::kTileK;
  static constexpr int kKeyTiles = Config::kWarpKeys / 16;  // m16 tiles of a warp
  static constexpr int kRowTiles = Config::kWarpRows / 8;   // n8 tiles of a warp's scores
  static constexpr int kRowGroups = kRowTiles / 2;

 public:
  using Scores = float[kKeyTiles][kRowTiles][4];
  using Weights = std::uint32_t[kRowGroups][kKeyTiles][4];  // A operands, 16 rows each
  using KRows = tile::SwizzledRows<Config::kHeadDim>;       // Q too
  using VRows = tile::SwizzledRows<Config::kHeadDimV>;      // dO too

  PANTILE_DEVICE BackwardBlock(const BackwardParams& params, Storage& storage)
      : params_(params), storage_(storage) {
    if (threadIdx.x == 0) {
      storage.work = Keys::describe(params);
    }
    tile::clear_accumulators(grad_k_);
    tile::clear_accumulators(grad_v_);
    __syncthreads();
  }

  // How many steps there are.
  PANTILE_DEVICE int steps() const { return work().rows.visit.size() * params_.group; }

  PANTILE_DEVICE RowStep first_step() const {
    return RowStep{work().head0, work().rows.visit.begin};
  }

  PANTILE_DEVICE RowStep next(RowStep step) const {
    const core::Span tiles = work().rows.visit;
    const bool wraps = step.tile + 1 == tiles.end;
    return RowStep{step.head + (wraps ? 1 : 0), wraps ? tiles.begin : step.tile + 1};
  }

  PANTILE_DEVICE RowStep previous(RowStep step) const {
    const core::Span tiles = work().rows.visit;
    const bool wraps = step.tile == tiles.begin;
    return RowStep{step.head - (wraps ? 1 : 0), wraps ? tiles.end - 1 : step.tile - 1};
  }

  // Which share of the columns this warp owns.
  PANTILE_DEVICE static int column_warp() { return Place().column_warp; }

  // ---- fetching

  PANTILE_DEVICE void clear_missing_columns() {
    if (params_.q_columns < Config::kHeadDim || params_.head_dim_v < Config::kHeadDimV) {
      typename Config::KCopy(params_.head_dim).clear_missing_columns(storage_.k);
      typename Config::VCopy(params_.head_dim_v).clear_missing_columns(storage_.v);
      for (Stage& stage : storage_.stages) {
        q_copy().clear_missing_columns(stage.q);
        grad_copy().clear_missing_columns(stage.grad_o);
      }
    }
  }

  PANTILE_DEVICE void fetch_keys() {
    const KeyBlock block = Keys::locate(params_, static_cast<int>(blockIdx.x));
    const typename Config::KCopy k_copy(params_.head_dim);
    const typename Config::VCopy v_copy(params_.head_dim_v);
    const tile::HeadRows k = Keys::key_rows(params_.k, block);
    const tile::HeadRows v = Keys::key_rows(params_.v, block);
    const int existing = work().mask.keys - work().key0;
    k_copy.copy_ragged_if(true, prim::shared_address(storage_.k), k_copy.source(k, work().key0),
                          k.stride * Config::KCopy::kPassRows * 2, existing);
    v_copy.copy_ragged_if(true, prim::shared_address(storage_.v), v_copy.source(v, work().key0),
                          v.stride * Config::VCopy::kPassRows * 2, existing);
  }

  // Q, dO and the row terms of step i.
  PANTILE_DEVICE void fetch_rows(RowStep step, int i) {
    Stage& stage = stage_of(i);
    const int first = step.tile * kTileQ;
    const int existing = work().mask.rows - first;
    const tile::HeadRows q = head_rows(params_.q, work().queries, step.head);
    const tile::HeadRows grad_o = head_rows(params_.grad_o, work().queries, step.head);
    q_copy().copy_ragged_if(true, prim::shared_address(stage.q), q_copy().source(q, first),
                            q.stride * Config::QCopy::kPassRows * 2, existing);
    grad_copy().copy_ragged_if(true, prim::shared_address(stage.grad_o),
                               grad_copy().source(grad_o, first),
                               grad_o.stride * Config::GradCopy::kPassRows * 2, existing);
    constexpr int kFloats = kRowTerms * kTileQ;
    const int at = prim::fresh_thread_index() * 4;
    prim::copy_async_16_if(at < kFloats, prim::shared_address(terms_of(i)) + at * 4,
                           params_.row_terms + row_index(step) * kFloats + at);
  }

  // ---- scores

  // P^T and dS^T of the keys and of rows `first_row` on that this warp computes, as A operands.
  PANTILE_DEVICE void weights(Weights& p, Weights& grad_s, RowStep step, int i, int first_row) {
    const Stage& stage = stage_of(i);
    const auto& terms = terms_of(i);
    Scores s;
    multiply<KRows>(s, storage_.k, stage.q, first_row, nullptr, [](int) {});
    Scores dp;
    constexpr int kSlots = VRows::kChunks / 2 * kRowGroups;
    multiply<VRows>(dp, storage_.v, stage.grad_o, first_row, terms[1] + first_row, [&](int slot) {
      spread<kRowTiles, kSlots>(slot, [&](int j) { exponentials(s, j, terms[0] + first_row); });
    });
    if (work().key0 + kTileK > work().mask.keys || step.tile < work().rows.full.begin ||
        step.tile >= work().rows.full.end) {
      hide(s, dp, step.tile * kTileQ + first_row);
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        const float (&x)[4] = s[m][j];
        const float (&y)[4] = dp[m][j];
        const int at = j % 2 * 2;
        p[j / 2][m][at] = prim::pack<kDType>(x[0], x[1]);
        p[j / 2][m][at + 1] = prim::pack<kDType>(x[2], x[3]);
        grad_s[j / 2][m][at] = prim::pack<kDType>(x[0] * y[0], x[1] * y[1]);
        grad_s[j / 2][m][at + 1] = prim::pack<kDType>(x[2] * y[2], x[3] * y[3]);
      }
    }
  }

  PANTILE_DEVICE std::uint16_t* shared_p() const { return storage_.weights[Config::kGradSBuffers]; }
  PANTILE_DEVICE std::uint16_t* shared_grad_s(int i) const {
    return storage_.weights[i & (Config::kGradSBuffers - 1)];
  }

  // Writes this warp's part of P^T or dS^T to shared memory.
  PANTILE_DEVICE void share_weights(const Weights& x, std::uint16_t* to, int first_row) {
    const Place place;
    char* const tile = reinterpret_cast<char*>(to);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows of keys i % 2 * 8 on, columns i / 2 * 8 on
          const int key = place.key_warp * Config::kWarpKeys + m * 16 + i % 2 * 8 + place.lane / 4;
          const int chunk = first_row / 8 + group * 2 + i / 2;
          *reinterpret_cast<std::uint32_t*>(tile + WeightRows::offset(key, chunk) +
                                            place.lane % 4 * 4) = x[group][m][i];
        }
      }
    }
  }

  // ---- dV += P^T dO, dK += dS^T Q

  PANTILE_DEVICE void add_values(const Weights& p, int i, int first_row) {
    const auto columns = own_columns<VRows, Config::kColumnsV>(stage_of(i).grad_o);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      accumulate(grad_v_, p[group], columns, first_row / 16 + group);
    }
  }

  PANTILE_DEVICE void add_keys(const Weights& grad_s, int i, int first_row) {
    const auto columns = own_columns<KRows, Config::kColumnsK>(stage_of(i).q);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      accumulate(grad_k_, grad_s[group], columns, first_row / 16 + group);
    }
  }

  // The barrier of the warps that share keys.
  PANTILE_DEVICE static void wait_for_shared_weights() {
    const Place place;
    prim::barrier_sync(1 + place.key_warp, Config::kColumnWarps * 32);
  }

  // The same for the rows whose weights the other warps of these keys have shared.
  PANTILE_DEVICE void add_shared_values(int i) {
    add_shared<VRows, Config::kColumnsV>(grad_v_, shared_p(), stage_of(i).grad_o);
  }

  PANTILE_DEVICE void add_shared_keys(int i) {
    add_shared<KRows, Config::kColumnsK>(grad_k_, shared_grad_s(i), stage_of(i).q);
  }

  // ---- dQ += dS K of step i

  PANTILE_DEVICE void add_queries(RowStep step, int i) {
    using Queries = BackwardQueries<Config, kDType>;
    Queries::add(shared_grad_s(i), storage_.k, terms_of(i)[2], params_,
                 params_.dq_sum + row_index(step) * (kTileQ * Config::kHeadDim));
    if (work().row_sum_unit != 0.0f) {
      Queries::add_row_sums(shared_grad_s(i), terms_of(i)[2], work().row_sum_unit, params_,
                            row_index(step));
    }
  }

  // ---- output

  // dK and dV by way of the buffers of K and V, which no warp reads any more. Keys of this block's
  // slice of the sequence that nobody attends to get zeros.
  // values_scale: of dV.
  PANTILE_DEVICE void store(float values_scale = 1.0f) {
    const KeyBlock block = Keys::locate(params_, prim::fresh_block_index());
    stage_columns<KRows, Config::kColumnsK>(grad_k_, storage_.k, params_.scale);
    stage_columns<VRows, Config::kColumnsV>(grad_v_, storage_.v, values_scale);
    __syncthreads();
    const common::Attended& part = block.part;
    Keys::template store_rows<KRows>(Keys::key_rows(params_.grad_k, block), storage_.k,
                                     params_.head_dim, block);
    Keys::template store_rows<VRows>(Keys::key_rows(params_.grad_v, block), storage_.v,
                                     params_.head_dim_v, block);
    Keys::clear_rows(head_rows(params_.grad_k, block.keys, block.key_head), params_.head_dim, block,
                     part);
    Keys::clear_rows(head_rows(params_.grad_v, block.keys, block.key_head), params_.head_dim_v,
                     block, part);
  }

 protected:
  PANTILE_DEVICE Stage& stage_of(int i) const { return storage_.stages[i & (Config::kStages - 1)]; }

  PANTILE_DEVICE float (&terms_of(int i) const)[kRowTerms][kTileQ] {
    return storage_.row_terms[i & (Config::kTermBuffers - 1)];
  }

  PANTILE_DEVICE const BackwardWork& work() const { return storage_.work; }

  PANTILE_DEVICE typename Config::QCopy q_copy() const {
    return typename Config::QCopy(params_.q_columns);
  }
  PANTILE_DEVICE typename Config::GradCopy grad_copy() const {
    return typename Config::GradCopy(params_.head_dim_v);
  }

  PANTILE_DEVICE std::int64_t row_index(RowStep step) const {
    return step.head * params_.row_tile_count + work().row_number0 + step.tile;
  }

  // scores = keys rows^T, started from one value a row if `start` is given; calls between(slot)
  // after each of the depth steps * kRowGroups steps.
  template <class Rows, class Between>
  PANTILE_DEVICE void multiply(Scores& scores, const std::uint16_t* keys, const std::uint16_t* rows,
                               int first_row, const float* start, Between between) const {
    const Place place;
    const std::uint32_t a_lane = prim::shared_address(keys) +
                                 place.key_warp * Config::kWarpKeys * Rows::kRowBytes +
                                 Rows::lane_offset_rows_first(place.lane);
    const std::uint32_t b_lane = prim::shared_address(rows) + first_row * Rows::kRowBytes +
                                 Rows::lane_offset_columns_first(place.lane);
#pragma unroll
    for (int k = 0; k < Rows::kChunks / 2; ++k) {
      std::uint32_t a[kKeyTiles][4];
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        prim::load_matrix_x4(a[m], Rows::step(a_lane, m, k));
      }
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        std::uint32_t b[4];
        prim::load_matrix_x4(b, Rows::step(b_lane, group, k));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 2 * group + half;
          float2 first = make_float2(0.0f, 0.0f);
          if (k == 0 && start != nullptr) {
            first = *reinterpret_cast<const float2*>(start + 8 * j + place.lane % 4 * 2);
          }
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
            if (k == 0) {
              prim::mma_set<kDType>(scores[m][j], a[m], b[2 * half], b[2 * half + 1], first.x,
                                    first.y);
            } else {
              prim::mma_add<kDType>(scores[m][j], a[m], b[2 * half], b[2 * half + 1]);
            }
          }
        }
        between(k * kRowGroups + group);
      }
    }
  }

  PANTILE_DEVICE void exponentials(Scores& s, int j, const float* minus_lse) const {
    const float2 minus =
        *reinterpret_cast<const float2*>(minus_lse + 8 * j + prim::fresh_thread_index() % 4 * 2);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[m][j][c] =
            prim::exp2_approx(fmaf(s[m][j][c], params_.scale_log2, c % 2 == 0 ? minus.x : minus.y));
      }
    }
  }

  // Zeros in P and dP where the mask hides a score; rows count from `first_row` of the attended
  // ones. Both, because the product of a zero and what a hidden row or key holds may be a NaN.
  PANTILE_DEVICE void hide(Scores& p, Scores& dp, int first_row) const {
    const Place place;
    const int key0 = work().key0 + place.key_warp * Config::kWarpKeys + place.lane / 4;
    const int column0 = first_row + place.lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + m * 16 + r * 8;
        const core::Span seen =
            key < work().mask.keys ? core::visible_rows(work().mask, key) : core::Span{0, 0};
        const int begin = seen.begin - column0;
        const int end = seen.end - column0;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * j + c < begin || 8 * j + c >= end) {
              p[m][j][2 * r + c] = dp[m][j][2 * r + c] = 0.0f;
            }
          }
        }
      }
    }
  }

  // For ldmatrix.trans: the columns of a tile of rows that this warp owns.
  template <class Rows, int kColumns>
  PANTILE_DEVICE static tile::ColumnShare<Rows, kColumns> own_columns(const std::uint16_t* tile) {
    const Place place;
    return tile::ColumnShare<Rows, kColumns>(
        prim::shared_address(tile) + Rows::lane_offset_rows_first(place.lane), place.column_warp);
  }

  // sums += a * (16 rows of a tile)
  template <int kColumnTiles, class Columns>
  PANTILE_DEVICE static void accumulate(float (&sums)[kKeyTiles][kColumnTiles][4],
                                        const std::uint32_t (&a)[kKeyTiles][4],
                                        const Columns& columns, int row16) {
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      std::uint32_t b[4];
      prim::load_matrix_x4_transposed(b, columns.step(row16, n));
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        prim::mma_add<kDType>(sums[m][2 * n], a[m], b[0], b[1]);
        prim::mma_add<kDType>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }

  template <class Rows, int kColumns, int kColumnTiles>
  PANTILE_DEVICE void add_shared(float (&sums)[kKeyTiles][kColumnTiles][4],
                                 const std::uint16_t* shared_weights, const std::uint16_t* rows) {
    const Place place;
    const std::uint32_t a_lane = prim::shared_address(shared_weights) +
                                 place.key_warp * Config::kWarpKeys * WeightRows::kRowBytes +
                                 WeightRows::lane_offset_rows_first(place.lane);
    const auto columns = own_columns<Rows, kColumns>(rows);
#pragma unroll
    for (int other = 1; other < Config::kColumnWarps; ++other) {
      const int warp = (place.column_warp + other) % Config::kColumnWarps;
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        const int group = warp * kRowGroups + i;
        std::uint32_t a[kKeyTiles][4];
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          prim::load_matrix_x4(a[m], WeightRows::step(a_lane, m, group));
        }
        accumulate(sums, a, columns, group);
      }
    }
  }

  template <class Rows, int kColumns, int kColumnTiles>
  PANTILE_DEVICE static void stage_columns(const float (&sums)[kKeyTiles][kColumnTiles][4],
                                           std::uint16_t* tile, float scale) {
    const Place place;
    char* const bytes = reinterpret_cast<char*>(tile);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = place.key_warp * Config::kWarpKeys + m * 16 + r * 8 + place.lane / 4;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          const int chunk = place.column_warp * (kColumns / 8) + j;
          *reinterpret_cast<std::uint32_t*>(bytes + Rows::offset(key, chunk) + place.lane % 4 * 4) =
              prim::pack<kDType>(sums[m][j][2 * r] * scale, sums[m][j][2 * r + 1] * scale);
        }
      }
    }
  }

  const BackwardParams& params_;
  Storage& storage_;
  float grad_k_[kKeyTiles][Config::kColumnsK / 8][4];
  float grad_v_[kKeyTiles][Config::kColumnsV / 8][4];
};

}  // namespace pantile::ampere
