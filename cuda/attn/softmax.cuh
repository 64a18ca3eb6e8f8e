// The online softmax of the two rows a thread shares with its quad, in base 2 (core/softmax_state.h
// has the algebra). Scores stay unscaled: exp2(S * scale_log2 - max * scale_log2) is one FFMA and
// one EX2. scale_log2 is positive.
//
// A row's maximum is raised only when it grew by more than `slack`; until then the old one goes on
// being subtracted from scores and used in the LSE, so the result is exact, and O is rarely
// rescaled (measured: +3 to +6 %). So the old maximum is nearly always still the right one, and
// nothing has to wait for the new: a step guesses that it is. Order of a step:
//   1. guess      the first exponentials with the old maxima, while the new ones are being found
//   2. correct    only if some row of the warp grew by more than the slack: raise, do 1 again
//   3. finish     the other exponentials, and the row sums
//   4. rescale O  after a correction, somewhere when O is not in flight
// The first step of a row has no old maximum: `start` instead of 1 and 2. The guess takes the
// maxima, 230 of a step's 830 cycles, out of the chain of dependent instructions.
#pragma once

#include "attn/mask.cuh"
#include "prim/math.cuh"
#include "tile/row_reduce.cuh"

namespace pantile::attn {

// The slack as a power of two: exp2 stays below 2^8 (65504 is the largest f16).
inline constexpr float kLazyExponent = 8.0f;

template <int kCount>
struct OnlineSoftmax {
  // Independent chains of each row's maximum and sum; more do not help, one costs 2-5 %.
  static constexpr int kChains = 2;
  static constexpr int kColumnGroups = kCount / 4;  // of 8 columns

  float row_max[2];  // unscaled; -inf before the row has seen a key
  float row_sum[2];  // of this thread's columns only
  float factor[2];   // by which a correction shrinks O
  float shift[2];    // row_max * scale_log2, or 0 for a row that has seen nothing

  // The first scores of a row.
  PANTILE_DEVICE void start(const float (&S)[kCount], float scale_log2) {
    find_max(S, row_max);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = reference(row_max[i]) * scale_log2;
      row_sum[i] = 0.0f;
    }
  }

  // P of the first `kAhead` groups of columns if no row's maximum grew by more than `slack`; and
  // the largest scores. False: some row's did, or has seen its first key.
  template <int kAhead>
  PANTILE_DEVICE bool guess(const float (&S)[kCount], float (&P)[4 * kAhead], float (&largest)[2],
                            float scale_log2, float slack) const {
    const float limit[2] = {row_max[0] + slack, row_max[1] + slack};
    exponentiate_to(P, S, scale_log2);
    find_max(S, largest);
    const bool right = largest[0] <= limit[0] && largest[1] <= limit[1];
    return !__any_sync(prim::kAllLanes, !right);
  }

  // After a wrong guess.
  template <int kAhead>
  PANTILE_DEVICE void correct(const float (&S)[kCount], float (&P)[4 * kAhead],
                              const float (&largest)[2], float scale_log2, float slack) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float old = row_max[i];
      row_max[i] = largest[i] <= old + slack ? old : fmaxf(largest[i], old);
      factor[i] = prim::exp2_approx((old - reference(row_max[i])) * scale_log2);
      shift[i] = reference(row_max[i]) * scale_log2;
      row_sum[i] *= factor[i];
    }
    exponentiate_to(P, S, scale_log2);
  }

  // S becomes P from group `kFrom` on (the groups before are P already); adds P to the row sums.
  template <int kFrom>
  PANTILE_DEVICE void finish(float (&S)[kCount], float scale_log2) {
    exponentiate<kFrom, kColumnGroups>(S, scale_log2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum[kChains] = {S[2 * i], S[2 * i + 1]};
#pragma unroll
      for (int j = 1; j < kColumnGroups; ++j) {
#pragma unroll
        for (int c = 0; c < kChains; ++c) {
          sum[c] += S[4 * j + 2 * i + c];
        }
      }
      row_sum[i] += sum[0] + sum[1];
    }
  }

  // S becomes P in the groups kBegin..kEnd - 1, both rows interleaved.
  template <int kBegin, int kEnd>
  PANTILE_DEVICE void exponentiate(float (&S)[kCount], float scale_log2) const {
#pragma unroll
    for (int e = 4 * kBegin; e < 4 * kEnd; ++e) {
      S[e] = prim::exp2_approx(fmaf(S[e], scale_log2, -shift[e / 2 % 2]));
    }
  }

  template <int kOutputs>
  PANTILE_DEVICE void rescale(float (&O)[kOutputs]) const {
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) {
      O[e] *= factor[e / 2 % 2];
    }
  }

 private:
  static PANTILE_DEVICE float reference(float max) { return max == kMaskedScore ? 0.0f : max; }

  template <int kElements>
  PANTILE_DEVICE void exponentiate_to(float (&P)[kElements], const float (&S)[kCount],
                                      float scale_log2) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      P[e] = prim::exp2_approx(fmaf(S[e], scale_log2, -shift[e / 2 % 2]));
    }
  }

  static PANTILE_DEVICE void find_max(const float (&S)[kCount], float (&max)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float chain[kChains];
#pragma unroll
      for (int j = 0; j < kColumnGroups; ++j) {
        const float larger = fmaxf(S[4 * j + 2 * i], S[4 * j + 2 * i + 1]);
        chain[j % kChains] = j < kChains ? larger : fmaxf(chain[j % kChains], larger);
      }
      max[i] = fmaxf(chain[0], chain[1]);
    }
    tile::quad_max(max);
  }
};

}  // namespace pantile::attn
