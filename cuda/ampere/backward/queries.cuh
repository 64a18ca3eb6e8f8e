// dQ += dS K of one step of the backward, by all warps of a block, straight into the sums in global
// memory (tile/quad_sums_sm80.cuh).
#pragma once

#include <cstdint>

#include "ampere/backward/keys.cuh"
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

 private:
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
