// e4m3 against its definition and a search of the nearest number; block scales against their
// bounds.
#include "core/scaling.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/bits.h"

namespace {

using pantile::core::bits_float;
using pantile::core::block_scale;
using pantile::core::BlockScale;
using pantile::core::decode_e4m3;
using pantile::core::encode_e4m3;
using pantile::core::first_packed_block;
using pantile::core::float_bits;
using pantile::core::kE4m3Max;
using pantile::core::kLargestFloat;
using pantile::core::kSmallestScale;
using pantile::core::packed_blocks;
using pantile::core::quantize;
using pantile::core::raise_amax;
using pantile::core::scale_blocks;
using pantile::core::scale_ratio;
using pantile::core::stored_value_scale;
using pantile::core::value_unit;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The number of code 0..0x7e by the definition of the format.
double magnitude_of(int code) {
  const int exponent = code >> 3;
  const int mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

const std::array<double, 127> kMagnitudes = [] {
  std::array<double, 127> table{};
  for (int code = 0; code < 127; ++code) {
    table[static_cast<std::size_t>(code)] = magnitude_of(code);
  }
  return table;
}();

// Nearest code by bisection over the table; a tie goes to the even code.
int nearest_code(double magnitude) {
  if (magnitude >= 448.0) {
    return 126;
  }
  int low = 0;
  int high = 126;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (kMagnitudes[static_cast<std::size_t>(middle)] <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - kMagnitudes[static_cast<std::size_t>(low)];
  const double above = kMagnitudes[static_cast<std::size_t>(high)] - magnitude;
  return below < above || (below == above && low % 2 == 0) ? low : high;
}

void expect_nearest(float x) {
  const int expected =
      nearest_code(std::fabs(static_cast<double>(x))) | (std::signbit(x) ? 128 : 0);
  if (encode_e4m3(x) != expected) {
    FAIL() << x << " gave " << static_cast<int>(encode_e4m3(x)) << " instead of " << expected;
  }
}

TEST(Scaling, EveryCodeDecodesToItsDefinitionAndEncodesBack) {
  for (int code = 0; code < 256; ++code) {
    const float x = decode_e4m3(static_cast<std::uint8_t>(code));
    if ((code & 127) == 127) {
      ASSERT_TRUE(std::isnan(x));
      ASSERT_EQ(encode_e4m3(x), 127);
      continue;
    }
    ASSERT_EQ(static_cast<double>(std::fabs(x)), magnitude_of(code & 127)) << code;
    ASSERT_EQ(std::signbit(x), code >= 128) << code;
    ASSERT_EQ(encode_e4m3(x), code);
  }
  EXPECT_EQ(decode_e4m3(0x7e), kE4m3Max);
}

TEST(Scaling, FloatsOfAllMagnitudesEncodeToTheNearestCode) {
  for (std::uint32_t high = 0; high < 0x7f80u; ++high) {  // every finite bf16, and floats beside it
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = bits_float(high << 16 | low);
      expect_nearest(x);
      expect_nearest(-x);
      ASSERT_FALSE(HasFailure());
    }
  }
  for (std::uint32_t bits = float_bits(std::ldexp(1.0f, -12)); bits < float_bits(600.0f);
       bits += 211) {
    expect_nearest(bits_float(bits));
    ASSERT_FALSE(HasFailure());
  }
}

TEST(Scaling, TiesGoToEvenAndTheirNeighboursDoNot) {
  for (std::size_t code = 0; code < 126; ++code) {
    const auto tie = static_cast<float>((kMagnitudes[code] + kMagnitudes[code + 1]) / 2);
    ASSERT_EQ(encode_e4m3(tie), code % 2 == 0 ? code : code + 1);
    ASSERT_EQ(encode_e4m3(std::nextafter(tie, 0.0f)), code);
    ASSERT_EQ(encode_e4m3(std::nextafter(tie, 1e9f)), code + 1);
  }
}

TEST(Scaling, LargeNumbersSaturateAndNaNStays) {
  for (const float x : {448.0f, 449.0f, 463.9f, 464.0f, 480.0f, 1e9f, kLargestFloat, kInfinity}) {
    EXPECT_EQ(encode_e4m3(x), 0x7e) << x;
    EXPECT_EQ(encode_e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(encode_e4m3(kNaN), 0x7f);
  EXPECT_EQ(encode_e4m3(-kNaN), 0x7f);
}

TEST(Scaling, RowsAndBlocksCountFromTheStartOfTheSequence) {
  for (const int block_rows : {64, 128}) {
    for (int length = 0; length <= 600; ++length) {
      ASSERT_EQ(scale_blocks(length, block_rows), length == 0 ? 0 : (length - 1) / block_rows + 1);
    }
  }
}

TEST(Scaling, BlocksOfPackedSequencesNeverOverlap) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const int block_rows = repeat % 2 == 0 ? 64 : 128;
    const int batch = 1 + static_cast<int>(random() % 6);
    std::int64_t begin = 0;
    std::int64_t free = 0;
    for (int b = 0; b < batch; ++b) {
      const int length = static_cast<int>(random() % (random() % 2 == 0 ? 4 : 400));
      ASSERT_GE(first_packed_block(begin, b, block_rows), free);
      free = first_packed_block(begin, b, block_rows) + scale_blocks(length, block_rows);
      begin += length;
    }
    ASSERT_LE(free, packed_blocks(begin, batch, block_rows));
  }
  EXPECT_EQ(first_packed_block(1LL << 40, 3, 64), (1LL << 34) + 3);
}

bool is_power_of_two(float x) {
  return (float_bits(x) & 0x7fffffu) == 0 && std::isnormal(x);
}

void expect_tight(float amax, float limit) {
  const BlockScale block = block_scale(amax, limit);
  ASSERT_TRUE(is_power_of_two(block.scale)) << amax << " limit " << limit;
  ASSERT_TRUE(is_power_of_two(block.inverse)) << amax << " limit " << limit;
  ASSERT_EQ(block.scale * block.inverse, 1.0f) << amax << " limit " << limit;
  ASSERT_TRUE(std::isfinite(block.scale * limit)) << amax << " limit " << limit;
  const double most = static_cast<double>(block.scale) * limit;
  const bool is_largest = 2 * most > static_cast<double>(kLargestFloat);
  if (!is_largest) {
    ASSERT_GE(most, amax) << "values above the limit at " << amax << " limit " << limit;
  }
  if (block.scale > kSmallestScale) {
    ASSERT_LT(most / 2, amax) << "a smaller scale does for " << amax << " limit " << limit;
  }
}

TEST(Scaling, ScalesAreTheSmallestSufficientPowersOfTwo) {
  for (const float limit : {448.0f, 240.0f, 16.0f, 15.0f, 2.0f}) {
    for (std::uint32_t bits = 1; bits < 0x7f800000u; bits += 60013) {
      expect_tight(bits_float(bits), limit);
      ASSERT_FALSE(HasFailure());
    }
    for (int exponent = -149; exponent < 120; ++exponent) {  // where the quotient is a power of two
      const float amax = std::ldexp(limit, exponent);
      for (const float x : {amax, std::nextafter(amax, kInfinity), std::nextafter(amax, 0.0f)}) {
        if (x > 0.0f && std::isfinite(x)) {
          expect_tight(x, limit);
          ASSERT_FALSE(HasFailure());
        }
      }
    }
    expect_tight(kLargestFloat, limit);
  }
}

TEST(Scaling, DegenerateBlocksHaveHarmlessScales) {
  for (const float amax : {0.0f, -0.0f, kNaN}) {
    EXPECT_EQ(block_scale(amax, 448.0f).scale, 1.0f);
    EXPECT_EQ(block_scale(amax, 448.0f).inverse, 1.0f);
  }
  EXPECT_EQ(block_scale(1e-40f, 448.0f).scale, kSmallestScale);
  EXPECT_EQ(kSmallestScale, std::ldexp(1.0f, -60));
  EXPECT_EQ(block_scale(kInfinity, 448.0f).scale, std::ldexp(1.0f, 119));
  EXPECT_EQ(block_scale(kInfinity, 16.0f).scale, std::ldexp(1.0f, 123));
}

TEST(Scaling, AmaxTakesFiniteMagnitudesOnly) {
  float amax = 0.0f;
  for (const float x : {1.0f, -3.0f, 2.0f, kNaN, kInfinity, -kInfinity}) {
    amax = raise_amax(amax, x);
  }
  EXPECT_EQ(amax, 3.0f);
  EXPECT_EQ(raise_amax(amax, -kLargestFloat), kLargestFloat);
  EXPECT_EQ(kLargestFloat, std::numeric_limits<float>::max());
}

// Blocks of ordinary numbers with a huge or a tiny outlier: finite, within the error of the format.
TEST(Scaling, QuantizedBlocksAreWithinHalfAStep) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (const float limit : {448.0f, 16.0f, 15.0f}) {
    for (const float magnitude : {1.0f, 1e-30f, 1e30f}) {
      for (const float outlier : {1.0f, 1e-8f, 1e4f, 3e38f, -3.4028234e38f}) {
        std::vector<float> block(128);
        float amax = 0.0f;
        for (float& x : block) {
          x = normal(random) * magnitude;
        }
        block[77] = outlier;
        for (const float x : block) {
          amax = raise_amax(amax, x);
        }
        const BlockScale scale = block_scale(amax, limit);
        for (const float x : block) {
          const float code = decode_e4m3(quantize(x, scale, limit));
          const float back = code * scale.scale;
          ASSERT_TRUE(std::isfinite(back)) << x;
          ASSERT_LE(std::fabs(code), limit);
          const bool saturates = std::fabs(x) > scale.scale * limit;
          const double step = std::fmax(std::fabs(static_cast<double>(x)) / 16,
                                        std::ldexp(static_cast<double>(scale.scale), -10));
          if (saturates) {
            ASSERT_EQ(back, std::copysign(scale.scale * limit, x));
            ASSERT_GT(std::fabs(x), 1.7e38f);
          } else {
            ASSERT_LE(std::fabs(static_cast<double>(back) - x), step)
                << x << " limit " << limit << " amax " << amax;
          }
        }
      }
    }
  }
}

TEST(Scaling, NonFiniteElementsBecomeNaNAndSpareTheirBlock) {
  const BlockScale scale = block_scale(1.0f, 448.0f);
  for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    EXPECT_EQ(quantize(bad, scale, 448.0f), 0x7f) << bad;
  }
  EXPECT_EQ(quantize(1e30f, scale, 16.0f), encode_e4m3(16.0f));
  EXPECT_EQ(quantize(-1e30f, scale, 16.0f), encode_e4m3(-16.0f));
}

