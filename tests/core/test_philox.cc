// Philox4x32-10 against the published answers, and what dropout relies on.
#include "core/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

namespace {

using pantile::core::philox4x32_10;
using pantile::core::philox_key;
using pantile::core::PhiloxKey;
using pantile::core::PhiloxWords;
using pantile::core::random_word;
using pantile::core::random_words;
using pantile::core::uniform;

void expect_words(const PhiloxWords& words, const std::array<std::uint32_t, 4>& expected) {
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(words.word[i], expected[i]) << "word " << i;
  }
}

// The vectors of the Random123 distribution (Salmon et al. 2011).
TEST(Philox, KnownAnswersOfThePublication) {
  expect_words(philox4x32_10(PhiloxWords{{0, 0, 0, 0}}, PhiloxKey{{0, 0}}),
               {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  constexpr std::uint32_t kOnes = 0xffffffffu;
  expect_words(philox4x32_10(PhiloxWords{{kOnes, kOnes, kOnes, kOnes}}, PhiloxKey{{kOnes, kOnes}}),
               {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  constexpr PhiloxWords kPi =
      philox4x32_10(PhiloxWords{{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}},
                    PhiloxKey{{0xa4093822u, 0x299f31d0u}});
  expect_words(kPi, {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

// Masks that a model was trained with must be reproducible by every later version.
TEST(Philox, CoordinatesEnterTheCounterInAFixedOrder) {
  const PhiloxKey key = philox_key(0x0123456789abcdefu, 0);
  EXPECT_EQ(key.word[0], 0x89abcdefu);  // offset 0 leaves the seed alone
  EXPECT_EQ(key.word[1], 0x01234567u);
  for (int k = 0; k < 4; ++k) {
    EXPECT_EQ(random_word(key, 5, 6, 7, 4 * 9 + k),
              philox4x32_10(PhiloxWords{{9, 7, 6, 5}}, key).word[k]);
  }
}

// The finalizer of SplitMix64, as its authors publish it, with a seed of 0.
TEST(Philox, OffsetsAreMixedByTheFinalizerOfSplitMix64) {
  // First outputs of SplitMix64 from state 0 and 1234567: the finalizer of state + golden ratio.
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const auto mixed = [](std::uint64_t state) {
    const PhiloxKey key = philox_key(0, state);
    return static_cast<std::uint64_t>(key.word[1]) << 32 | key.word[0];
  };
  EXPECT_EQ(mixed(kGolden), 0xE220A8397B1DCDAFu);
  EXPECT_EQ(mixed(1234567u + kGolden), 6457827717110365317u);
}

TEST(Philox, CallsOfOneSeedNeverShareAKey) {
  std::vector<std::uint64_t> keys;
  for (const std::uint64_t base :
       {std::uint64_t{0}, std::uint64_t{1} << 32, ~std::uint64_t{0} - 99999}) {
    for (std::uint64_t i = 0; i < 100000; ++i) {
      const PhiloxKey key = philox_key(42, base + i);
      keys.push_back(static_cast<std::uint64_t>(key.word[1]) << 32 | key.word[0]);
    }
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(std::adjacent_find(keys.begin(), keys.end()), keys.end());
}

TEST(Philox, EveryElementHasItsOwnNumber) {
  using Words = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
  const PhiloxKey key = philox_key(1, 2);
  std::vector<Words> groups;
  for (int batch = 0; batch < 8; ++batch) {
    for (int head = 0; head < 8; ++head) {
      for (int row = 0; row < 32; ++row) {
        for (int key_group = 0; key_group < 32; ++key_group) {
          const PhiloxWords w = random_words(key, batch, head, row, key_group);
          groups.emplace_back(w.word[0], w.word[1], w.word[2], w.word[3]);
          for (int k = 0; k < 4; ++k) {
            ASSERT_EQ(random_word(key, batch, head, row, 4 * key_group + k), w.word[k]);
          }
        }
      }
    }
  }
  std::sort(groups.begin(), groups.end());
  EXPECT_EQ(std::adjacent_find(groups.begin(), groups.end()), groups.end());
}

TEST(Philox, UniformNumbersFillTheHalfOpenUnitInterval) {
  EXPECT_EQ(uniform(0), 0.0f);
  EXPECT_EQ(uniform(0xffu), 0.0f);
  EXPECT_EQ(uniform(0x100u), std::ldexp(1.0f, -24));
  EXPECT_EQ(uniform(0x80000000u), 0.5f);
  EXPECT_EQ(uniform(0xffffffffu), 1.0f - std::ldexp(1.0f, -24));
}

// Mean, variance and the correlation of neighbours over rows and over keys: six standard errors.
TEST(Philox, NumbersOfAMatrixLookIndependentAndUniform) {
  constexpr int kSize = 1024;
  const PhiloxKey key = philox_key(2024, 7);
  std::vector<double> u(kSize * kSize);
  for (int row = 0; row < kSize; ++row) {
    for (int k = 0; k < kSize; ++k) {
      u[static_cast<std::size_t>(row * kSize + k)] = uniform(random_word(key, 3, 4, row, k)) - 0.5;
    }
  }
  double sum = 0.0;
  double squares = 0.0;
  double along_keys = 0.0;
  double along_rows = 0.0;
  const std::size_t count = u.size() - kSize;
  for (std::size_t i = 0; i < count; ++i) {
    sum += u[i];
    squares += u[i] * u[i];
    along_keys += u[i] * u[i + 1];
    along_rows += u[i] * u[i + kSize];
  }
  const auto n = static_cast<double>(count);
  EXPECT_NEAR(sum / n, 0.0, 6 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(squares / n, 1.0 / 12, 6 * std::sqrt(1.0 / 180 / n));
  EXPECT_NEAR(along_keys / n, 0.0, 6 / 12.0 / std::sqrt(n));
  EXPECT_NEAR(along_rows / n, 0.0, 6 / 12.0 / std::sqrt(n));
}

}  // namespace
