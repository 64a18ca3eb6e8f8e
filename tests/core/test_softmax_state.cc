// The online softmax in blocks against the two-pass softmax in double.
#include "core/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace {

using pantile::core::empty_softmax_state;
using pantile::core::kLn2;
using pantile::core::kLog2E;
using pantile::core::log_sum_exp;
using pantile::core::normaliser;
using pantile::core::softmax_shift;
using pantile::core::SoftmaxState;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const auto exp2_of = [](float x) { return std::exp2(x); };
const auto log2_of = [](float x) { return std::log2(x); };

// One row: scores in base 2, one value a key, and the unnormalised output.
struct Row {
  SoftmaxState state = empty_softmax_state();
  float output = 0.0f;
};

// Takes in one block's maximum and returns the factor by which the old sum and output shrink.
float raise_max(SoftmaxState& state, float block_max) {
  const float max = block_max > state.max ? block_max : state.max;
  const float factor = exp2_of(state.max - softmax_shift(max));
  state.max = max;
  state.sum *= factor;
  return factor;
}

void take_block(Row& row, const std::vector<float>& scores, std::size_t begin, std::size_t end) {
  float block_max = -kInfinity;
  for (std::size_t i = begin; i < end; ++i) {
    block_max = std::fmax(block_max, scores[i]);
  }
  row.output *= raise_max(row.state, block_max);
  for (std::size_t i = begin; i < end; ++i) {
    const float p = exp2_of(scores[i] - softmax_shift(row.state.max));
    row.state.sum += p;
    row.output += p * static_cast<float>(i + 1);  // value of key i
  }
}

struct Expected {
  double output, lse;
};

Expected two_pass(const std::vector<float>& scores) {
  double max = -std::numeric_limits<double>::infinity();
  for (const float s : scores) {
    max = std::fmax(max, s);
  }
  if (std::isinf(max)) {
    return Expected{0.0, -std::numeric_limits<double>::infinity()};
  }
  double sum = 0.0;
  double output = 0.0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double p = std::exp2(scores[i] - max);
    sum += p;
    output += p * static_cast<double>(i + 1);
  }
  return Expected{output / sum, (max + std::log2(sum)) * std::log(2.0)};
}

void expect_close(const Row& row, const std::vector<float>& scores) {
  const Expected expected = two_pass(scores);
  ASSERT_NEAR(row.output * normaliser(row.state), expected.output, 1e-5 * (1 + expected.output));
  const float lse = log_sum_exp(row.state, log2_of);
  if (std::isinf(expected.lse)) {
    ASSERT_EQ(lse, -kInfinity);
  } else {
    ASSERT_NEAR(lse, expected.lse, 1e-5 * (1 + std::fabs(expected.lse)));
  }
}

std::vector<float> random_scores(std::mt19937& random, std::size_t count) {
  std::uniform_real_distribution<float> score(-40.0f, 40.0f);
  std::vector<float> scores(count);
  const float offset = random() % 4 == 0 ? -900.0f : 0.0f;  // far below what exp2 can hold
  for (float& s : scores) {
    s = random() % 3 == 0 ? -kInfinity : offset + score(random);
  }
  return scores;
}

TEST(SoftmaxState, EveryBlockingGivesTheTwoPassResult) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const std::size_t count = random() % 9;
    const std::vector<float> scores = random_scores(random, count);
    for (unsigned cuts = 0; cuts < 1u << count; ++cuts) {  // bit i: a block ends after key i
      Row row;
      std::size_t begin = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if ((cuts >> i & 1u) != 0 || i + 1 == count) {
          take_block(row, scores, begin, i + 1);
          begin = i + 1;
        }
      }
      expect_close(row, scores);
      ASSERT_FALSE(HasFailure()) << "repeat " << repeat << " cuts " << cuts;
    }
  }
}

TEST(SoftmaxState, RowsThatSeeNothingAreExactlyZero) {
  SoftmaxState state = empty_softmax_state();
  EXPECT_EQ(state.max, -kInfinity);
  EXPECT_EQ(state.sum, 0.0f);
  EXPECT_EQ(raise_max(state, -kInfinity), 0.0f);
  EXPECT_EQ(state.sum, 0.0f);
  EXPECT_EQ(normaliser(state), 0.0f);
  EXPECT_EQ(log_sum_exp(state, log2_of), -kInfinity);
}

TEST(SoftmaxState, AttendedNaNAndInfinityReachTheResult) {
  for (const float bad : {kNaN, kInfinity}) {
    for (std::size_t at = 0; at < 4; ++at) {
      std::vector<float> scores = {1.0f, 2.0f, -3.0f, 0.5f};
      scores[at] = bad;
      Row row;
      take_block(row, scores, 0, 2);
      take_block(row, scores, 2, 4);
      EXPECT_TRUE(std::isnan(row.output * normaliser(row.state))) << bad << " at " << at;
      EXPECT_TRUE(std::isnan(normaliser(row.state))) << bad << " at " << at;
      EXPECT_TRUE(std::isnan(log_sum_exp(row.state, log2_of))) << bad << " at " << at;
    }
  }
}

TEST(SoftmaxState, ConstantsAreTheNearestFloats) {
  EXPECT_EQ(kLog2E, static_cast<float>(1.0 / std::log(2.0)));
  EXPECT_EQ(kLn2, static_cast<float>(std::log(2.0)));
  constexpr float kHalf = normaliser(SoftmaxState{0.0f, 2.0f});
  EXPECT_EQ(kHalf, 0.5f);
}

}  // namespace