TEST(Scaling, ScoreCodesFitFp16Sums) {
  for (int dim = 1; dim <= pantile::core::kMaxFp8Dim; ++dim) {
    const float limit = pantile::core::score_code_limit(dim);
    ASSERT_LE(static_cast<float>(dim) * limit * limit, 65504.0f) << dim;
    ASSERT_EQ(decode_e4m3(encode_e4m3(limit)), limit);  // the largest code is a code
  }
}

TEST(Scaling, StoredScalesAreFinite) {
  EXPECT_EQ(pantile::core::stored_scale(BlockScale{0.25f, 4.0f}, 128.0f), 32.0f);
  EXPECT_EQ(pantile::core::stored_scale(BlockScale{0.25f, 4.0f}, 1.0f), 0.25f);
  const BlockScale largest = block_scale(kLargestFloat, 16.0f);
  EXPECT_EQ(pantile::core::stored_scale(largest, 256.0f), std::ldexp(1.0f, 127));
}

TEST(Scaling, RatiosOfScalesAreExactAndFinite) {
  const BlockScale one = block_scale(448.0f, 448.0f);
  const BlockScale eight = block_scale(448.0f * 8, 448.0f);
  EXPECT_EQ(scale_ratio(one, eight), 0.125f);
  EXPECT_EQ(scale_ratio(eight, one), 8.0f);
  const BlockScale largest = block_scale(kLargestFloat, 448.0f);
  const BlockScale smallest = block_scale(1e-40f, 448.0f);
  EXPECT_EQ(scale_ratio(largest, smallest), kLargestFloat);
  EXPECT_EQ(0.0f * scale_ratio(largest, smallest), 0.0f);
}

TEST(Scaling, FunctionsAreConstantExpressions) {
  constexpr std::uint8_t kCode = encode_e4m3(-0.3f);
  constexpr float kBack = decode_e4m3(kCode);
  constexpr BlockScale kScale = block_scale(100.0f, 16.0f);
  EXPECT_EQ(kBack, -0.3125f);
  EXPECT_EQ(kScale.scale, 8.0f);
  EXPECT_EQ(kScale.inverse, 0.125f);
}

// A block of zeros has no scale: the output stays in the unit it has.
TEST(Scaling, BlocksOfZerosChangeNoUnit) {
  for (const float amax : {1e-30f, 1.0f, 3e38f}) {
    const BlockScale block = block_scale(amax, kE4m3Max);
    EXPECT_EQ(stored_value_scale(block, amax, 3.0f), block.scale * 3.0f);
    EXPECT_EQ(value_unit(block.scale, 8.0f), block.scale);
  }
  EXPECT_EQ(stored_value_scale(block_scale(0.0f, kE4m3Max), 0.0f, 3.0f), 0.0f);
  EXPECT_EQ(value_unit(0.0f, 8.0f), 8.0f);
}

}  // namespace
