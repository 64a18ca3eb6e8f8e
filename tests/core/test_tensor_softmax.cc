// Softmax steps as tensor-core products: the constant operands do what they say, on an emulated
// tensor core whose rounding is checked against numbers worked out by hand and in double.
#include "core/tensor_softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "tensor_emulation.h"

namespace {

using namespace pantile::core;

constexpr int kKept = 2;  // bits below the last place of fp32; any number serves here
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A 16 x 8 tile of scores, and as the accumulators of a warp.
struct Tile {
  float at[16][8];

  explicit Tile(std::uint32_t seed, bool integers = false) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (auto& row : at) {
      for (float& x : row) {
        x = integers ? std::floor(normal(random)) : normal(random);
      }
    }
  }

  void load(WarpQuads& x) const {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const Element place = mma_accumulator(lane, i);
        x[lane][i] = at[place.row][place.column];
      }
    }
  }
};

void row_addends(WarpPairs& addend, const float (&of_row)[16]) {
  for (int lane = 0; lane < 32; ++lane) {
    addend[lane][0] = of_row[lane / 4];
    addend[lane][1] = of_row[lane / 4 + 8];
  }
}

TEST(TensorSoftmax, Tf32IsTheUpperElevenBits) {
  EXPECT_EQ(truncate_to_tf32(1.0f + std::ldexp(1.0f, -11)), 1.0f);
  EXPECT_EQ(truncate_to_tf32(-1.0f - std::ldexp(1.0f, -10)), -1.0f - std::ldexp(1.0f, -10));
  EXPECT_EQ(round_to_tf32(1.0f + std::ldexp(1.0f, -11)), 1.0f + std::ldexp(1.0f, -10));  // a tie
  EXPECT_EQ(round_to_tf32(1.0f + 0.99f * std::ldexp(1.0f, -11)), 1.0f);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 100.0f);
  for (int i = 0; i < 1000; ++i) {
    const float x = normal(random);
    int exponent = 0;
    const double fraction = std::frexp(static_cast<double>(x), &exponent);  // of 0.5 to 1
    EXPECT_EQ(truncate_to_tf32(x), std::ldexp(std::trunc(fraction * 2048.0), exponent - 11));
    EXPECT_EQ(round_to_tf32(x), std::ldexp(std::round(fraction * 2048.0), exponent - 11));
  }
}

TEST(TensorSoftmax, ProductsAreCutBelowTheLargestTerm) {
  const float one[] = {1.0f};
  const float tiny[] = {std::ldexp(1.0f, -24)};
  EXPECT_EQ(tensor_dot(one, tiny, 1, 1.0f, 0), 1.0f);  // the last place of 1 is 2^-23
  const float both[] = {std::ldexp(1.0f, -24), std::ldexp(1.0f, -24)};
  const float ones[] = {1.0f, 1.0f};
  EXPECT_EQ(tensor_dot(ones, both, 2, 1.0f, 0), 1.0f);                          // cut one by one
  EXPECT_EQ(tensor_dot(ones, both, 2, 1.0f, 1), 1.0f + std::ldexp(1.0f, -23));  // kept and added
  const float most[] = {0.75f * std::ldexp(1.0f, -22)};
  EXPECT_EQ(tensor_dot(one, most, 1, 1.0f, 2), 1.0f + std::ldexp(1.0f, -23));  // towards zero
  EXPECT_EQ(tensor_dot(one, most, 1, -1.0f, 2), -1.0f + 0.75f * std::ldexp(1.0f, -22));
  // A product of 1.5 * 1.5 = 2.25 counts with the exponent of its factors, 0.
  const float half_more[] = {1.5f};
  EXPECT_EQ(tensor_dot(half_more, half_more, 1, std::ldexp(1.0f, -24), 1), 2.25f);
}

TEST(TensorSoftmax, DotOfRepresentableSumsIsExact) {
  std::mt19937 random(2);
  std::uniform_int_distribution<int> integer(-1000, 1000);
  for (int round = 0; round < 200; ++round) {
    float a[8], b[8];
    const int start = integer(random);
    std::int64_t sum = start;
    for (int i = 0; i < 8; ++i) {
      const int x = integer(random), y = integer(random);
      a[i] = static_cast<float>(x);
      b[i] = static_cast<float>(y);
      sum += static_cast<std::int64_t>(x) * y;
    }
    EXPECT_EQ(tensor_dot(a, b, 8, static_cast<float>(start), 0), static_cast<float>(sum));
  }
}

