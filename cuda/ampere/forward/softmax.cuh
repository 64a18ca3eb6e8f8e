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
// Which unit does what is Config::kSoftmax (config.h), a compile-time choice, because it changes
// the registers and the instructions between the products: docs/design/flashattention-t.md.
#pragma once

#include <cstdint>

#include "ampere/forward/finite.cuh"
#include "ampere/forward/params.cuh"
#include "attn/max_logit.cuh"
#include "attn/tensor_softmax.cuh"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/math.cuh"
#include "prim/special_registers.cuh"
#include "prim/warp.cuh"
#include "tile/row_reduce.cuh"

namespace pantile::ampere {

// kAdds: a term of the logits that is linear in the key is in the scores, but for `base`.
template <class Config, DType kDType, bool kAdds = false>
struct SoftmaxRows {
  static constexpr SoftmaxKind kKind = Config::kSoftmax;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kKeyTiles = Config::kTileK / 8;
  static constexpr int kValueTiles = Config::kHeadDimV / 8;
  static constexpr int kSums = kKind.row_sum == RowSum::vector ? 2 : 4;
  // Every kApart key tiles fp32 sums begin anew: a lane adds up a quarter of its row, and beside a
  // weight of 1 those below 2^-24 would all be lost (2e-4 of the sum, seen at 131,072 keys). Sums
  // of earlier tiles lie in shared memory, one a row; the loops have no registers left. All lanes
  // of a quad read and then write them: a branch for one lane spills 64 bytes.
  static constexpr bool kSumsApart = kKind.row_sum == RowSum::vector;
  static constexpr int kApart = 16;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Weights = std::uint32_t[kRowTiles][4];  // P of 16 keys, the A operand of P V

  float o[kRowTiles][kValueTiles][4];
  float row_sum[kRowTiles][kSums];  // RowSum says what they are
  float minus_max[kRowTiles][2];    // minus the row's reference logit
  float tile_max[kRowTiles][2];  // of the scores that this lane holds: of one key tile, or with a
                                 // shared reference of all so far
  // fast_scale: how far a row may still outgrow its reference; -inf before its first key
  float room[kKind.fast_scale ? kRowTiles : 1][2];
  float scale;                           // positive, includes log2(e)
  float base[kAdds ? kRowTiles : 1][2];  // kAdds: of the logits of this lane's keys of a key tile
  attn::TensorOperand scale_operand, sum_operand;
  // Kinds with a share, in a second run over the block: this key tile had no mask in the first run.
  // What a row gets must not depend on whether another one made a second run necessary.
  bool repeats = false;

