// The random bytes of dropout: known answers, the layout of a cell, and that they are random.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "core/dropout.h"

namespace pantile::testing {
namespace {

using core::PhiloxKey;
using core::PhiloxWords;

// Known answers of the generator's authors: Random123, kat_vectors, philox4x32 with 10 rounds.
TEST(Dropout, PhiloxKnownAnswers) {
  struct Known {
    PhiloxWords counter;
    PhiloxKey key;
    std::uint32_t word[4];
  };
  const Known known[] = {
      {{{0, 0, 0, 0}}, {{0, 0}}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {{0xffffffff, 0xffffffff}},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {{0xa4093822, 0x299f31d0}},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& k : known) {
    const PhiloxWords words = core::philox4x32_10(k.counter, k.key);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(words.word[i], k.word[i]) << i;
    }
  }
}

// Every element of a block of 16 x 16 has a byte of its own: 16 cells of 4 words of 4 bytes.
TEST(Dropout, ElementsHaveBytesOfTheirOwn) {
  constexpr std::uint32_t kRow = 48;
  constexpr std::uint32_t kKey = 112;
  std::set<std::tuple<std::uint32_t, std::uint32_t, int>> seen;
  for (std::uint32_t row = kRow; row < kRow + 16; ++row) {
    for (std::uint32_t key = kKey; key < kKey + 16; ++key) {
      const PhiloxWords cell = core::dropout_cell(5, 3, row, key);
      EXPECT_EQ(cell.word[2], 3u);
      EXPECT_EQ(cell.word[3], 5u);
      EXPECT_EQ(cell.word[0] / 4, kKey / 16);
      EXPECT_EQ(cell.word[1] / 4, kRow / 16);
      int place = -1;
      for (int byte = 0; byte < 16; ++byte) {
        PhiloxWords words{};
        words.word[byte / 4] = 0x5au << (8 * (byte % 4));
        if (core::dropout_byte(words, row, key) == 0x5au) {
          EXPECT_EQ(place, -1);
          place = byte;
        }
      }
      EXPECT_TRUE(seen.emplace(cell.word[0], cell.word[1], place).second);
      // The pairs {2a, 2a + 1} + {0, 8} of rows and keys share a cell.
      EXPECT_EQ(cell.word[0], core::dropout_cell(5, 3, row, (key ^ 1u) ^ 8u).word[0]);
      EXPECT_EQ(cell.word[1], core::dropout_cell(5, 3, (row ^ 1u) ^ 8u, key).word[1]);
    }
  }
  EXPECT_EQ(seen.size(), 256u);
}

TEST(Dropout, KeysOfCallsDiffer) {
  std::set<std::tuple<std::uint32_t, std::uint32_t>> keys;
  for (std::uint64_t offset = 0; offset < 4096; ++offset) {
    const PhiloxKey key = core::philox_key(0x123456789abcdefu, offset);
    keys.emplace(key.word[0], key.word[1]);
  }
  EXPECT_EQ(keys.size(), 4096u);
  EXPECT_EQ(core::philox_key(7, 0).word[0], 7u);  // the offset 0 adds nothing
  EXPECT_EQ(core::philox_key(std::uint64_t{7} << 32, 0).word[1], 7u);
}

TEST(Dropout, ScaleAndThreshold) {
  EXPECT_EQ(core::dropout_scale(0), 1.0f);
  EXPECT_EQ(core::dropout_scale(128), 2.0f);
  EXPECT_EQ(core::dropout_scale(255), 256.0f);
  const PhiloxKey key = core::philox_key(1, 2);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    EXPECT_TRUE(core::dropout_keeps(key, 0, 0, 0, i, 3 * i));
    const PhiloxWords words = core::philox4x32_10(core::dropout_cell(0, 0, i, 3 * i), key);
    const int byte = static_cast<int>(core::dropout_byte(words, i, 3 * i));
    EXPECT_TRUE(core::dropout_keeps(key, byte, 0, 0, i, 3 * i));
    EXPECT_FALSE(core::dropout_keeps(key, byte + 1, 0, 0, i, 3 * i));
  }
}

// 10^8 bytes as calls draw them: the counts of all values, and of neighbours along rows, keys,
// heads and calls that are equal, lie within four standard deviations.
TEST(Dropout, BytesAreUniformAndIndependent) {
  constexpr int kBlocks = 625;  // of 16 rows and 16 keys along each axis: 10^8 bytes
  std::vector<double> count(256);
  double equal_rows = 0.0;
  double equal_keys = 0.0;
  double equal_calls = 0.0;
  const PhiloxKey key = core::philox_key(11, 5);
  const PhiloxKey next = core::philox_key(11, 6);
  double cells = 0.0;
  for (std::uint32_t k = 0; k < kBlocks * 4; ++k) {
    for (std::uint32_t r = 0; r < kBlocks * 4; ++r) {
      const PhiloxWords words = core::philox4x32_10({{k, r, 1, 2}}, key);
      for (const std::uint32_t word : words.word) {
        for (int byte = 0; byte < 32; byte += 8) {
          count[(word >> byte) & 0xffu] += 1.0;
        }
      }
      // Rows of a pair are words 0 and 2; keys of a pair words 0 and 1.
      const std::uint32_t other = core::philox4x32_10({{k, r, 1, 2}}, next).word[0];
      for (int byte = 0; byte < 32; byte += 8) {
        const std::uint32_t first = (words.word[0] >> byte) & 0xffu;
        equal_rows += first == ((words.word[2] >> byte) & 0xffu) ? 1.0 : 0.0;
        equal_keys += first == ((words.word[1] >> byte) & 0xffu) ? 1.0 : 0.0;
        equal_calls += first == ((other >> byte) & 0xffu) ? 1.0 : 0.0;
      }
      cells += 1.0;
    }
  }
  const auto deviation = [](double found, double trials) {
    return (found - trials / 256.0) / std::sqrt(trials * (1.0 / 256.0) * (255.0 / 256.0));
  };
  double chi_squared = 0.0;
  for (const double found : count) {
    EXPECT_LT(std::abs(deviation(found, 16.0 * cells)), 4.5);  // the largest of 256
    chi_squared += (found - cells / 16.0) * (found - cells / 16.0) / (cells / 16.0);
  }
  EXPECT_LT(std::abs(chi_squared - 255.0), 4.0 * std::sqrt(2.0 * 255.0));
  EXPECT_LT(std::abs(deviation(equal_rows, 4.0 * cells)), 4.0);
  EXPECT_LT(std::abs(deviation(equal_keys, 4.0 * cells)), 4.0);
  EXPECT_LT(std::abs(deviation(equal_calls, 4.0 * cells)), 4.0);
}

}  // namespace
}  // namespace pantile::testing
