// The online softmax of the query rows that one warp owns, on mma.sync accumulators. A lane holds
// two rows of each 16-row tile (r = 0, 1: rows lane / 4 and lane / 4 + 8), which it shares with the
// other three lanes of its quad.
//
// Scores are raw products of Q and K; `scale` turns them into base-2 logits. The reference that is
// subtracted from a row's logits is a maximum that may be stale by up to 2^8: as long as no row of
// the warp outgrows it, nothing is reduced across lanes and O is left alone (rescaling only when it
// matters, docs/numerics.md). Each row decides for itself, so that its bits do not depend on its
// neighbours. Measured against rescaling always: 1.05-1.17x.
//
// Row sums take P in fp32, before it is rounded for the product with V. A product of the 16-bit P
// with ones is cheaper in issue slots, but LSE then carries the rounding of P: up to 1.2e-3 (bf16)
// for rows of few keys, against 1e-6.
#pragma once

#include <cstdint>

#include "attn/max_logit.cuh"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/math.cuh"
#include "prim/warp.cuh"

namespace pantile::ampere {

// What a row's reference is before its first visible key, negated: finite, so that a row without
// keys has logits of -inf + 1e30 = -inf and P = 0, and no infinity meets another one.
inline constexpr float kNothingSeen = 1e30f;
inline constexpr float kStaleLimit = 8.0f;  // base-2 logits above the reference: P <= 2^8; with 0
                                            // a row's reference is its exact maximum

template <class Config, DType kDType>
struct SoftmaxRows {
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kKeyTiles = Config::kTileK / 8;
  static constexpr int kValueTiles = Config::kHeadDimV / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Weights = std::uint32_t[kRowTiles][4];  // P of 16 keys, the A operand of P V

  float o[kRowTiles][kValueTiles][4];
  float row_sum[kRowTiles][2];    // of the columns that this lane holds
  float minus_max[kRowTiles][2];  // minus the row's reference logit
  float tile_max[kRowTiles][2];   // of the scores of one key tile that this lane holds
  float scale;                    // positive, includes log2(e)
  float stale_limit;

  PANTILE_DEVICE void clear(float logit_scale, float limit) {
    scale = logit_scale;
    stale_limit = limit;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) {
        o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.0f;
      }
      row_sum[m][0] = row_sum[m][1] = 0.0f;
      minus_max[m][0] = minus_max[m][1] = kNothingSeen;
    }
  }

  PANTILE_DEVICE void clear_max() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      tile_max[m][0] = tile_max[m][1] = -INFINITY;
    }
  }

  PANTILE_DEVICE void take_max(const Scores& s, int m, int j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_max[m][r] = fmaxf(tile_max[m][r], fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
    }
  }

  PANTILE_DEVICE void take_max(const Scores& s) {
    clear_max();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        take_max(s, m, j);
      }
    }
  }

  // After the maxima of a key tile are taken, before its exponentials.
  PANTILE_DEVICE void raise_references() {
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        outgrown |= fmaf(tile_max[m][r], scale, minus_max[m][r]) > stale_limit;
      }
    }
    if (__any_sync(prim::kAllLanes, outgrown)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const float first = raise_reference(m, 0);
        const float second = raise_reference(m, 1);
        row_sum[m][0] *= first;
        row_sum[m][1] *= second;
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j) {
          rescale(o[m][j], first, second);
        }
      }
    }
  }

  // Scores to P, in place.
  PANTILE_DEVICE void exponentials(Scores& s, int m, int j) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[m][j][c] = prim::exp2_approx(fmaf(s[m][j][c], scale, minus_max[m][c >> 1]));
    }
  }

  // P of 16 keys into the row sums, and to 16 bits.
  PANTILE_DEVICE void pack(const Scores& s, int m, int group, std::uint32_t (&p)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&x)[4] = s[m][2 * group + half];
      row_sum[m][0] += x[0];
      row_sum[m][1] += x[2];
      row_sum[m][0] += x[1];
      row_sum[m][1] += x[3];
      p[2 * half] = prim::pack<kDType>(x[0], x[1]);
      p[2 * half + 1] = prim::pack<kDType>(x[2], x[3]);
    }
  }

  // Joins the partial sums of a row, by all lanes, once; returns what O is multiplied by.
  PANTILE_DEVICE float finish_row(int m, int r) {
    float sum = row_sum[m][r];
    sum += __shfl_xor_sync(prim::kAllLanes, sum, 1);
    sum += __shfl_xor_sync(prim::kAllLanes, sum, 2);
    row_sum[m][r] = sum;
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }

  // Of a finished row.
  PANTILE_DEVICE float log_sum_exp(int m, int r) const {
    const float sum = row_sum[m][r];
    return sum == 0.0f ? -INFINITY : (log2f(sum) - minus_max[m][r]) * core::kLn2;
  }

  // Of a finished row, when stale_limit is 0; as attn::raise_max_logit takes it.
  PANTILE_DEVICE int max_logit(int m, int r) const {
    return attn::row_logit_order(-minus_max[m][r] * core::kLn2, row_sum[m][r]);
  }

 private:
  // Returns the factor by which the row's sum and output shrink; 1 if its reference stays.
  PANTILE_DEVICE float raise_reference(int m, int r) {
    float row_max = tile_max[m][r];
    row_max = fmaxf(row_max, __shfl_xor_sync(prim::kAllLanes, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(prim::kAllLanes, row_max, 2));
    const float before = minus_max[m][r];
    if (fmaf(row_max, scale, before) > stale_limit) {
      minus_max[m][r] = -row_max * scale;
    }
    return prim::exp2_approx(minus_max[m][r] - before);
  }

  PANTILE_DEVICE static void rescale(float (&x)[4], float first, float second) {
    x[0] *= first;
    x[1] *= first;
    x[2] *= second;
    x[3] *= second;
  }
};

}  // namespace pantile::ampere
