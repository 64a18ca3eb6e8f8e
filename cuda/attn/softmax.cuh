// The online softmax of the two rows a thread shares with its quad, in base 2 (core/softmax_state.h
// has the algebra). Scores stay unscaled: exp2(S * scale_log2 - max * scale_log2) is one FFMA and
// one EX2. scale_log2 is positive.
//
// Order of a step: raise_max, exponentiate (in one or two parts), add_sums, and somewhere after
// raise_max, when O is not in flight, rescale(O).
#pragma once

#include "attn/mask.cuh"
#include "prim/math.cuh"
#include "tile/row_reduce.cuh"

namespace pantile::attn {

// A row's maximum is raised only when it grew by more than this power of two; until then the old
// one goes on being subtracted from scores and used in the LSE, so the result is exact, exp2 stays
// below 2^8 (65504 is the largest f16), and O is rarely rescaled. Measured: +3-6 %.
// With 0 a row's maximum is exact at every step.
inline constexpr float kLazyExponent = 8.0f;

template <int kCount>
struct OnlineSoftmax {
  // Two independent chains for each row's maximum and sum; more do not help, one costs 2-5 %.
  static constexpr int kChains = 2;

  float row_max[2];  // unscaled; -inf before the row has seen a key
  float row_sum[2];  // of this thread's columns only
  float factor[2];   // by which O shrinks in this step
  float shift[2];    // row_max * scale_log2, or 0 for a row that has seen nothing
  float sum[2][kChains];

  template <bool kFirst>
  PANTILE_DEVICE void raise_max(const float (&S)[kCount], float scale_log2,
                                float lazy_exponent = kLazyExponent) {
    float max[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float chain[kChains];
#pragma unroll
      for (int e = 0; e < kChains; ++e) {
        chain[e] = fmaxf(S[4 * e + 2 * i], S[4 * e + 2 * i + 1]);
      }
#pragma unroll
      for (int j = kChains; j < kCount / 4; ++j) {
        chain[j % kChains] =
            fmaxf(chain[j % kChains], fmaxf(S[4 * j + 2 * i], S[4 * j + 2 * i + 1]));
      }
      max[i] = fmaxf(chain[0], chain[1]);
      if constexpr (!kFirst) {
        max[i] = fmaxf(max[i], row_max[i]);
      }
    }
    tile::quad_max(max);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kFirst) {
        max[i] = (max[i] - row_max[i]) * scale_log2 <= lazy_exponent ? row_max[i] : max[i];
      }
      const float reference = max[i] == kMaskedScore ? 0.0f : max[i];
      factor[i] = kFirst ? 1.0f : prim::exp2_approx((row_max[i] - reference) * scale_log2);
      row_max[i] = max[i];
      shift[i] = reference * scale_log2;
    }
  }

  // S becomes P in the groups of 8 columns kBegin..kEnd - 1, both rows interleaved.
  template <int kBegin, int kEnd>
  PANTILE_DEVICE void exponentiate(float (&S)[kCount], float scale_log2) {
#pragma unroll
    for (int j = kBegin; j < kEnd; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = S[4 * j + 2 * i + c];
          x = prim::exp2_approx(fmaf(x, scale_log2, -shift[i]));
          const int column = 2 * j + c;
          if (column < kChains) {
            sum[i][column] = x;
          } else {
            sum[i][column % kChains] += x;
          }
        }
      }
    }
  }

  template <bool kFirst>
  PANTILE_DEVICE void add_sums() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float step_sum = sum[i][0] + sum[i][1];
      row_sum[i] = kFirst ? step_sum : fmaf(row_sum[i], factor[i], step_sum);
    }
  }

  template <int kOutputs>
  PANTILE_DEVICE void rescale(float (&O)[kOutputs]) const {
    if (__any_sync(prim::kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          O[4 * j + c] *= factor[c / 2];
        }
      }
    }
  }
};

}  // namespace pantile::attn
