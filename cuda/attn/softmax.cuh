// The online softmax of the two rows a thread shares with its quad, in base 2 (core/softmax_state.h
// has the algebra). Scores stay unscaled: P = exp2(S * scale_log2 - shift) is one FFMA and one EX2.
// scale_log2 is positive. Variants make other exponents of the scores: `logits`, see variant.cuh.
//
// Any shift gives the exact result, as long as P and the sums neither overflow nor vanish; it need
// not be the row's maximum. The first step of a row takes the largest of its first scores, which is
// at most the maximum, so that nothing vanishes. Overflow shows in the sum of a step's P, which is
// computed anyhow: only when that is too large (or NaN) somewhere in a warp does the warp look for
// the true maximum, and do the step again. So a step nearly always does without a maximum: 72
// instructions of 370 less, and no exchange between lanes. Order of a step:
//   1. start     the shift; a row's first step only
//   2. open      the shift of rows whose first keys come in a later step; steps with a mask only
//   3. exponentiate  P of the first scores, as many as fill the wait for the product before
//   4. finish    P of the others, 16-bit P, the sums of the step; do they hold?
//   5. correct   only if they do not: the maximum, P and the sums again; O shrinks by `factor`
//   6. add       the sums of the step
// What a row does depends on its own scores only: a NaN that another row of the warp sees, or that
// lies past its sequence, must not change a bit of it.
#pragma once

#include "attn/mask.cuh"
#include "attn/variant.cuh"
#include "prim/convert.cuh"
#include "prim/exp2_polynomial.cuh"
#include "prim/math.cuh"
#include "tile/row_reduce.cuh"

namespace pantile::attn {

// A thread's share of a row's P in one step sums to no more than this, or the step is corrected.
// The largest f16 is 65504; without an outlier a share sums to the number of its columns at most.
inline constexpr float kLargestStepSum = 16384.0f;

template <int kCount>
struct OnlineSoftmax {
  // Independent chains of each row's sum; more do not help, one costs 2-5 %.
  static constexpr int kChains = 2;
  static constexpr int kColumnGroups = kCount / 4;  // of 8 columns
  static constexpr int kSteps = kCount / 8;         // of 16 columns: of the product with V
  static constexpr int kStartGroups = 4;            // that the first shift comes from

  float shift[2];    // a base-2 logit; -inf before the row has seen a key
  float row_sum[2];  // of this thread's columns only
  float step_sum[2];
  float factor[2];   // by which a correction shrinks O
  float row_max[2];  // of this thread's columns only, as logits.comparable(); by note_max

  // The first scores of a row.
  template <class Logits>
  PANTILE_DEVICE void start(const float (&S)[kCount], const Logits& logits) {
    find_max<kStartGroups>(S, logits, shift);
    tile::quad_max(shift);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = logits.shift_of(shift[i]);
      row_sum[i] = 0.0f;
      row_max[i] = kMaskedScore;
    }
  }

