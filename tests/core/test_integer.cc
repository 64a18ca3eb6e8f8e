// Integer helpers against plain arithmetic.
#include "core/integer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace {

using pantile::core::ceil_div;
using pantile::core::clamp;
using pantile::core::FastDivmod;
using pantile::core::max_of;
using pantile::core::min_of;
using pantile::core::round_up;

constexpr int kLargest = std::numeric_limits<int>::max();

TEST(Integer, MinMaxAndClampAgreeWithComparison) {
  for (int a = -3; a <= 3; ++a) {
    for (int b = -3; b <= 3; ++b) {
      ASSERT_EQ(min_of(a, b), a < b ? a : b);
      ASSERT_EQ(max_of(a, b), a < b ? b : a);
      for (int x = -5; a <= b && x <= 5; ++x) {
        const int clamped = clamp(x, a, b);
        ASSERT_TRUE(clamped >= a && clamped <= b);
        ASSERT_EQ(clamped == x, x >= a && x <= b);
      }
    }
  }
  EXPECT_EQ(min_of(1LL << 40, 2LL << 40), 1LL << 40);
}

TEST(Integer, QuotientsRoundAsTheirNamesSay) {
  for (int a = 0; a <= 300; ++a) {
    for (int b = 1; b <= 40; ++b) {
      const double exact = static_cast<double>(a) / b;
      ASSERT_EQ(ceil_div(a, b), static_cast<int>(std::ceil(exact))) << a << " / " << b;
      ASSERT_EQ(round_up(a, b), static_cast<int>(std::ceil(exact)) * b) << a << " / " << b;
    }
  }
  EXPECT_EQ(ceil_div(std::int64_t{1} << 40, std::int64_t{3}), 366503875926);
}

void expect_exact(const FastDivmod& division, int n) {
  const int d = division.divisor();
  const FastDivmod::Result result = division.divmod(n);
  ASSERT_EQ(result.quotient, n / d) << n << " / " << d;
  ASSERT_EQ(result.remainder, n % d) << n << " / " << d;
  ASSERT_EQ(division.divide(n), n / d) << n << " / " << d;
}

TEST(Integer, FastDivisionIsExactForSmallNumbers) {
  for (int d = 1; d <= 1000; ++d) {
    const FastDivmod division(d);
    ASSERT_EQ(division.divisor(), d);
    for (int n = 0; n <= 2000; ++n) {
      const FastDivmod::Result result = division.divmod(n);
      if (result.quotient != n / d || result.remainder != n % d) {
        FAIL() << n << " / " << d << " gave " << result.quotient << " rest " << result.remainder;
      }
    }
  }
}

// An inexact multiplier shows first just below and at multiples of the divisor, and at the end.
void expect_exact_around_multiples(int d, std::mt19937& random) {
  const FastDivmod division(d);
  for (const int n : {0, 1, d - 1, d, kLargest - 1, kLargest, kLargest / d * d}) {
    expect_exact(division, n);
  }
  if (kLargest / d * d > 0) {
    expect_exact(division, kLargest / d * d - 1);
  }
  for (int repeat = 0; repeat < 20; ++repeat) {
    const int q = static_cast<int>(random() % static_cast<unsigned>(kLargest / d + 1LL));
    expect_exact(division, q * d);
    expect_exact(division, max_of(q * d - 1, 0));
    expect_exact(division, static_cast<int>(random() >> 1));
  }
}

TEST(Integer, FastDivisionIsExactUpTo31Bits) {
  std::mt19937 random(7);
  for (int bit = 0; bit <= 30; ++bit) {
    const int power = 1 << bit;
    expect_exact_around_multiples(power, random);
    expect_exact_around_multiples(power + (power - 1), random);
    if (bit < 30) {
      expect_exact_around_multiples(power + 1, random);
    }
    for (int repeat = 0; repeat < 300; ++repeat) {
      const int d = power + static_cast<int>(random() % static_cast<unsigned>(power));
      expect_exact_around_multiples(d, random);
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST(Integer, FastDivisionIsAConstantExpression) {
  constexpr FastDivmod division(7);
  constexpr FastDivmod::Result result = division.divmod(100);
  EXPECT_EQ(result.quotient, 14);
  EXPECT_EQ(result.remainder, 2);
  EXPECT_EQ(FastDivmod().divide(123), 123);
}

}  // namespace
