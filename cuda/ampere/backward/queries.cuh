// dQ += dS K of one step of the backward, by all warps of a block, straight into the sums in global
// memory (tile/quad_sums_sm80.cuh); and the sums of the rows of dS.
#pragma once

#include <cstdint>

#include "ampere/backward/keys.cuh"
#include "attn/tensor_softmax.cuh"
#include "common/backward_rows.cuh"
#include "pantile/dtype.h"
#include "prim/address.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_sync.cuh"
#include "tile/accumulators_sm80.cuh"
#include "tile/quad_sums_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

template <class Config, DType kDType>
class BackwardQueries {
  using KRows = tile::SwizzledRows<Config::kHeadDim>;
  using WeightRows = tile::SwizzledRows<Config::kTileQ>;
  static constexpr int kMTiles = Config::kGradRows / 16;
  static constexpr int kNTiles = Config::kGradColumns / 8;
  // Where there are many columns some at a time, so that the additions to global memory run under
  // the next ones' products.
  static constexpr int kBlock = kNTiles <= 4 ? kNTiles : kNTiles % 4 == 0 ? 4 : 2;
  static constexpr int kGroups = Config::kTileK / 16;

 public:
  // `scales` of integer sums, one a row, negative where additions are to be measured; `sums` of
  // this step's rows.
  PANTILE_DEVICE static void add(const std::uint16_t* grad_s, const std::uint16_t* keys,
                                 const float* scales, const BackwardParams& params, float* sums) {
    const BackwardPlace<Config> place;
    const int row_warp = place.warp % Config::kGradRowWarps;
    const int column_warp = place.warp / Config::kGradRowWarps;
    const tile::ColumnShare<WeightRows, Config::kGradRows> rows(
        prim::shared_address(grad_s) + WeightRows::lane_offset_columns_first(place.lane), row_warp);
    const tile::ColumnShare<KRows, Config::kGradColumns> columns(
        prim::shared_address(keys) + KRows::lane_offset_rows_first(place.lane), column_warp);
    sums += place.warp * (kMTiles * kNTiles * tile::kQuadTileWords);
    std::uint32_t a[kGroups][kMTiles][4];
#pragma unroll
    for (int first = 0; first < kNTiles; first += kBlock) {
      float grad_q[kMTiles][kBlock][4];
      tile::clear_accumulators(grad_q);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int m = 0; first == 0 && m < kMTiles; ++m) {
          prim::load_matrix_x4_transposed(a[group][m], rows.step(group, m));
        }
#pragma unroll
        for (int n = 0; n < kBlock; n += 2) {
          std::uint32_t b[4];
          prim::load_matrix_x4_transposed(b, columns.step(group, (first + n) / 2));
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            prim::mma_add<kDType>(grad_q[m][n], a[group][m], b[0], b[1]);
            prim::mma_add<kDType>(grad_q[m][n + 1], a[group][m], b[2], b[3]);
          }
        }
      }
      add_columns(grad_q, place.lane, scales, row_warp * Config::kGradRows, params,
                  sums + first * tile::kQuadTileWords);
    }
  }

  // Sums of the rows of dS over the block's keys, of row tile `tile`. It reads dS again: that costs
  // less than to keep it, and blocks whose keys have no mean, nearly all, nothing but a branch.
  PANTILE_DEVICE static void add_row_sums(const std::uint16_t* grad_s, const float* scales,
                                          float unit, const BackwardParams& params,
                                          std::int64_t tile) {
    const BackwardPlace<Config> place;
    const int row16 = place.warp % kRowShares;
    const std::uint32_t lane = prim::shared_address(grad_s) +
                               WeightRows::lane_offset_columns_first(place.lane) +
                               place.warp / kRowShares * (kSumGroups * 16 * WeightRows::kRowBytes);
    const tile::ColumnShare<WeightRows, 16> rows(lane, row16);
    float sums[4] = {};
#pragma unroll 4
    for (int group = 0; group < kSumGroups; ++group) {
      std::uint32_t a[4];
      prim::load_matrix_x4_transposed(a, rows.step(group, 0));
      attn::add_row_sums<kDType>(sums, a);
    }
    if (place.lane % 4 != 0) {  // whose sums are the same as those of lane 0 of the quad
      return;
    }
    const int row = row16 * 16 + place.lane / 4;
    float* const to =
        params.row_sums +
        tile * common::row_sum_floats(Config::kTileQ * Config::kHeadDim, Config::kTileQ) + row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[2 * i] * unit;
      if (params.integer_sums) {
        const float scale = scales[row + 8 * i];
        if (scale < 0.0f) {
          atomicMax(params.row_max + tile * Config::kTileQ + row + 8 * i,
                    __float_as_uint(fabsf(sum)));
        }
        prim::global_add(reinterpret_cast<int*>(to + 8 * i), __float2int_rn(sum * scale));
      } else {
        prim::global_add(to + 8 * i, sum);
      }
    }
  }

 private:
  // Of the sums of dS a warp takes 16 rows; where there are more warps than such rows, they share
  // the keys.
  static constexpr int kRowShares = Config::kTileQ / 16;
  static constexpr int kKeyShares = Config::kThreads / 32 / kRowShares;
  static constexpr int kSumGroups = kGroups / kKeyShares;
  static_assert(kRowShares * kKeyShares * 32 == Config::kThreads &&
                kSumGroups * kKeyShares == kGroups);

  PANTILE_DEVICE static void add_columns(const float (&grad_q)[kMTiles][kBlock][4], int lane,
                                         const float* scales, int first_row,
                                         const BackwardParams& params, float* sums) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      float* const to = sums + m * kNTiles * tile::kQuadTileWords;
      if (params.integer_sums) {
        const int row = first_row + m * 16 + lane / 4;
        const float upper = scales[row];
        const float lower = scales[row + 8];
        if (upper < 0.0f || lower < 0.0f) {
          // The tile's number, from where its sums are: kept, it would cost registers.
          const std::int64_t tile = (sums - params.dq_sum) / (Config::kTileQ * Config::kHeadDim);
          note_additions(grad_q[m], params.row_max + tile * Config::kTileQ + row);
        }
#pragma unroll
        for (int n = 0; n < kBlock; ++n) {
          tile::add_quad_integers(to + n * tile::kQuadTileWords, lane, grad_q[m][n], upper, lower);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kBlock; ++n) {
          tile::add_quad(to + n * tile::kQuadTileWords, lane, grad_q[m][n]);
        }
      }
    }
  }

  // The largest absolute values of the thread's rows, as bits, so that NaN is above all.
  PANTILE_DEVICE static void note_additions(const float (&grad_q)[kBlock][4],
                                            std::uint32_t* row_max) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t most = 0;
#pragma unroll
      for (int n = 0; n < kBlock; ++n) {
        most = max(most, max(__float_as_uint(fabsf(grad_q[n][2 * i])),
                             __float_as_uint(fabsf(grad_q[n][2 * i + 1]))));
      }
      atomicMax(row_max + 8 * i, most);
    }
  }
};

}  // namespace pantile::ampere
