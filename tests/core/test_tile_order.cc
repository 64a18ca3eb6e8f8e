// Work ids name every tile once, longest first, section by section.
#include "core/tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using pantile::core::first_slot;
using pantile::core::heads_per_section;
using pantile::core::sequence_of_slot;
using pantile::core::TileDirection;
using pantile::core::TileOrder;
using pantile::core::WorkTile;

constexpr TileDirection kDirections[] = {TileDirection::ascending, TileDirection::descending};

// The list that the header's opening comment describes, written as loops.
std::vector<WorkTile> listed(int tiles, int heads, int batch, int section,
                             TileDirection direction) {
  std::vector<WorkTile> list;
  const int all_heads = heads * batch;
  for (int first = 0; first < all_heads; first += section) {
    for (int step = 0; step < tiles; ++step) {
      const int tile = direction == TileDirection::descending ? tiles - 1 - step : step;
      for (int h = first; h < std::min(first + section, all_heads); ++h) {
        list.push_back(WorkTile{tile, h % heads, h / heads});
      }
    }
  }
  return list;
}

void expect_same(const WorkTile& tile, const WorkTile& expected) {
  ASSERT_EQ(tile.tile, expected.tile);
  ASSERT_EQ(tile.head, expected.head);
  ASSERT_EQ(tile.batch, expected.batch);
}

TEST(TileOrder, DenseOrderIsTheListedOneForEveryShape) {
  for (int tiles = 0; tiles <= 7; ++tiles) {
    for (int heads = 0; heads <= 7; ++heads) {
      for (int batch = 0; batch <= 4; ++batch) {
        for (int section = 1; section <= 30; ++section) {
          for (const TileDirection direction : kDirections) {
            const TileOrder order(tiles, heads, batch, section, direction);
            const std::vector<WorkTile> list = listed(tiles, heads, batch, section, direction);
            ASSERT_EQ(order.count(), static_cast<int>(list.size()));
            for (int work = 0; work < order.count(); ++work) {
              expect_same(order.tile(work), list[static_cast<std::size_t>(work)]);
              ASSERT_FALSE(HasFailure()) << "tiles " << tiles << " heads " << heads << " batch "
                                         << batch << " section " << section << " work " << work;
            }
          }
        }
      }
    }
  }
}

TEST(TileOrder, EveryTileOfALargeBatchIsNamedOnce) {
  std::mt19937 random(1);
  const auto draw = [&](int most) {
    return 1 + static_cast<int>(random() % static_cast<unsigned>(most));
  };
  for (int repeat = 0; repeat < 60; ++repeat) {
    const int tiles = draw(130);
    const int heads = draw(40);
    const int batch = draw(5);
    const TileOrder order(tiles, heads, batch, draw(64), kDirections[repeat % 2]);
    std::vector<int> visits(static_cast<std::size_t>(order.count()), 0);
    for (int work = 0; work < order.count(); ++work) {
      const WorkTile t = order.tile(work);
      ASSERT_TRUE(t.tile >= 0 && t.tile < tiles && t.head >= 0 && t.head < heads && t.batch >= 0 &&
                  t.batch < batch);
      ++visits[static_cast<std::size_t>((t.batch * heads + t.head) * tiles + t.tile)];
    }
    ASSERT_EQ(std::count(visits.begin(), visits.end(), 1), order.count());
  }
}

// Ends of orders that fill 31 bits, where a product or a division could go wrong unseen.
TEST(TileOrder, TheLargestCountsAreExactAtBothEnds) {
  struct Shape {
    int tiles, heads, batch;
  };
  const Shape shapes[] = {{0x7fffffff, 1, 1}, {1, 0x7fffffff, 1}, {1, 1, 0x7fffffff},
                          {32767, 256, 256},  {256, 32767, 256},  {3, 65535, 10922}};
  for (const Shape& s : shapes) {
    const int heads = s.heads * s.batch;
    for (const int section : {1, 2, 7, 64, 65535, 0x7fffffff}) {
      ASSERT_TRUE(TileOrder::fits(s.tiles, s.heads, s.batch));
      const TileOrder order(s.tiles, s.heads, s.batch, section, TileDirection::descending);
      ASSERT_EQ(order.count(), s.tiles * heads);
      expect_same(order.tile(0), WorkTile{s.tiles - 1, 0, 0});
      expect_same(order.tile(order.count() - 1), WorkTile{0, s.heads - 1, s.batch - 1});
    }
  }
}

