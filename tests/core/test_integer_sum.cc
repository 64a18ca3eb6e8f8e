// Sums of floats as integers: the fast conversion against rounding, and sums in any order.
#include "core/integer_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using pantile::core::all_in_range;
using pantile::core::all_large_in_range;
using pantile::core::bits_float;
using pantile::core::converted_word;
using pantile::core::float_bits;
using pantile::core::hold_large_term;
using pantile::core::hold_term;
using pantile::core::integer_sum;
using pantile::core::kHeldScale;
using pantile::core::kHeldZero;
using pantile::core::large_term_bits;
using pantile::core::large_word;

constexpr float kRange = 0x1p22f;

// What a kernel adds for a term of `x` units.
std::uint32_t word(float x) {
  const float held = hold_term(x, kHeldScale);
  if (all_in_range(float_bits(held))) {
    return float_bits(held);
  }
  const float large = hold_large_term(held);
  return all_large_in_range(large_term_bits(large)) ? large_word(large) : converted_word(large);
}

int integer(float x) {
  return static_cast<int>(word(x) - kHeldZero);
}

TEST(IntegerSum, SmallTermsAreRoundedToNearest) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> term(-kRange, kRange);
  for (int i = 0; i < 200000; ++i) {
    const float x = i % 2 == 0 ? term(random) : term(random) * 0x1p-20f;
    // The odd factor moves a term by half a unit at most, and only near a tie.
    ASSERT_LE(std::fabs(integer(x) - static_cast<double>(x)), 1.0) << x;
    ASSERT_TRUE(all_in_range(float_bits(hold_term(x, kHeldScale))) || std::fabs(x) > kRange - 1.5f);
  }
  for (int i = -1000; i <= 1000; ++i) {
    ASSERT_EQ(integer(static_cast<float>(i)), i);
    ASSERT_EQ(integer(static_cast<float>(i) + 0.25f), i);
    ASSERT_EQ(integer(static_cast<float>(i) - 0.25f), i);
  }
}

TEST(IntegerSum, LargeTermsAreFoundAndKeepTheirTopBits) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> exponent(22.1f, 29.9f);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::exp2(exponent(random)) * (i % 2 == 0 ? 1.0f : -1.0f);
    const float held = hold_term(x, kHeldScale);
    ASSERT_FALSE(all_in_range(float_bits(held)));
    if (std::fabs(std::fabs(x) - kRange * 16) > 64) {
      const bool shifted = all_large_in_range(large_term_bits(hold_large_term(held)));
      ASSERT_EQ(shifted, std::fabs(x) < kRange * 16) << x;
    }
    ASSERT_LE(std::fabs(integer(x) - static_cast<double>(x)), std::fabs(x) * 0x1p-22 + 9) << x;
  }
}

// Small terms of a warp that has a large one are converted like it, and conversions agree.
TEST(IntegerSum, SmallTermsSurviveTheConversionsOfLargeOnes) {
  std::mt19937 random(4);
  std::uniform_real_distribution<float> term(-kRange, kRange);
  for (int i = 0; i < 200000; ++i) {
    const float x = i % 2 == 0 ? term(random) : term(random) * 0x1p-15f;
    const float large = hold_large_term(hold_term(x, kHeldScale));
    ASSERT_TRUE(all_large_in_range(large_term_bits(large)));
    const int by_shift = static_cast<int>(large_word(large) - kHeldZero);
    ASSERT_EQ(by_shift, static_cast<int>(converted_word(large) - kHeldZero)) << x;
    ASSERT_LE(std::fabs(by_shift - static_cast<double>(x)), 9.0) << x;
  }
}

// Every float that can stand beside ones in range, the two infinities and NaN included, shows.
TEST(IntegerSum, OneTermOutOfRangeShowsAmongMany) {
  const std::uint32_t inside = float_bits(2.0f) | float_bits(3.0f) | float_bits(3.9999998f);
  ASSERT_TRUE(all_in_range(inside));
  for (std::uint32_t upper = 0; upper < 512; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x400000u, 0x7fffffu}) {
      const float other = bits_float(upper << 23 | lower);
      const bool in_range = other >= 2.0f && other < 4.0f;
      if (other < 0.0f || other >= 0x1p-126f || other != other) {  // not zero, not subnormal
        ASSERT_EQ(all_in_range(inside | float_bits(other)), in_range) << other;
        ASSERT_EQ(all_in_range(float_bits(other)), in_range) << other;
      }
      ASSERT_EQ(all_large_in_range(large_term_bits(3.0f) | large_term_bits(other)), in_range);
    }
  }
}

// The term that would give the word 0, which no union of bits shows.
TEST(IntegerSum, NoTermIsHeldAsZero) {
  for (int i = -1000; i <= 1000; ++i) {
    const float x = bits_float(float_bits(-3.0f * kRange) + static_cast<std::uint32_t>(i));
    const float held = hold_term(x, kHeldScale);
    ASSERT_FALSE(all_in_range(float_bits(held)));
    ASSERT_GE(std::fabs(held), 0x1p-60f);
    ASSERT_LE(std::fabs(integer(x) - static_cast<double>(x)), 13.0) << x;
  }
}

// Warps with large terms must not be biased: many terms between two units of the shift.
TEST(IntegerSum, RoundingOfLargeTermsHasNoBias) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> term(-kRange, kRange);
  double error = 0.0;
  constexpr int kTerms = 200000;
  for (int i = 0; i < kTerms; ++i) {
    const float x = term(random);
    const float large = hold_large_term(hold_term(x, kHeldScale));
    error += static_cast<int>(large_word(large) - kHeldZero) - static_cast<double>(x);
  }
  EXPECT_LE(std::fabs(error / kTerms), 0.1);  // of 16 units; standard deviation 0.01
}

TEST(IntegerSum, NothingOfNaNAndOfAZeroScale) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(word(nan), kHeldZero);
  EXPECT_EQ(float_bits(hold_term(123.0f, 0.0f)), kHeldZero);
}

// Terms of all three conversions, whose sums stay below 2^30, in three orders.
TEST(IntegerSum, SumsDoNotDependOnTheOrder) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> small(-0x1p20f, 0x1p20f);
  std::uniform_real_distribution<float> large(-0x1p28f, 0x1p28f);
  for (int round = 0; round < 300; ++round) {
    const int terms = 1 + round * 3;
    std::vector<std::uint32_t> words;
    std::int64_t expected = 0;
    for (int i = 0; i < terms; ++i) {
      words.push_back(word(i % 300 == 3 ? large(random) : small(random) - 3e5f));
      expected += static_cast<int>(words.back() - kHeldZero);
    }
    for (int order = 0; order < 3; ++order) {
      std::shuffle(words.begin(), words.end(), random);
      std::uint32_t sum = 0;
      for (const std::uint32_t held : words) {
        sum += held;
      }
      ASSERT_EQ(integer_sum(sum, static_cast<std::uint32_t>(terms)), expected);
    }
  }
}

}  // namespace
