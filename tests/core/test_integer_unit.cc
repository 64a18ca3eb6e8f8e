// Units of integer sums: magnitudes at the ends of the range against double, and that no sum leaves
// its bits.
#include "core/integer_unit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace {

using pantile::core::bits_float;
using pantile::core::count_key;
using pantile::core::float_bits;
using pantile::core::is_finite_bits;
using pantile::core::key_sample;
using pantile::core::key_sample_count;
using pantile::core::KeyBounds;
using pantile::core::loudness;
using pantile::core::Magnitude;
using pantile::core::magnitude_of;
using pantile::core::measured_bound;
using pantile::core::must_be_measured;
using pantile::core::product;
using pantile::core::row_bound;
using pantile::core::row_sum_unit;
using pantile::core::slot_of;
using pantile::core::slot_word;
using pantile::core::sum;
using pantile::core::unit_scale;
using pantile::core::united;

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kLeast = std::numeric_limits<float>::denorm_min();

long double value(const Magnitude& x) {
  return std::ldexp(static_cast<long double>(x.mantissa), x.exponent);
}

float random_float(std::mt19937& random) {
  std::uniform_int_distribution<std::uint32_t> bits(0, 0x7f7fffffu);
  return pantile::core::bits_float(bits(random));
}

TEST(IntegerUnit, AMagnitudeIsItsNumber) {
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float x = i == 0 ? kLeast : i == 1 ? kMost : random_float(random);
    const Magnitude m = magnitude_of(i % 2 == 0 ? x : -x);
    ASSERT_EQ(value(m), static_cast<long double>(x)) << x;
    ASSERT_GE(m.mantissa, 1.0f);
    ASSERT_LT(m.mantissa, 2.0f);
  }
  EXPECT_EQ(magnitude_of(0.0f).mantissa, 0.0f);
  EXPECT_EQ(magnitude_of(-0.0f).mantissa, 0.0f);
}

TEST(IntegerUnit, ProductsAndSumsLeaveNoRange) {
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    const float a = i % 7 == 0 ? 0.0f : i % 7 == 1 ? kMost : random_float(random);
    const float b = i % 5 == 0 ? 0.0f : i % 5 == 1 ? kLeast : random_float(random);
    const Magnitude x = magnitude_of(a);
    const Magnitude y = magnitude_of(b);
    const long double exact_product = static_cast<long double>(a) * b;
    const long double exact_sum = static_cast<long double>(a) + b;
    ASSERT_NEAR(static_cast<double>(value(product(x, y)) - exact_product), 0.0,
                static_cast<double>(exact_product) * 1e-6);
    ASSERT_LE(std::abs(value(sum(x, y)) - exact_sum), exact_sum * 1e-6L) << a << " " << b;
  }
}

// The bound, in units, lies below 2^30, and not far below.
TEST(IntegerUnit, BoundsTakeThirtyBits) {
  std::mt19937 random(3);
  for (int i = 0; i < 100000; ++i) {
    std::uniform_real_distribution<float> exponent(-119.0f, 118.0f);
    const Magnitude bound = magnitude_of(std::exp2(exponent(random)));
    const float scale = unit_scale(bound);
    const long double units = value(bound) * scale;
    const int shift = std::ilogb(scale);
    ASSERT_EQ(std::ldexp(1.0f, shift), scale);
    if (shift < 120 && shift > -120) {
      ASSERT_LT(units * 1.09L, std::ldexp(1.0L, 30));
      ASSERT_GE(units * 1.11L, std::ldexp(1.0L, 29));
    }
  }
  EXPECT_EQ(unit_scale(Magnitude{}), 1.0f);
  EXPECT_EQ(unit_scale(Magnitude{1.0f, -300}), std::ldexp(1.0f, 120));
  EXPECT_EQ(unit_scale(Magnitude{1.0f, 300}), std::ldexp(1.0f, -120));
  EXPECT_EQ(unit_scale(Magnitude{1.9f, 0}), std::ldexp(1.0f, 28));  // 1.1 carries it over 2
}

KeyBounds usual_keys(float loudest_k, float loudest_v) {
  KeyBounds bounds{};
  bounds.keys_k = bounds.keys_v = 1000;
  bounds.exponents_k = 1000 * 1;
  bounds.exponents_v = 1000 * 3;
  bounds.max_k = float_bits(loudest_k);
  bounds.max_v = float_bits(loudest_v);
  return bounds;
}

TEST(IntegerUnit, LoudKeysAreMeasured) {
  EXPECT_FLOAT_EQ(loudness(usual_keys(5.0f, 16.0f)), 2.0f);
  EXPECT_FALSE(must_be_measured(usual_keys(5.0f, 16.0f), 11));
  EXPECT_FALSE(must_be_measured(usual_keys(65.0f, 8.0f), 11));  // 5 above
  EXPECT_TRUE(must_be_measured(usual_keys(65.0f, 17.0f), 11));  // 6
  EXPECT_FALSE(must_be_measured(usual_keys(65.0f, 65.0f), 8));  // 8
  EXPECT_TRUE(must_be_measured(usual_keys(65.0f, 129.0f), 8));  // 9
  EXPECT_TRUE(must_be_measured(usual_keys(INFINITY, 8.0f), 8));
  EXPECT_TRUE(must_be_measured(usual_keys(2.0f, NAN), 8));
  KeyBounds all_loud = usual_keys(2.0f, NAN);  // no louder than the others
  all_loud.exponents_v = 1000 * 127;
  EXPECT_TRUE(must_be_measured(all_loud, 8));
  EXPECT_FALSE(must_be_measured(KeyBounds{}, 11));
  EXPECT_FALSE(is_finite_bits(float_bits(INFINITY)));
  EXPECT_TRUE(is_finite_bits(float_bits(kMost)));
}

