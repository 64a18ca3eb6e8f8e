// Low bits of O against their definition in whole numbers: every 16-bit number with every low bits,
// and the f32 numbers that round to it.
#include "core/low_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/bits.h"

namespace {

using pantile::core::bits_float;
using pantile::core::float_bits;
using pantile::core::has_low_bits;
using pantile::core::kLowShiftBf16;
using pantile::core::kLowShiftF16;
using pantile::core::low_bits;
using pantile::core::with_low_bits;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The formats by their definitions, over doubles, which hold every f32 exactly.
struct Bf16 {
  static constexpr int kShift = kLowShiftBf16;
  static constexpr int kDigits = 8, kLast = -133;  // exponent of the last subnormal bit
  static constexpr double kLimit = 0x1p128;
  static constexpr int kWordShift = 16;
  static float value(std::uint32_t half) { return bits_float(half << 16); }
};
struct F16 {
  static constexpr int kShift = kLowShiftF16;
  static constexpr int kDigits = 11, kLast = -24;
  static constexpr double kLimit = 65536.0;
  static constexpr int kWordShift = 13;
  static float value(std::uint32_t half) {
    const int exponent = static_cast<int>(half >> 10 & 31u);
    const int mantissa = static_cast<int>(half & 1023u);
    const double size = exponent == 31  ? (mantissa == 0 ? HUGE_VAL : std::nan(""))
                        : exponent == 0 ? std::ldexp(mantissa, -24)
                                        : std::ldexp(1024 + mantissa, exponent - 25);
    return static_cast<float>((half & 0x8000u) != 0 ? -size : size);
  }
};

template <class Format>
float nearest(float exact) {
  const auto x = static_cast<double>(exact);
  if (x == 0.0 || !std::isfinite(x)) {
    return exact;
  }
  int exponent = 0;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - Format::kDigits, Format::kLast);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
  return static_cast<float>(std::fabs(rounded) >= Format::kLimit ? std::copysign(HUGE_VAL, x)
                                                                 : rounded);
}

// Steps from one number to another of the same sign, as the header's text defines them.
int defined_steps(float exact, float rounded, int shift) {
  const double distance =
      static_cast<double>(float_bits(exact)) - static_cast<double>(float_bits(rounded));
  const double steps = std::floor(std::ldexp(distance, -shift) + 0.5);
  return static_cast<int>(std::clamp(steps, -128.0, 127.0));
}

template <class Format>
void expect_defined(float exact) {
  const float rounded = nearest<Format>(exact);
  const std::int8_t low = low_bits<Format::kShift>(exact, rounded);
  const float again = with_low_bits<Format::kShift>(rounded, low);
  if (rounded == 0.0f || !std::isfinite(rounded)) {
    ASSERT_EQ(low, 0) << exact;
    ASSERT_EQ(float_bits(again), float_bits(rounded)) << exact;
    return;
  }
  ASSERT_EQ(low, defined_steps(exact, rounded, Format::kShift)) << exact << " near " << rounded;
  // In last bits: half a step, one at the upper end. Never further off than the 16-bit number.
  const double off =
      std::fabs(static_cast<double>(float_bits(again)) - static_cast<double>(float_bits(exact)));
  const double coarse =
      std::fabs(static_cast<double>(float_bits(rounded)) - static_cast<double>(float_bits(exact)));
  ASSERT_LE(off, coarse) << exact;
  if (coarse <= std::ldexp(1.0, Format::kWordShift - 1)) {
    ASSERT_LE(off, std::ldexp(1.0, Format::kShift - (low == 127 ? 0 : 1))) << exact;
  }
}

// What lies around a 16-bit number's own interval: its ends and centre, ties with both neighbours,
// and every border between steps, each with the f32 numbers beside it.
template <class Format>
void expect_defined_around(float number) {
  constexpr std::int64_t kStep = std::int64_t{1} << Format::kShift;
  for (std::int64_t border = -130 * kStep; border <= 130 * kStep; border += kStep / 2) {
    for (std::int64_t beside = -1; beside <= 1; ++beside) {
      const std::int64_t bits = std::int64_t{float_bits(number)} + border + beside;
      if (bits >= 0 && bits <= 0xffffffff) {
        expect_defined<Format>(bits_float(static_cast<std::uint32_t>(bits)));
      }
    }
  }
}