TEST(TensorSoftmax, ScaleAndAddIsElementWise) {
  const Tile tile(3, true);
  WarpQuads x;
  tile.load(x);
  float of_row[16];
  for (int row = 0; row < 16; ++row) {
    of_row[row] = static_cast<float>(10 * row - 70);
  }
  WarpPairs addend;
  row_addends(addend, of_row);
  emulate_scale_and_add(x, 3.0f, addend, kKept);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element place = mma_accumulator(lane, i);
      EXPECT_EQ(x[lane][i], 3.0f * tile.at[place.row][place.column] + of_row[place.row]);
    }
  }
}

TEST(TensorSoftmax, ScaleAndAddTruncatesTheScore) {
  const Tile tile(4);
  WarpQuads x;
  tile.load(x);
  const WarpPairs nothing = {};
  const float factor = round_to_tf32(0.18033688f);
  emulate_scale_and_add(x, factor, nothing, kKept);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element place = mma_accumulator(lane, i);
      // 11 x 11 bits: exact in fp32.
      EXPECT_EQ(x[lane][i], truncate_to_tf32(tile.at[place.row][place.column]) * factor);
    }
  }
}

// The hazard because of which masked scores stay away from these products.
TEST(TensorSoftmax, AnInfinityPoisonsBothRowsOfALane) {
  const Tile tile(5);
  WarpQuads x;
  tile.load(x);
  x[13][1] = -kInfinity;  // row 3, column 3
  const WarpPairs nothing = {};
  emulate_scale_and_add(x, 1.0f, nothing, kKept);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      // Tensor row 11 holds the odd columns of rows 3 and 11.
      const bool poisoned = lane / 4 == 3 && i % 2 == 1;
      if (poisoned && !(lane == 13 && i == 1)) {
        EXPECT_TRUE(std::isnan(x[lane][i]));
      } else if (!poisoned) {
        EXPECT_TRUE(std::isfinite(x[lane][i]));
      }
    }
  }
}

TEST(TensorSoftmax, Tf32RowSumsKeepRowsApart) {
  const Tile tile(6, true);
  WarpQuads p;
  tile.load(p);
  WarpQuads sums = {};
  emulate_row_sums_tf32(sums, p, kKept);
  emulate_row_sums_tf32(sums, p, kKept);
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 2; ++r) {
      const auto& row = tile.at[lane / 4 + 8 * r];
      float sum = 0.0f;
      for (const float x : row) {
        sum += 2.0f * x;
      }
      EXPECT_EQ(sums[lane][r] + sums[lane][r + 2], sum);
    }
  }
}

TEST(TensorSoftmax, OperandRowSumsAreInAllLanesOfAQuad) {
  float p[32][8];
  float expected[16] = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const Element place = mma_k16_a(lane, i);
      p[lane][i] = static_cast<float>(place.row * 16 + place.column);
      expected[place.row] += p[lane][i];
    }
  }
  WarpQuads sums = {};
  emulate_row_sums_16bit(sums, p, kKept);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(sums[lane][i], expected[lane / 4 + 8 * (i / 2)]);
    }
  }
}

TEST(TensorSoftmax, IntegerReductionsFindTheLargestFloat) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  for (int round = 0; round < 300; ++round) {
    float most = -kInfinity;
    std::int32_t largest = std::numeric_limits<std::int32_t>::min();
    std::int32_t smallest = std::numeric_limits<std::int32_t>::max();
    const float shift = static_cast<float>(round % 3 - 1) * 20.0f;  // all negative, mixed, positive
    for (int lane = 0; lane < 32; ++lane) {
      const float x = round % 5 == 0 && lane % 7 == 0 ? -kInfinity : normal(random) + shift;
      std::int32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      most = std::max(most, x);
      largest = std::max(largest, bits);
      smallest = std::min(smallest, bits);
    }
    const std::int32_t found = largest_float_bits(largest, smallest);
    float value;
    std::memcpy(&value, &found, sizeof value);
    EXPECT_EQ(value, most);
  }
}

}  // namespace
