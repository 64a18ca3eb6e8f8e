// What the FP8 backward rounds, in which units, and the parts of a tile that share a scale. CPU and
// GPU agree on it; docs/design/fp8-backward.md has the algebra.
//
// A step is 64 queries x 128 keys. dO has a scale for each 128 rows of a sequence, like Q. P has
// one for each 16 keys of a step (those of a warp), dS one for the whole step: both follow the
// largest number that is there, so that rows of any length and gradients of any size use all of
// e4m3.
#pragma once

#include "core/host_device.h"
#include "core/scaling.h"

namespace pantile::core {

inline constexpr int kFp8StepRows = 64;
inline constexpr int kFp8StepKeys = 128;
inline constexpr int kFp8ScaledKeys = 16;

// The product dP = dO V^T is summed in fp16, too. V has codes to 448, which as an operand of it are
// multiplied by this power of two. That is exact but for numbers below 2^-10 of the largest of
// their block. Then |dP| is at most 128 * 28 * 16, above head dim 128 256 * 14 * 15.
PANTILE_HD constexpr float value_row_factor(int head_dim_v) {
  return head_dim_v <= 128 ? 0.0625f : 0.03125f;
}

// The largest code of dO: as of Q and K.
PANTILE_HD constexpr float gradient_code_limit(int head_dim_v) {
  return score_code_limit(head_dim_v);
}

// P and dS are rounded twice: to pairs that are quick to compare, then to e4m3. P times this power
// of two becomes fp16, dS bf16, which has the range of float.
inline constexpr float kWeightUnits = 256.0f;
inline constexpr float kLeastWeightScale = 3.0517578125e-5f;  // 2^-15

// Of P in these units, from the largest that shares it. fp16 holds its inverse.
PANTILE_HD constexpr BlockScale weight_scale(float amax) {
  const BlockScale scale = block_scale(amax, kE4m3Max);
  return scale.scale < kLeastWeightScale ? BlockScale{kLeastWeightScale, 1.0f / kLeastWeightScale}
                                         : scale;
}

// Of dS, from the largest finite magnitude of the step.
PANTILE_HD constexpr BlockScale score_gradient_scale(float amax) {
  return block_scale(amax, kE4m3Max);
}

}  // namespace pantile::core
