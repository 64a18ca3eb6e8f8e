// Masks and tile plans against the definition of visibility, over every small problem.
#include "core/geometry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace {

using pantile::core::is_visible;
using pantile::core::kNoBound;
using pantile::core::make_mask;
using pantile::core::Mask;
using pantile::core::plan_key_tile;
using pantile::core::plan_row_tile;
using pantile::core::Span;
using pantile::core::TilePlan;
using pantile::core::visible_keys;
using pantile::core::visible_rows;
using pantile::core::with_shift;

using Bits = std::uint32_t;

struct Problem {
  int rows, keys;
  long long left, right;  // public convention: -1 is unbounded
};

// The sentence of the documentation, in 64 bits and without any clamping.
bool sees(const Problem& p, long long row, long long key) {
  const long long position = row + p.keys - p.rows;
  const bool not_too_old = p.left < 0 || p.left >= (1LL << 40) || key >= position - p.left;
  const bool not_too_new = p.right < 0 || p.right >= (1LL << 40) || key <= position + p.right;
  return key >= 0 && key < p.keys && row >= 0 && row < p.rows && not_too_old && not_too_new;
}

Mask mask_of(const Problem& p) {
  return make_mask(p.rows, p.keys, p.left, p.right);
}

constexpr int kMostRows = 9;
constexpr int kMostKeys = 10;
constexpr int kWidestWindow = 11;  // wider than every problem, so that it hides nothing