// Statistics of parts of the keys, in any order, unite to those of all: what several processes know
// together is what one knows.
TEST(IntegerUnit, BoundsOfPartsUniteToThoseOfAll) {
  std::mt19937 random(7);
  const auto number = [&random] {  // of any exponent; 0, infinity and NaN, too
    const std::uint32_t kind = static_cast<std::uint32_t>(random() % 16);
    return kind == 0   ? 0u
           : kind == 1 ? float_bits(INFINITY)
           : kind == 2 ? float_bits(NAN) & 0x7fffffffu
                       : static_cast<std::uint32_t>(random() & 0x7f7fffffu);
  };
  for (int repeat = 0; repeat < 200; ++repeat) {
    KeyBounds all{};
    KeyBounds parts[3] = {};
    for (int key = 0; key < 50; ++key) {
      const std::uint32_t k = number();
      const std::uint32_t v = number();
      count_key(&all, k, v);
      count_key(&parts[random() % 3], k, v);
    }
    const KeyBounds both = united(parts[2], united(parts[0], parts[1]));
    ASSERT_EQ(both.max_k, all.max_k);
    ASSERT_EQ(both.max_v, all.max_v);
    ASSERT_EQ(both.keys_k, all.keys_k);
    ASSERT_EQ(both.keys_v, all.keys_v);
    ASSERT_EQ(both.exponents_k, all.exponents_k);
    ASSERT_EQ(both.exponents_v, all.exponents_v);
    ASSERT_EQ(unit_scale(row_bound(both, magnitude_of(1.0f), 1.0f)),
              unit_scale(row_bound(all, magnitude_of(1.0f), 1.0f)));
  }
}

TEST(IntegerUnit, KeysAreCounted) {
  KeyBounds bounds{};
  count_key(&bounds, float_bits(8.0f), float_bits(0.25f));
  count_key(&bounds, float_bits(0.0f), float_bits(3.0f));
  count_key(&bounds, float_bits(2.0f), float_bits(INFINITY));
  EXPECT_EQ(bits_float(bounds.max_k), 8.0f);
  EXPECT_EQ(bits_float(bounds.max_v), INFINITY);
  EXPECT_EQ(bounds.keys_k, 2);
  EXPECT_EQ(bounds.keys_v, 2);
  EXPECT_EQ(bounds.exponents_k, 3 + 1);
  EXPECT_EQ(bounds.exponents_v, -2 + 1);
}

// Evenly spaced, inside, and of as many keys as samples all of them: so means can be taken from a
// tensor that has the samples alone.
TEST(IntegerUnit, SamplesOfKeys) {
  for (const int samples : {key_sample_count(64), key_sample_count(128), key_sample_count(256)}) {
    for (const std::int64_t keys : {std::int64_t{1}, std::int64_t{100}, std::int64_t{1} << 40}) {
      for (int i = 0; i < samples; ++i) {
        const std::int64_t key = key_sample(i, samples, keys);
        ASSERT_GE(key, 0);
        ASSERT_LT(key, keys);
        ASSERT_EQ(key_sample(i, samples, samples), i);
      }
    }
  }
  EXPECT_EQ(key_sample(1, 64, 640), 15);
  EXPECT_EQ(key_sample_count(129), 32);
}

// Both halves are finite as bf16, whatever the row.
TEST(IntegerUnit, SlotsAreFiniteNumbers) {
  std::mt19937 random(4);
  for (std::uint32_t i = 0; i < 400000; ++i) {
    const std::uint32_t slot = i < 200000 ? i : random() & 0x3fffffffu;
    const std::uint32_t word = slot_word(slot);
    ASSERT_NE(word & 0x7f80u, 0x7f80u) << slot;
    ASSERT_NE(word >> 16 & 0x7f80u, 0x7f80u) << slot;
    ASSERT_EQ(slot_of(word), slot);
  }
  EXPECT_EQ(slot_of(slot_word(0x3fffffffu)), 0x3fffffffu);
}

TEST(IntegerUnit, RowSumsHaveTheUnitOfUsualKeys) {
  KeyBounds bounds = usual_keys(1e6f, 2.0f);
  bounds.keys_k = 4;
  bounds.exponents_k = 12;
  EXPECT_EQ(row_sum_unit(bounds), 8.0f);
  bounds.exponents_k = -12;
  EXPECT_EQ(row_sum_unit(bounds), 0.125f);
  bounds.exponents_k = -4 * 149;  // subnormal
  EXPECT_EQ(row_sum_unit(bounds), 0x1p-126f);
  bounds.keys_k = 0;
  EXPECT_EQ(row_sum_unit(bounds), 0.0f);
}

TEST(IntegerUnit, BoundsOfRows) {
  const KeyBounds bounds = usual_keys(4.0f, 8.0f);
  EXPECT_EQ(value(row_bound(bounds, magnitude_of(3.0f), -2.0f)), (3 * 8 + 2) * 4);
  const KeyBounds loud = usual_keys(1e38f, 1e38f);
  EXPECT_NEAR(static_cast<double>(std::log2(value(row_bound(loud, magnitude_of(1e20f), 1e30f)))),
              std::log2(1e38) * 2 + std::log2(1e20), 1e-5);
  EXPECT_EQ(value(measured_bound(-3.0f, 5)), 15);
}

}  // namespace
