// The rotation against the definition of Sylvester's matrix, and what quantisers count on.
#include "core/hadamard.h"

#include <gtest/gtest.h>

#include <bitset>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using pantile::core::hadamard_factor;
using pantile::core::hadamard_group;
using pantile::core::hadamard_rotate;
using pantile::core::hadamard_sign_word;
using pantile::core::rotation_balance;

// Entry (i, j) of Sylvester's matrix: -1 to the number of common one bits.
double sylvester(int i, int j) {
  return std::bitset<32>(static_cast<unsigned>(i & j)).count() % 2 == 0 ? 1.0 : -1.0;
}

double sign_of(int channel) {
  return (hadamard_sign_word(channel / 32) >> (channel % 32) & 1u) != 0 ? -1.0 : 1.0;
}

std::vector<float> random_row(int dim, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> row(static_cast<std::size_t>(dim));
  for (float& x : row) {
    x = normal(generator);
  }
  return row;
}

TEST(Hadamard, GroupIsTheLargestPowerOfTwoThatDivides) {
  for (int dim = 1; dim <= 256; ++dim) {
    const int group = hadamard_group(dim);
    ASSERT_EQ(dim % group, 0);
    ASSERT_EQ(group & (group - 1), 0);
    ASSERT_NE(dim % (2 * group), 0);
  }
  EXPECT_EQ(hadamard_group(512), 256);  // as many channels as there are signs
}

TEST(Hadamard, RotatesByItsDefinition) {
  for (const int dim : {1, 2, 8, 40, 64, 96, 128, 192, 256}) {
    const int group = hadamard_group(dim);
    const std::vector<float> x = random_row(dim, static_cast<unsigned>(dim));
    std::vector<float> y = x;
    hadamard_rotate(y.data(), dim, group);
    for (int c = 0; c < dim; ++c) {
      const int first = c / group * group;
      double sum = 0.0;
      for (int j = 0; j < group; ++j) {
        sum += sylvester(c - first, j) * sign_of(first + j) *
               static_cast<double>(x[static_cast<std::size_t>(first + j)]);
      }
      ASSERT_NEAR(y[static_cast<std::size_t>(c)], sum / group, 2e-6) << dim << " " << c;
    }
  }
}

TEST(Hadamard, KeepsProductsUpToTheGroup) {
  for (const int dim : {64, 96, 128, 256}) {
    const int group = hadamard_group(dim);
    std::vector<float> q = random_row(dim, 1);
    std::vector<float> k = random_row(dim, 2);
    double before = 0.0;
    double after = 0.0;
    for (std::size_t c = 0; c < q.size(); ++c) {
      before += static_cast<double>(q[c]) * static_cast<double>(k[c]);
    }
    hadamard_rotate(q.data(), dim, group);
    hadamard_rotate(k.data(), dim, group);
    for (std::size_t c = 0; c < q.size(); ++c) {
      after += static_cast<double>(q[c]) * static_cast<double>(k[c]);
    }
    EXPECT_NEAR(after * group, before, 1e-4 * dim);
  }
}

// The order of sums is part of the format. With these numbers another order gives other bits:
// 2^25 + 1 and 2^25 - 1 are no floats.
TEST(Hadamard, SumsNeighboursFirst) {
  const float big = 33554432.0f;  // 2^25
  float x[4] = {4 * big, 4.0f, -4 * big, 4.0f};
  for (int c = 0; c < 4; ++c) {
    x[c] *= hadamard_factor(c, 4) < 0.0f ? -1.0f : 1.0f;
  }
  hadamard_rotate(x, 4, 4);
  EXPECT_EQ(x[0], 0.0f);  // (2^25 + 1) + (-2^25 + 1), both rounded
  EXPECT_EQ(x[1], 0.0f);
}

TEST(Hadamard, SpreadsAnOutlierEvenly) {
  std::vector<float> x(128, 0.0f);
  x[5] = 128.0f;
  hadamard_rotate(x.data(), 128, 128);
  for (const float y : x) {
    EXPECT_EQ(std::fabs(y), 1.0f);
  }
}

TEST(Hadamard, FiniteRowsStayFiniteAndOthersDoNot) {
  std::vector<float> x(256, std::numeric_limits<float>::max());
  for (int c = 0; c < 256; ++c) {
    x[static_cast<std::size_t>(c)] *= static_cast<float>(sign_of(c));  // all sums add up
  }
  hadamard_rotate(x.data(), 256, 256);
  for (const float y : x) {
    ASSERT_TRUE(std::isfinite(y));
  }
  std::vector<float> row(96, 1.0f);  // three groups of 32
  row[40] = std::numeric_limits<float>::infinity();
  hadamard_rotate(row.data(), 96, 32);
  for (std::size_t c = 0; c < row.size(); ++c) {
    ASSERT_EQ(std::isfinite(row[c]), c / 32 != 1) << c;
  }
}

TEST(Hadamard, SignsAreBalanced) {
  int negative = 0;
  for (int c = 0; c < 256; ++c) {
    negative += sign_of(c) < 0.0 ? 1 : 0;
    EXPECT_EQ(hadamard_factor(c, 64), static_cast<float>(sign_of(c) / 64.0));
  }
  EXPECT_GT(negative, 96);
  EXPECT_LT(negative, 160);
}

TEST(Hadamard, TheBalanceIsTheRootOfTheGroupOrHalfAnOctaveBelow) {
  constexpr int kExpected[][2] = {{1, 1},  {2, 1},  {4, 2},   {8, 2},   {16, 4},
                                  {32, 4}, {64, 8}, {128, 8}, {256, 16}};
  for (const auto& [group, balance] : kExpected) {
    EXPECT_EQ(rotation_balance(group), balance) << group;
  }
}

}  // namespace