template <class Visit>
void for_each_small_problem(Visit visit) {
  for (int rows = 0; rows <= kMostRows; ++rows) {
    for (int keys = 0; keys <= kMostKeys; ++keys) {
      for (long long left = -1; left <= kWidestWindow; ++left) {
        for (long long right = -1; right <= kWidestWindow; ++right) {
          visit(Problem{rows, keys, left, right});
          if (testing::Test::HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

std::string print(const Problem& p) {
  return "rows " + std::to_string(p.rows) + " keys " + std::to_string(p.keys) + " left " +
         std::to_string(p.left) + " right " + std::to_string(p.right);
}

// seen[i]: bit j is set when line i (a row or a key) meets the element j (a key or a row).
std::vector<Bits> lines_of(const Problem& p, bool by_row) {
  std::vector<Bits> lines(static_cast<std::size_t>(by_row ? p.rows : p.keys), 0);
  for (int row = 0; row < p.rows; ++row) {
    for (int key = 0; key < p.keys; ++key) {
      if (sees(p, row, key)) {
        lines[static_cast<std::size_t>(by_row ? row : key)] |= Bits{1} << (by_row ? key : row);
      }
    }
  }
  return lines;
}

// A plan is exact when `visit` holds a tile if and only if some line meets it, and `full` holds it
// if and only if the tile is whole and every line meets all of it.
void expect_exact(const TilePlan& plan, Bits some, Bits every, int elements, int tile) {
  const int tiles = (elements + tile - 1) / tile;
  ASSERT_LE(plan.visit.begin, plan.visit.end);
  ASSERT_GE(plan.visit.begin, 0);
  ASSERT_LE(plan.visit.end, tiles);
  ASSERT_LE(plan.full.begin, plan.full.end);
  ASSERT_GE(plan.full.begin, plan.visit.begin);
  ASSERT_LE(plan.full.end, plan.visit.end);
  if (plan.full.empty()) {  // then the loop over masked tiles above `full` takes everything
    ASSERT_EQ(plan.full.begin, plan.visit.begin);
  }
  for (int t = 0; t < tiles; ++t) {
    const Bits bits = ((Bits{1} << tile) - 1) << (t * tile);
    const bool whole = (t + 1) * tile <= elements;
    ASSERT_EQ(t >= plan.visit.begin && t < plan.visit.end, (some & bits) != 0) << "tile " << t;
    ASSERT_EQ(t >= plan.full.begin && t < plan.full.end, whole && (every & bits) == bits)
        << "tile " << t;
  }
}

template <class Plan>
void expect_exact_plans(const Problem& p, bool by_row, Plan plan) {
  const std::vector<Bits> lines = lines_of(p, by_row);
  const int elements = by_row ? p.keys : p.rows;
  const int count = static_cast<int>(lines.size());
  for (int begin = 0; begin < count; ++begin) {
    Bits some = 0;
    Bits every = ~Bits{0};
    for (int end = begin + 1; end <= count; ++end) {
      some |= lines[static_cast<std::size_t>(end - 1)];
      every &= lines[static_cast<std::size_t>(end - 1)];
      for (int tile = 1; tile <= 5; ++tile) {
        expect_exact(plan(mask_of(p), Span{begin, end}, tile), some, every, elements, tile);
        ASSERT_FALSE(testing::Test::HasFailure())
            << print(p) << " lines [" << begin << ", " << end << ") tile " << tile;
      }
    }
  }
}

TEST(Geometry, SpanCountsNothingWhenItIsEmptyOrReversed) {
  EXPECT_EQ((Span{2, 7}).size(), 5);
  EXPECT_FALSE((Span{2, 3}).empty());
  EXPECT_EQ((Span{7, 7}).size(), 0);
  EXPECT_TRUE((Span{7, 7}).empty());
  EXPECT_EQ((Span{7, 2}).size(), 0);
  EXPECT_TRUE((Span{7, 2}).empty());
}

TEST(Geometry, RowsSeeExactlyTheKeysOfTheDefinition) {
  for_each_small_problem([](const Problem& p) {
    const Mask mask = mask_of(p);
    for (int row = 0; row < p.rows; ++row) {
      const Span span = visible_keys(mask, row);
      ASSERT_GE(span.begin, 0) << print(p);
      ASSERT_LE(span.end, p.keys) << print(p);
      ASSERT_LE(span.begin, span.end) << print(p);
      for (int key = 0; key < p.keys; ++key) {
        ASSERT_EQ(is_visible(mask, row, key), sees(p, row, key))
            << print(p) << " row " << row << " key " << key;
        ASSERT_EQ(key >= span.begin && key < span.end, sees(p, row, key))
            << print(p) << " row " << row << " key " << key;
      }
    }
  });
}

TEST(Geometry, KeysAreSeenByExactlyTheRowsOfTheDefinition) {
  for_each_small_problem([](const Problem& p) {
    const Mask mask = mask_of(p);
    for (int key = 0; key < p.keys; ++key) {
      const Span span = visible_rows(mask, key);
      ASSERT_GE(span.begin, 0) << print(p);
      ASSERT_LE(span.end, p.rows) << print(p);
      ASSERT_LE(span.begin, span.end) << print(p);
      for (int row = 0; row < p.rows; ++row) {
        ASSERT_EQ(row >= span.begin && row < span.end, sees(p, row, key))
            << print(p) << " row " << row << " key " << key;
      }
    }
  });
}

TEST(Geometry, RowTilePlansAreExact) {
  for_each_small_problem(
      [](const Problem& p) { expect_exact_plans(p, true, plan_row_tile<Mask>); });
}

TEST(Geometry, KeyTilePlansAreExact) {
  for_each_small_problem(
      [](const Problem& p) { expect_exact_plans(p, false, plan_key_tile<Mask>); });
}

// Real tile sizes at lengths where a window, the diagonal and the ragged end fall in one tile.
TEST(Geometry, PlansOfRealTilesAreExact) {
  for (const int rows : {1, 127, 128, 129, 300}) {
    for (const int keys : {1, 63, 64, 65, 333}) {
      for (const long long left : {-1LL, 0LL, 1LL, 63LL, 64LL, 200LL}) {
        for (const long long right : {-1LL, 0LL, 5LL, 64LL}) {
          const Problem p{rows, keys, left, right};
          const int tile_q = 128;
          const int tile_k = 64;
          for (int begin = 0; begin < rows; begin += tile_q) {
            const int end = begin + tile_q < rows ? begin + tile_q : rows;
            const TilePlan plan = plan_row_tile(mask_of(p), Span{begin, end}, tile_k);
            for (int t = 0; t * tile_k < keys; ++t) {
              int seen = 0;
              for (int row = begin; row < end; ++row) {
                for (int key = t * tile_k; key < (t + 1) * tile_k; ++key) {
                  seen += sees(p, row, key) ? 1 : 0;
                }
              }
              ASSERT_EQ(t >= plan.visit.begin && t < plan.visit.end, seen > 0) << print(p);
              ASSERT_EQ(t >= plan.full.begin && t < plan.full.end, seen == (end - begin) * tile_k)
                  << print(p);
            }
          }
        }
      }
    }
  }
}

// The longest sequences and the widest windows: no sum may leave 32 bits. In a constant expression
// an overflow would not even compile.
TEST(Geometry, LongestSequencesAndWidestWindowsStayExact) {
  constexpr int kLongest = kNoBound - 1;
  constexpr Mask kWidest = make_mask(kLongest, kLongest, kNoBound, kNoBound);
  constexpr Span kLastRow = visible_keys(kWidest, kLongest - 1);
  constexpr Span kLastKey = visible_rows(kWidest, kLongest - 1);
  EXPECT_EQ(kLastRow.begin, 0);
  EXPECT_EQ(kLastRow.end, kLongest);
  EXPECT_EQ(kLastKey.begin, 0);
  EXPECT_EQ(kLastKey.end, kLongest);

  const long long huge = std::numeric_limits<long long>::max();
  const std::vector<long long> windows = {
      -1, 0, 1, kLongest - 1, kLongest, kNoBound, kNoBound + 1LL, 1LL << 31, 1LL << 32, huge};
  const std::vector<int> lengths = {1, 2, kLongest - 1, kLongest};
  for (const int rows : lengths) {
    for (const int keys : lengths) {
      for (const long long left : windows) {
        for (const long long right : windows) {
          const Problem p{rows, keys, left, right};
          const Mask mask = mask_of(p);
          for (const int row : {0, rows / 2, rows - 1}) {
            for (const int key : {0, 1, keys / 2, keys - 2, keys - 1}) {
              if (key >= 0 && key < keys) {
                ASSERT_EQ(is_visible(mask, row, key), sees(p, row, key))
                    << print(p) << " row " << row << " key " << key;
                const Span span = visible_rows(mask, key);
                ASSERT_EQ(row >= span.begin && row < span.end, sees(p, row, key))
                    << print(p) << " row " << row << " key " << key;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Geometry, NegativeWindowsAreUnboundedOnTheirOwnSideOnly) {
  const Mask left = make_mask(4, 4, -1, 3);
  EXPECT_EQ(left.left, kNoBound);
  EXPECT_EQ(left.right, 3);
  const Mask right = make_mask(4, 4, 3, -1);
  EXPECT_EQ(right.left, 3);
  EXPECT_EQ(right.right, kNoBound);
  EXPECT_EQ(make_mask(2, 7, -1, 0).shift(), 5);
  EXPECT_EQ(make_mask(7, 2, -1, 0).shift(), -5);
}

// The shift of the caller: visibility by its definition, and tiles that miss and claim nothing.
TEST(Geometry, AnyShiftIsTheOneGiven) {
  const int rows = 7, keys = 9, tile = 3;
  for (int shift = -20; shift <= 20; ++shift) {
    for (const int left : {0, 2, kNoBound}) {
      for (const int right : {0, 3, kNoBound}) {
        const auto mask = with_shift(Mask{rows, keys, left, right}, shift);
        ASSERT_EQ(mask.shift(), shift);
        for (int first = 0; first < rows; first += 2) {
          const Span span{first, std::min(first + 2, rows)};
          const auto plan = plan_row_tile(mask, span, tile);
          for (int key = 0; key < keys; ++key) {
            bool any = false, all = true;
            for (int row = span.begin; row < span.end; ++row) {
              const bool seen = row + shift - left <= key && key <= row + shift + right;
              ASSERT_EQ(is_visible(mask, row, key), seen) << shift << " " << row << " " << key;
              any = any || seen;
              all = all && seen;
            }
            const int number = key / tile;
            ASSERT_TRUE(!any || (number >= plan.visit.begin && number < plan.visit.end));
            ASSERT_TRUE(all || !(number >= plan.full.begin && number < plan.full.end));
          }
        }
      }
    }
  }
  EXPECT_EQ(with_shift(Mask{5, 9, 0, 0}, 1 << 30).shift(), kNoBound);
  EXPECT_EQ(with_shift(Mask{5, 9, 0, 0}, -(1 << 30)).shift(), -kNoBound);
}

}  // namespace