  // After start(): a sink of `logit` (natural) is one more key, without a value. Its weight is the
  // first of the sum, in the lane of the quad that counts it.
  PANTILE_DEVICE void add_sink(float logit, bool counts) {
    const float sink = logit * core::kLog2E;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = fmaxf(shift[i], sink);
      const float weight = prim::exp2_approx(sink - base<true>(i));
      row_sum[i] = counts ? weight : 0.0f;
    }
  }

  // Rows that had nothing to see in the steps before, and do now. As in start(), the first scores
  // give the shift where the row sees one of them: a row has the same shift, and so the same bits,
  // in whichever step of its tile of rows its first keys come.
  template <class Logits>
  PANTILE_DEVICE void open(const float (&S)[kCount], const Logits& logits) {
    if (__any_sync(prim::kAllLanes, unseen())) {
      open_by<kStartGroups>(S, logits);
      if (__any_sync(prim::kAllLanes, unseen())) {
        open_by<kColumnGroups>(S, logits);
      }
    }
  }

  // For the largest logit, which nothing else needs.
  template <class Logits>
  PANTILE_DEVICE void note_max(const float (&S)[kCount], const Logits& logits) {
    float largest[2];
    find_max<kColumnGroups>(S, logits, largest);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_max[i] = fmaxf(row_max[i], largest[i]);
    }
  }

  // What P is computed with. Under a mask rows may have seen nothing yet, and still see nothing:
  // then P must be 0, not NaN.
  template <bool kMasked>
  PANTILE_DEVICE float base(int i) const {
    return kMasked && shift[i] == kMaskedScore ? 0.0f : shift[i];
  }

  // P of the first groups of 8 columns.
  template <bool kMasked, int kElements, class Logits>
  PANTILE_DEVICE void exponentiate(float (&P)[kElements], const float (&S)[kCount],
                                   const Logits& logits) const {
    const float bases[2] = {base<kMasked>(0), base<kMasked>(1)};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      P[e] = weight(S[e], e, logits, bases);
    }
  }

  // All of P in 16 bits, the first kAhead groups from `ahead`, and its sums. False: wrong, because
  // in some row of the warp the shift is too small, or (without a mask) it has seen its first key,
  // or there is NaN.
  template <DType kDType, bool kMasked, int kAhead, class Logits>
  PANTILE_DEVICE bool finish(std::uint32_t (&P)[kSteps][4], const float (&ahead)[4 * kAhead],
                             const float (&S)[kCount], const Logits& logits) {
    const float bases[2] = {base<kMasked>(0), base<kMasked>(1)};
    convert<kDType>(P, [&](int e) {
      return e < 4 * kAhead ? ahead[e < 4 * kAhead ? e : 0] : weight(S[e], e, logits, bases);
    });
    return !__any_sync(prim::kAllLanes, !(holds(0) && holds(1)));
  }

  // After a finish that did not hold.
  template <DType kDType, class Logits>
  PANTILE_DEVICE void correct(std::uint32_t (&P)[kSteps][4], const float (&S)[kCount],
                              const Logits& logits) {
    float largest[2], wrong[2] = {holds(0) ? 0.0f : 1.0f, holds(1) ? 0.0f : 1.0f};
    find_max<kColumnGroups>(S, logits, largest);
    tile::quad_max(largest);
    tile::quad_max(wrong);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float old = shift[i];
      shift[i] = wrong[i] > 0.0f ? fmaxf(old, logits.shift_of(largest[i])) : old;
      factor[i] = wrong[i] > 0.0f ? prim::exp2_approx(old - base<true>(i)) : 1.0f;
      row_sum[i] *= factor[i];
    }
    const float bases[2] = {base<true>(0), base<true>(1)};
    convert<kDType>(P, [&](int e) { return weight(S[e], e, logits, bases); });
  }

  PANTILE_DEVICE void add() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += step_sum[i];
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
  PANTILE_DEVICE bool unseen() const {
    return shift[0] == kMaskedScore || shift[1] == kMaskedScore;
  }

  // By the largest of the first kGroups groups of 8 columns.
  template <int kGroups, class Logits>
  PANTILE_DEVICE void open_by(const float (&S)[kCount], const Logits& logits) {
    float largest[2];
    find_max<kGroups>(S, logits, largest);
    tile::quad_max(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = shift[i] == kMaskedScore ? logits.shift_of(largest[i]) : shift[i];
    }
  }

  // `bases`: of the thread's two rows, see base().
  template <class Logits>
  static PANTILE_DEVICE float weight(float score, int e, const Logits& logits,
                                     const float (&bases)[2]) {
    const float exponent = logits.exponent(score, e, bases[row_of(e)]);
    if (Logits::by_polynomial(e)) {
      return prim::exp2_polynomial(fminf(exponent, 127.0f));  // finite, and too large to hold
    }
    return prim::exp2_approx(exponent);
  }

  // False also for NaN.
  PANTILE_DEVICE bool holds(int i) const { return step_sum[i] <= kLargestStepSum; }

  // P of element e from `weight_of(e)`, to 16 bits; and the sums of the step.
  template <DType kDType, class WeightOf>
  PANTILE_DEVICE void convert(std::uint32_t (&P)[kSteps][4], const WeightOf& weight_of) {
    float sum[2][kChains];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int e = 8 * step + 2 * r;
        const float left = weight_of(e), right = weight_of(e + 1);
        sum[r % 2][0] = e < 4 ? left : sum[r % 2][0] + left;
        sum[r % 2][1] = e < 4 ? right : sum[r % 2][1] + right;
        P[step][r] = prim::pack<kDType>(left, right);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      step_sum[i] = sum[i][0] + sum[i][1];
    }
  }

  // Of the first kGroups groups of 8 columns, of this thread.
  template <int kGroups, class Logits>
  static PANTILE_DEVICE void find_max(const float (&S)[kCount], const Logits& logits,
                                      float (&max)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float chain[kChains];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int e = 4 * j + 2 * i;
        const float larger = fmaxf(logits.comparable(S[e], e), logits.comparable(S[e + 1], e + 1));
        chain[j % kChains] = j < kChains ? larger : fmaxf(chain[j % kChains], larger);
      }
      max[i] = fmaxf(chain[0], chain[1]);
    }
  }
};

}  // namespace pantile::attn