// Half an interval of the 16-bit numbers is 128 steps.
TEST(LowBits, StepsFillHalfAnInterval) {
  EXPECT_EQ(128 << kLowShiftBf16, (1 << Bf16::kWordShift) / 2);
  EXPECT_EQ(128 << kLowShiftF16, (1 << F16::kWordShift) / 2);
}

template <class Format>
void expect_numbers_that_round_to_a_half(std::uint32_t one, std::uint32_t infinity) {
  const auto close = [](std::uint32_t a, std::uint32_t b) { return a - b + 3u <= 6u; };
  for (std::uint32_t half = 0; half < 0x10000u; ++half) {
    const std::uint32_t magnitude = half & 0x7fffu;
    if (half % 61 == 0 || close(magnitude, 0) || close(magnitude, one) ||
        close(magnitude, infinity) || close(magnitude, 0x0400u) || close(magnitude, 0x0080u)) {
      expect_defined_around<Format>(Format::value(half));
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
}

// Both signs; every 61st number, and all near zero, 1, infinity and the largest subnormals.
TEST(LowBits, NumbersThatRoundToAHalf) {
  expect_numbers_that_round_to_a_half<Bf16>(0x3f80u, 0x7f80u);
  expect_numbers_that_round_to_a_half<F16>(0x3c00u, 0x7c00u);
}

template <class Format>
void expect_every_half_with_every_step() {
  constexpr int kShift = Format::kShift;
  for (std::uint32_t half = 0; half < 0x10000u; ++half) {
    const float number = Format::value(half);
    for (int low = -128; low < 128; ++low) {
      const float exact = with_low_bits<kShift>(number, static_cast<std::int8_t>(low));
      if (number == 0.0f || !std::isfinite(number)) {
        ASSERT_EQ(float_bits(exact), float_bits(number));
        ASSERT_EQ(low_bits<kShift>(1.0f, number), 0);
      } else {
        ASSERT_TRUE(std::isfinite(exact) && std::signbit(exact) == std::signbit(number)) << number;
        ASSERT_EQ(low_bits<kShift>(exact, number), low) << number;
      }
    }
  }
}

// Every pair comes back: the stored steps are those between the two numbers. No sign changes and
// nothing finite becomes infinite.
TEST(LowBits, EveryHalfWithEveryStep) {
  expect_every_half_with_every_step<Bf16>();
  expect_every_half_with_every_step<F16>();
}

template <class Format>
void expect_halves_as_they_are() {
  for (std::uint32_t half = 0; half < 0x10000u; ++half) {
    const float number = Format::value(half);
    const std::int8_t low = low_bits<Format::kShift>(number, number);
    ASSERT_EQ(low, 0) << number;
    ASSERT_EQ(float_bits(with_low_bits<Format::kShift>(number, low)), float_bits(number));
  }
}

// Where one weight is 1, O is a row of V: nothing may be added to it.
TEST(LowBits, AHalfComesBackAsItIs) {
  expect_halves_as_they_are<Bf16>();
  expect_halves_as_they_are<F16>();
}

TEST(LowBits, NoneOfZeroInfinityAndNaN) {
  for (const float x : {0.0f, -0.0f, kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                        bits_float(0xff800001u)}) {
    EXPECT_FALSE(has_low_bits(x)) << x;
  }
  for (const float x : {std::numeric_limits<float>::denorm_min(), -1.0f,
                        std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest()}) {
    EXPECT_TRUE(has_low_bits(x)) << x;
  }
  // Too small for f16, and too large.
  EXPECT_EQ(low_bits<kLowShiftF16>(0x1p-26f, 0.0f), 0);
  EXPECT_EQ(low_bits<kLowShiftF16>(70000.0f, kInfinity), 0);
}

TEST(LowBits, WorkInConstantExpressions) {
  constexpr std::int8_t kUp = low_bits<kLowShiftBf16>(1.0f + 0x1p-10f, 1.0f);
  constexpr float kDown = with_low_bits<kLowShiftF16>(-1.0f, -64);
  EXPECT_EQ(kUp, 32);
  EXPECT_EQ(kDown, -1.0f + 0x1p-13f);
}

}  // namespace
