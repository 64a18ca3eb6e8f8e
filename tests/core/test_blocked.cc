// Blocks of sequences never overlap, V's columns are a permutation with the property that the
// kernel counts on, and the mean is summed in its fixed order.
#include "core/blocked.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace {

using pantile::core::channel_mean;
using pantile::core::first_block;
using pantile::core::fold_sums;
using pantile::core::kBlockedRows;
using pantile::core::mean_term;
using pantile::core::SequenceSide;
using pantile::core::value_column;
using pantile::core::value_key;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Blocked, DenseSequencesFollowEachOther) {
  SequenceSide side;
  for (const int length : {0, 1, 127, 128, 129, 1000}) {
    side.max_length = length;
    for (int b = 0; b < 5; ++b) {
      EXPECT_EQ(first_block(side, b), b * ((length + 127) / 128)) << length;
    }
  }
}

TEST(Blocked, PackedSequencesNeverShareABlock) {
  std::mt19937 generator(1);
  for (int round = 0; round < 1000; ++round) {
    std::vector<std::int32_t> bounds = {0};
    for (int b = 0; b < 8; ++b) {
      bounds.push_back(bounds.back() + static_cast<int>(generator() % 300));
    }
    SequenceSide side;
    side.cu_seqlens = bounds.data();
    std::int64_t free = 0;
    for (int b = 0; b < 8; ++b) {
      const int length =
          bounds[static_cast<std::size_t>(b) + 1] - bounds[static_cast<std::size_t>(b)];
      ASSERT_GE(first_block(side, b), free);
      free = first_block(side, b) + (length + kBlockedRows - 1) / kBlockedRows;
    }
    ASSERT_LE(free, pantile::core::packed_blocks(bounds.back(), 8, kBlockedRows));
  }
}

TEST(Blocked, ColumnsOfVAreAPermutation) {
  std::set<int> columns;
  for (int key = 0; key < kBlockedRows; ++key) {
    const int column = value_column(key);
    EXPECT_TRUE(columns.insert(column).second) << key;
    EXPECT_EQ(column / 16, key / 16);  // inside its group
    EXPECT_EQ(value_key(column), key);
  }
}

// What a thread of a 16-bit accumulator holds of 16 keys, lane q of four: 2q, 2q + 1 of both
// halves.
TEST(Blocked, FourNeighbouringColumnsBelongToOneThread) {
  for (int word = 0; word < kBlockedRows / 4; ++word) {
    const int first = word / 4 * 16;
    const int lane = word % 4;
    const int expected[4] = {2 * lane, 2 * lane + 1, 8 + 2 * lane, 8 + 2 * lane + 1};
    for (int byte = 0; byte < 4; ++byte) {
      EXPECT_EQ(value_key(4 * word + byte), first + expected[byte]);
    }
  }
}

TEST(Blocked, FoldsHalvesOntoEachOther) {
  float ones[16];
  for (int i = 0; i < 16; ++i) {
    ones[i] = static_cast<float>(1 << i);
  }
  EXPECT_EQ(fold_sums(ones, 16), 65535.0f);
  // Only 8 apart cancel exactly: another order loses the 1.
  float sums[16] = {};
  sums[0] = 1e30f;
  sums[8] = -1e30f;
  sums[4] = 1.0f;
  EXPECT_EQ(fold_sums(sums, 16), 1.0f);
}

TEST(Blocked, MeansAreFinite) {
  EXPECT_EQ(mean_term(3.0f), 3.0f);
  EXPECT_EQ(mean_term(kNaN), 0.0f);
  EXPECT_EQ(mean_term(kInfinity), 0.0f);
  EXPECT_EQ(mean_term(-kInfinity), 0.0f);
  EXPECT_EQ(channel_mean(12.0f, 4), 3.0f);
  EXPECT_EQ(channel_mean(12.0f, 0), 0.0f);
  EXPECT_EQ(channel_mean(kInfinity, 4), 0.0f);
  EXPECT_EQ(channel_mean(kNaN, 4), 0.0f);
}

}  // namespace
