// Logits from 2^24 on, where a unit in the last place is 2: a softmax of its own, in the branch
// that raises references.
//
// Elsewhere P = exp2(FFMA(score, scale, -reference)), and the FFMA does not round the product. What
// it leaves of the row's maximum is up to half a unit in the last place of the reference: beyond
// 2^30 that is enough for a P of 0 or infinity. So logits are rounded to fp32 first, as textbook
// attention does it. A warp that comes by large logits puts the references of its rows into shared
// memory for good (the loops have no registers for more) and leaves in the place of scores their
// logits' distance from the reference, divided by the scale, so that the exponentials stay as they
// are.
#pragma once

#include "ampere/forward_params.cuh"
#include "prim/math.cuh"
#include "prim/special_registers.cuh"
#include "prim/warp.cuh"

namespace pantile::ampere {

inline constexpr float kLargeLogit = 16777216.0f;  // 2^24

// In the place of references that are in shared memory. So small that it is nothing beside any
// exponent; no reference has this value.
inline constexpr float kReferencesAreShared = 0x1.555556p-120f;

template <class Softmax>
struct LargeLogits {
  using Scores = typename Softmax::Scores;
  static constexpr int kRowTiles = Softmax::kRowTiles;

  PANTILE_DEVICE static bool met(const Softmax& rows) {
    return rows.minus_max[0][0] == kReferencesAreShared;
  }

  // By the warp, in this key tile or one before. A maximum that the scale makes infinite is large,
  // too: its row becomes NaN, as by any overflow.
  PANTILE_DEVICE static bool meets(const Softmax& rows) {
    bool large = met(rows);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = fabsf(rows.tile_max[m][r]);
        large |= most < INFINITY && most * rows.scale >= kLargeLogit;
      }
    }
    return __any_sync(prim::kAllLanes, large);
  }

  // references: of the block's rows, in shared memory.
  PANTILE_DEVICE static void raise(Softmax& rows, Scores& s, const ReferenceRules& rules,
                                   float* references) {
    const bool shared = met(rows);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float before[2], factor[2];
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        before[r] = shared ? *reference(references, m, r) : rows.minus_max[m][r];
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = __fmul_rn(rows.row_max(m, r), rows.scale);
        const float now =
            __fadd_rn(most, before[r]) > rules.raise_limit ? rules.p_offset - most : before[r];
        factor[r] = prim::exp2_approx(now - before[r]);
        *reference(references, m, r) = now;  // all lanes of a quad write the same
        rows.minus_max[m][r] = kReferencesAreShared;
#pragma unroll
        for (int j = 0; j < Softmax::kKeyTiles; ++j) {
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; ++c) {
            s[m][j][c] = __fadd_rn(__fmul_rn(s[m][j][c], rows.scale), now) * rules.inverse_scale;
          }
        }
      }
      rows.scale_sums(m, factor[0], factor[1]);
      rows.scale_output(m, factor[0], factor[1]);
    }
  }

  // Before rows are finished.
  PANTILE_DEVICE static void take_references(Softmax& rows, float* references) {
    if (met(rows)) {
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          rows.minus_max[m][r] = *reference(references, m, r);
        }
      }
    }
  }

 private:
  PANTILE_DEVICE static float* reference(float* references, int m, int r) {
    const int thread = prim::fresh_thread_index();
    return references + thread / 32 * Softmax::kWarpRows + m * 16 + r * 8 + thread % 32 / 4;
  }
};

}  // namespace pantile::ampere