TEST(TileOrder, CountsBeyond31BitsAreRefused) {
  EXPECT_TRUE(TileOrder::fits(1, 46340, 46340));
  EXPECT_FALSE(TileOrder::fits(1, 46341, 46341));
  EXPECT_FALSE(TileOrder::fits(2, 46340, 46340));
  EXPECT_FALSE(TileOrder::fits(1LL << 40, 1LL << 40, 1LL << 40));
  EXPECT_FALSE(TileOrder::fits(1, 7, 0x6DB6DB6DB6DB6DB7));  // the product is 1 modulo 2^64
  EXPECT_TRUE(TileOrder::fits(1LL << 40, 0, 1LL << 40));
  EXPECT_TRUE(TileOrder::fits(0, 1LL << 20, 7));
  EXPECT_EQ(TileOrder(2, 46340, 46340, 1, TileDirection::ascending).count(), 0);
}

TEST(TileOrder, OrdersAreConstantExpressions) {
  constexpr TileOrder order(5, 4, 2, 2, TileDirection::descending);
  constexpr WorkTile tile = order.tile(13);  // section 1 (heads 2, 3), second tile from its end
  EXPECT_EQ(order.count(), 40);
  EXPECT_EQ(tile.tile, 3);
  EXPECT_EQ(tile.head, 3);
  EXPECT_EQ(tile.batch, 0);
  EXPECT_EQ(TileOrder().count(), 0);
}

TEST(TileOrder, SectionsFillTheCacheAndKeepGroupsTogether) {
  constexpr std::int64_t kMiB = 1 << 20;
  EXPECT_EQ(heads_per_section(8 * kMiB, 1, 64, 32 * kMiB), 4);
  EXPECT_EQ(heads_per_section(8 * kMiB, 1, 64, 32 * kMiB - 1), 2);
  EXPECT_EQ(heads_per_section(8 * kMiB, 8, 64, 32 * kMiB), 32);  // eight query heads share one
  EXPECT_EQ(heads_per_section(64 * kMiB, 1, 64, 32 * kMiB), 1);  // nothing fits: one head
  EXPECT_EQ(heads_per_section(64 * kMiB, 8, 64, 32 * kMiB), 8);
  EXPECT_EQ(heads_per_section(kMiB, 1, 12, 32 * kMiB), 8);   // a power of two
  EXPECT_EQ(heads_per_section(0, 1, 16, 32 * kMiB), 16);     // no keys at all
  EXPECT_EQ(heads_per_section(kMiB, 4, 48, 32 * kMiB), 32);  // 8 of 12 key heads
  EXPECT_EQ(heads_per_section(kMiB, 4, 0, 32 * kMiB), 1);
  EXPECT_EQ(heads_per_section(kMiB, 4, 3, 32 * kMiB), 3);
}

// Every tile of every length pattern, empty sequences and all, has a slot of its own, and the slot
// leads back to its sequence.
TEST(TileOrder, SlotsOfPackedSequencesLeadBackToThem) {
  constexpr int kTileSize = 4;
  constexpr int kLengths[] = {0, 1, 4, 5, 11};
  for (int batch = 1; batch <= 5; ++batch) {
    int patterns = 1;
    for (int b = 0; b < batch; ++b) {
      patterns *= 5;
    }
    for (int pattern = 0; pattern < patterns; ++pattern) {
      std::vector<std::int32_t> cu_seqlens = {0};
      for (int b = 0, rest = pattern; b < batch; ++b, rest /= 5) {
        cu_seqlens.push_back(cu_seqlens.back() + kLengths[rest % 5]);
      }
      int next = 0;
      for (int b = 0; b < batch; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const int tiles = (cu_seqlens[at + 1] - cu_seqlens[at] + kTileSize - 1) / kTileSize;
        const int first = first_slot(cu_seqlens.data(), kTileSize, b);
        ASSERT_GE(first, next) << "pattern " << pattern << " sequence " << b;
        for (int tile = 0; tile < tiles; ++tile) {
          ASSERT_EQ(sequence_of_slot(cu_seqlens.data(), batch, kTileSize, first + tile), b)
              << "pattern " << pattern << " tile " << tile;
        }
        next = first + tiles;
      }
      ASSERT_LE(next, cu_seqlens.back() / kTileSize + batch);
    }
  }
}

}  // namespace
