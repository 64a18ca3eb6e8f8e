// Scales of the FP8 backward: sums that fp16 holds, and weights whose scale it can invert.
#include "core/fp8_steps.h"

#include <gtest/gtest.h>

#include <cmath>

namespace {

using pantile::core::block_scale;
using pantile::core::gradient_code_limit;
using pantile::core::kE4m3Max;
using pantile::core::kLeastWeightScale;
using pantile::core::score_gradient_scale;
using pantile::core::value_row_factor;
using pantile::core::weight_scale;

constexpr float kLargestHalf = 65504.0f;

// The largest |dP| of codes: every product of a row at its limits.
float largest_product(int head_dim_v, float factor) {
  return static_cast<float>(head_dim_v) * kE4m3Max * factor * gradient_code_limit(head_dim_v);
}

TEST(Fp8Steps, ProductsWithValuesFitFp16) {
  for (const int head_dim_v : {64, 96, 128, 160, 192, 256}) {
    const float factor = value_row_factor(head_dim_v);
    EXPECT_LE(largest_product(head_dim_v, factor), kLargestHalf) << head_dim_v;
    int exponent = 0;
    EXPECT_EQ(std::frexp(factor, &exponent), 0.5f) << "a power of two, so that it is exact";
  }
  // No larger power of two would do at the ends of both ranges.
  EXPECT_GT(largest_product(128, 2.0f * value_row_factor(128)), kLargestHalf);
  EXPECT_GT(largest_product(256, 2.0f * value_row_factor(256)), kLargestHalf);
}

TEST(Fp8Steps, ScalesOfWeightsHaveInversesInFp16) {
  for (const float amax : {0.0f, 1e-30f, 1e-6f, 1e-3f, 0.1f, 1.0f, 16.0f, 256.0f}) {
    const auto scale = weight_scale(amax);
    EXPECT_GE(scale.scale, kLeastWeightScale) << amax;
    EXPECT_LE(scale.inverse, kLargestHalf) << amax;
    EXPECT_NEAR(scale.scale * scale.inverse, 1.0f, 1e-6f) << amax;
    EXPECT_LE(amax * scale.inverse, kE4m3Max * 1.000001f) << amax;
  }
}

TEST(Fp8Steps, LargeWeightsUseAllOfE4m3) {
  const auto scale = weight_scale(100.0f);
  EXPECT_LE(100.0f * scale.inverse, kE4m3Max);
  EXPECT_GT(100.0f * scale.inverse, kE4m3Max / 2.0f);  // scales are powers of two
}

TEST(Fp8Steps, GradientsOfAnySizeUseAllOfE4m3) {
  for (const float amax : {1e-12f, 1e-6f, 1.0f, 1e20f}) {
    const auto scale = score_gradient_scale(amax);
    EXPECT_EQ(scale.scale, block_scale(amax, kE4m3Max).scale) << amax;
    EXPECT_LE(amax * scale.inverse, kE4m3Max) << amax;
    EXPECT_GT(amax * scale.inverse, kE4m3Max / 2.0f) << amax;
  }
}

}  // namespace