  PANTILE_DEVICE void clear(float logit_scale) {
    scale = logit_scale;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) {
        o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.0f;
      }
#pragma unroll
      for (float& sum : row_sum[m]) {
        sum = 0.0f;
      }
      minus_max[m][0] = minus_max[m][1] = kKind.fast_scale ? 0.0f : kNothingSeen;
      if constexpr (kKind.fast_scale) {
        room[m][0] = room[m][1] = -INFINITY;
      }
    }
    if constexpr (kKind.tensor_quarters > 0) {
      scale_operand = attn::shuffle_operand(prim::round_to_tf32(scale), prim::lane_index());
    }
    if constexpr (kKind.row_sum == RowSum::tf32) {
      sum_operand = attn::row_sum_operand(prim::lane_index());
    }
    if constexpr (kKind.shared_reference) {
      clear_max();
    }
  }

  // Between the pieces of a key tile: what comes after is not computed before.
  PANTILE_DEVICE static void keep_order() {
    if constexpr (kKind.ordered) {
      __syncwarp();
    }
  }

  PANTILE_DEVICE void clear_max() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      tile_max[m][0] = tile_max[m][1] = -INFINITY;
    }
  }

  // Before the maxima of a key tile are taken.
  PANTILE_DEVICE void begin_max() {
    if constexpr (!kKind.shared_reference) {
      clear_max();
    }
  }

  PANTILE_DEVICE void take_max(const Scores& s, int m, int j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_max[m][r] = fmaxf(tile_max[m][r], fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
    }
  }

  PANTILE_DEVICE void take_max(const Scores& s) {
    begin_max();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        take_max(s, m, j);
      }
    }
  }

  // After the maxima of a key tile are taken, before its exponentials.
  PANTILE_DEVICE void raise_references(Scores& s, const ReferenceRules& rules,
                                       float* earlier_sums) {
    if constexpr (kAdds) {
      max_to_logits();
    }
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        outgrown |= kKind.fast_scale
                        ? tile_max[m][r] > room[m][r]
                        : above_reference(tile_max[m][r], minus_max[m][r]) > rules.look_limit;
      }
    }
    if (__any_sync(prim::kAllLanes, outgrown)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kKind.shared_reference) {
          raise_shared(m, rules);
        } else {
          const float first = kKind.fast_scale ? lower_scores(s, m, 0, rules)
                                               : raise_reference(m, 0, row_max(m, 0), rules);
          const float second = kKind.fast_scale ? lower_scores(s, m, 1, rules)
                                                : raise_reference(m, 1, row_max(m, 1), rules);
          scale_sums(m, first, second);
          scale_earlier_sums(m, first, second, earlier_sums);
          scale_output(m, first, second);
        }
      }
    }
  }

  // Scores to P, in place. In masked tiles, where scores may be -inf, on vector units, but for
  // those of a second run that had no mask in the first one.
  template <bool kMasked>
  PANTILE_DEVICE void exponentials(Scores& s, int m, int j) {
    float (&x)[4] = s[m][j];
    if constexpr (!kKind.fast_scale) {
      const bool tensor =
          kKind.tensor_quarters > 0 && (kKind.by_rows ? m % 2 == 0 : j % 4 < kKind.tensor_quarters);
      if (!kMasked && tensor) {
        attn::scale_and_add(x, scale_operand, minus_max[m][0], minus_max[m][1]);
      } else if (tensor && repeats) {
        scale_finite(x, scale_operand, scale, minus_max[m]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          x[c] = fmaf(x[c], scale,
                      kAdds ? minus_max[m][c >> 1] + base[m][c >> 1] : minus_max[m][c >> 1]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[c] = prim::exp2_approx(x[c]);
    }
    if constexpr (kKind.row_sum == RowSum::tf32) {
      if (!kMasked) {
        attn::add_row_sums(row_sum[m], x, sum_operand);
      } else if (repeats) {
        add_finite_sums(row_sum[m], x, sum_operand);
      }
    }
  }

  // P of 16 keys to 16 bits, and into the row sums.
  template <bool kMasked>
  PANTILE_DEVICE void pack(const Scores& s, int m, int group, std::uint32_t (&p)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&x)[4] = s[m][2 * group + half];
      if constexpr (kKind.row_sum == RowSum::vector) {
        row_sum[m][0] += x[0];
        row_sum[m][1] += x[2];
        row_sum[m][0] += x[1];
        row_sum[m][1] += x[3];
      }
      p[2 * half] = prim::pack<kDType>(x[0], x[1]);
      p[2 * half + 1] = prim::pack<kDType>(x[2], x[3]);
    }
    if constexpr (kKind.row_sum == RowSum::operand) {
      attn::add_row_sums<kDType>(row_sum[m], p);
    }
    if (kKind.row_sum == RowSum::tf32 && kMasked && !repeats) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      attn::add_row_sums<kDType>(sums, p);
      row_sum[m][0] += sums[0];
      row_sum[m][1] += sums[2];
    }
  }

  // earlier_sums: of the block's rows. Before the first key tile.
  PANTILE_DEVICE static void clear_earlier_sums(float* earlier_sums) {
    if constexpr (kSumsApart) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        lane_rows(earlier_sums)[8 * i] = 0.0f;
      }
    }
  }

  // Between the exponentials of two key tiles; n is one of them, and always the same of the two.
  PANTILE_DEVICE void set_sums_apart(float* earlier_sums, int n) {
    if (kSumsApart && n % kApart == kApart - 1) {
      float* const rows = lane_rows(earlier_sums);
      float sums[2 * kRowTiles];
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        sums[i] = rows[8 * i] + tile::quad_sum(row_sum[i / 2][i % 2]);
        row_sum[i / 2][i % 2] = 0.0f;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        rows[8 * i] = sums[i];
      }
    }
  }

  // After the last key tile, before rows are finished, by one lane of each quad.
  PANTILE_DEVICE void take_earlier_sums(float* earlier_sums) {
    if constexpr (kSumsApart) {
      const bool first = prim::fresh_thread_index() % 4 == 0;
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        row_sum[i / 2][i % 2] += first ? lane_rows(earlier_sums)[8 * i] : 0.0f;
      }
    }
  }

  // Joins the partial sums of a row, by all lanes, once. The row's sum is total(m, r) from then on:
  // NaN if the row's logits are too large.
  PANTILE_DEVICE void finish_row(int m, int r) {
    const int at = kKind.row_sum == RowSum::operand ? 2 * r : r;
    float sum = row_sum[m][at];
    if constexpr (kKind.row_sum == RowSum::vector) {
      sum = tile::quad_sum(sum);
    }
    const float reference = minus_max[m][r];
    if (fabsf(reference) >= kReferenceLimit<kDType> && reference != kNothingSeen) {
      sum = NAN;
    }
    row_sum[m][at] = sum;
  }

  PANTILE_DEVICE float total(int m, int r) const {
    return kKind.row_sum == RowSum::vector    ? row_sum[m][r]
           : kKind.row_sum == RowSum::operand ? row_sum[m][2 * r]
                                              : row_sum[m][r] + row_sum[m][r + 2];
  }

  // What a sink weighs beside the P of a row: infinitely much if the row has no keys or only such
  // that the sink leaves nothing of.
  PANTILE_DEVICE float sink_weight(int m, int r, float sink) const {
    return prim::exp2_approx(fmaf(sink, core::kLog2E, minus_max[m][r]));
  }

  // Of a finished row and the weight of its sink, or 0: what O is multiplied by.
  PANTILE_DEVICE float normaliser(int m, int r, float sink_weight) const {
    const float sum = total(m, r) + sink_weight;
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }

  PANTILE_DEVICE float log_sum_exp(int m, int r, float sink_weight) const {
    const float sum = total(m, r) + sink_weight;
    return sum == 0.0f ? -INFINITY : (log2f(sum) - minus_max[m][r]) * core::kLn2;
  }

  // Of a finished row whose reference is its maximum; as attn::raise_max_logit takes it.
  PANTILE_DEVICE int max_logit(int m, int r, const ReferenceRules& rules) const {
    return attn::row_logit_order((rules.p_offset - minus_max[m][r]) * core::kLn2, total(m, r));
  }

  // Whether a row of this lane met a NaN.
  PANTILE_DEVICE bool holds_nan() const {
    bool found = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      found |= isnan(total(m, 0)) || isnan(total(m, 1));
    }
    return found;
  }

  // The largest score of a row in this key tile, in all lanes of its quad.
  PANTILE_DEVICE float row_max(int m, int r) const {
    float most = tile_max[m][r];
    most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, 1));
    return fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, 2));
  }

  PANTILE_DEVICE void scale_sums(int m, float first, float second) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int r = kKind.row_sum == RowSum::operand ? i / 2 : i % 2;
      row_sum[m][i] *= r == 0 ? first : second;
    }
  }

  PANTILE_DEVICE void scale_output(int m, float first, float second) {
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        o[m][j][c] *= c < 2 ? first : second;
      }
    }
  }

 private:
  // From this lane's first row on; the next one lies 8 further.
  PANTILE_DEVICE static float* lane_rows(float* earlier_sums) {
    const int thread = prim::fresh_thread_index();
    return earlier_sums + thread / 32 * Config::kWarpRows + thread % 32 / 4;
  }

  PANTILE_DEVICE static void scale_earlier_sums(int m, float first, float second,
                                                float* earlier_sums) {
    if constexpr (kSumsApart) {
      float* const rows = lane_rows(earlier_sums) + m * 16;
      const float upper = rows[0], lower = rows[8];
      __syncwarp();
      rows[0] = upper * first;
      rows[8] = lower * second;
    }
  }

  // How far a maximum lies above a reference: maxima are scores, with kAdds logits.
  PANTILE_DEVICE float above_reference(float most, float minus_reference) const {
    return kAdds ? most + minus_reference : fmaf(most, scale, minus_reference);
  }

  PANTILE_DEVICE void max_to_logits() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[m][r] = __fmaf_ru(tile_max[m][r], scale, base[m][r]);
      }
    }
  }

  // Returns the factor by which the row's sum and output shrink; 1 if its reference stays.
  PANTILE_DEVICE float raise_reference(int m, int r, float most, const ReferenceRules& rules) {
    const float before = minus_max[m][r];
    if (above_reference(most, before) > rules.raise_limit) {
      // Down, so that P at the maximum is never above 2^p_offset.
      minus_max[m][r] =
          kAdds ? __fadd_rd(-most, rules.p_offset) : __fmaf_rd(-most, scale, rules.p_offset);
    }
    return prim::exp2_approx(minus_max[m][r] - before);
  }

  // fast_scale: scores are logits with the reference subtracted already.
  PANTILE_DEVICE float lower_scores(Scores& s, int m, int r, const ReferenceRules& rules) {
    const float most = row_max(m, r);
    const bool first = room[m][r] < 0.0f;
    float growth = 0.0f;
    if (most > -INFINITY && (first || most > rules.raise_limit)) {
      growth = most - rules.p_offset;
      room[m][r] = rules.raise_limit;
    }
    minus_max[m][r] -= growth;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      s[m][j][2 * r] -= growth;
      s[m][j][2 * r + 1] -= growth;
    }
    return first ? 1.0f : prim::exp2_approx(-growth);
  }

  // One reference for the 16 rows of a tile, the largest of their maxima, as long as every row that
  // has seen a key keeps exponents that its P resolves; otherwise, in this key tile, each its own.
  PANTILE_DEVICE void raise_shared(int m, const ReferenceRules& rules) {
    const float most[2] = {row_max(m, 0), row_max(m, 1)};
    const float largest = attn::warp_max(fmaxf(most[0], most[1]));
    bool safe = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      safe &= most[r] == -INFINITY || (largest - most[r]) * scale <= rules.shared_reach;
    }
    safe = __all_sync(prim::kAllLanes, safe);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool shares = safe && most[r] > -INFINITY;
      factor[r] = raise_reference(m, r, shares ? largest : most[r], rules);
    }
    const float any = __shfl_sync(prim::kAllLanes, factor[0], 0);
    const bool same = factor[0] == any && factor[1] == any;
    // An infinity or a NaN of V in one row's output would make NaN of another row's.
    if (__all_sync(prim::kAllLanes, same && all_finite(o[m]))) {
      // The sums shrink by the factor that the tensor cores read.
      const std::uint32_t rounded = prim::round_to_tf32(any);
      scale_sums(m, __uint_as_float(rounded), __uint_as_float(rounded));
      const attn::TensorOperand operand =
          attn::shuffle_operand(rounded, prim::fresh_thread_index() % 32);
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) {
        attn::scale_rows(o[m][j], operand);
      }
    } else {
      scale_sums(m, factor[0], factor[1]);
      scale_output(m, factor[0], factor[1]);
    }
  }
};

}  // namespace pantile::ampere
