// Swizzles against their chunk tables, and the bank conflicts that they are there to avoid.
#include "core/swizzle.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "bank_passes.h"

namespace {

using pantile::core::bank_passes;
using pantile::core::kChunkBytes;
using pantile::core::ldmatrix_offset;
using pantile::core::panel_bytes;
using pantile::core::panel_offset;
using pantile::core::Swizzle;
using pantile::core::swizzle_alignment;
using pantile::core::swizzled;

constexpr Swizzle kModes[] = {Swizzle::bytes32, Swizzle::bytes64, Swizzle::bytes128};

int passes(const std::vector<std::uint32_t>& addresses, int bytes) {
  return bank_passes(addresses.data(), static_cast<int>(addresses.size()), bytes);
}

// The pattern of the CUDA programming guide: chunk number inside a panel row, for 8 rows of 128
// bytes.
TEST(Swizzle, ChunksMoveAsTheTablesOfTheHardwareSay) {
  for (int line = 0; line < 8; ++line) {       // 128-byte lines
    for (int chunk = 0; chunk < 8; ++chunk) {  // 16-byte chunks of a line
      const auto byte = static_cast<std::uint32_t>(line * 128 + chunk * 16 + 5);
      const auto at = [&](int moved) {
        return static_cast<std::uint32_t>(line * 128 + moved * 16 + 5);
      };
      const int in_64 = chunk % 4;
      const int in_32 = chunk % 2;
      EXPECT_EQ(swizzled(Swizzle::bytes128, byte), at(chunk ^ line));
      EXPECT_EQ(swizzled(Swizzle::bytes64, byte), at(chunk - in_64 + (in_64 ^ line % 4)));
      EXPECT_EQ(swizzled(Swizzle::bytes32, byte), at(chunk - in_32 + (in_32 ^ line % 2)));
    }
  }
}

TEST(Swizzle, IsItsOwnInverseAndStaysInItsAtom) {
  for (const Swizzle mode : kModes) {
    const auto atom = static_cast<std::uint32_t>(swizzle_alignment(mode));
    for (std::uint32_t byte = 0; byte < 16 * 1024; ++byte) {
      const std::uint32_t moved = swizzled(mode, byte);
      ASSERT_EQ(swizzled(mode, moved), byte);
      ASSERT_EQ(moved / atom, byte / atom);
      ASSERT_EQ(moved % kChunkBytes, byte % kChunkBytes);
      ASSERT_EQ(swizzled(mode, byte + 5 * atom), moved + 5 * atom);  // tiles of whole atoms agree
    }
  }
  EXPECT_EQ(swizzle_alignment(Swizzle::bytes128), 1024);
  EXPECT_EQ(swizzle_alignment(Swizzle::bytes64), 512);
  EXPECT_EQ(swizzle_alignment(Swizzle::bytes32), 256);
}

TEST(Swizzle, PanelsFillATileWithoutHolesOrOverlap) {
  for (const Swizzle mode : kModes) {
    for (const int rows : {8, 64, 80}) {
      for (const int panels : {1, 2, 3}) {
        const int row_bytes = panels * panel_bytes(mode);
        std::vector<int> hits(static_cast<std::size_t>(rows * row_bytes), 0);
        for (int row = 0; row < rows; ++row) {
          for (int column = 0; column < row_bytes; ++column) {
            const std::uint32_t offset = panel_offset(mode, rows, row, column);
            ASSERT_LT(offset, hits.size());
            ASSERT_EQ(++hits[offset], 1);
            ASSERT_EQ(offset / static_cast<unsigned>(rows * panel_bytes(mode)),
                      static_cast<unsigned>(column / panel_bytes(mode)));
          }
        }
      }
    }
  }
  // Row 3, byte 200 of a 64-row tile: second panel, chunk (200 - 128) / 16 = 4 goes to 4 ^ 3 = 7.
  EXPECT_EQ(panel_offset(Swizzle::bytes128, 64, 3, 200), 64u * 128 + 3 * 128 + 7 * 16 + 8);
}

// Eight rows of one chunk column (what ldmatrix and the K-major wgmma read) lie in all 32 banks.
TEST(Swizzle, EightRowsOfAColumnOfChunksCostOnePass) {
  for (const Swizzle mode : kModes) {
    const int rows = 64;
    for (int first = 0; first < rows; first += 8) {
      for (int chunk = 0; chunk < 2 * panel_bytes(mode) / kChunkBytes; ++chunk) {
        std::vector<std::uint32_t> swizzled_rows;
        std::vector<std::uint32_t> plain_rows;
        for (int row = first; row < first + 8; ++row) {
          swizzled_rows.push_back(panel_offset(mode, rows, row, chunk * kChunkBytes));
          plain_rows.push_back(
              static_cast<std::uint32_t>(row * panel_bytes(mode) + chunk * kChunkBytes));
        }
        ASSERT_EQ(passes(swizzled_rows, 16), 1);
        ASSERT_EQ(passes(plain_rows, 16), panel_bytes(mode) / 16);
      }
    }
  }
}

TEST(Swizzle, LdmatrixRowsCostOnePassAtEveryWidth) {
  for (const int row_bytes : {32, 64, 128, 256, 384, 512, 1024}) {
    for (int first = 0; first < 32; first += 8) {
      for (int chunk = 0; chunk < row_bytes / kChunkBytes; ++chunk) {
        std::vector<std::uint32_t> rows;
        std::vector<std::uint32_t> plain;
        for (int row = first; row < first + 8; ++row) {
          rows.push_back(ldmatrix_offset(row_bytes, row, chunk));
          plain.push_back(static_cast<std::uint32_t>(row * row_bytes + chunk * kChunkBytes));
        }
        ASSERT_EQ(passes(rows, 16), 1) << row_bytes << " row " << first << " chunk " << chunk;
        ASSERT_EQ(passes(plain, 16), row_bytes >= 128 ? 8 : row_bytes / 16);
      }
    }
  }
}

TEST(Swizzle, LdmatrixTilesHaveNoHolesAndKeepTheirRows) {
  for (const int row_bytes : {32, 64, 128, 256, 384, 512, 1024}) {
    std::set<std::uint32_t> seen;
    for (int row = 0; row < 64; ++row) {
      for (int chunk = 0; chunk < row_bytes / kChunkBytes; ++chunk) {
        const std::uint32_t offset = ldmatrix_offset(row_bytes, row, chunk);
        ASSERT_EQ(offset % kChunkBytes, 0u);
        ASSERT_EQ(offset / static_cast<unsigned>(row_bytes), static_cast<unsigned>(row));
        ASSERT_TRUE(seen.insert(offset).second);
      }
    }
  }
}

// Rows of one panel are stored alike by both: a kernel may fill by TMA and read by ldmatrix.
TEST(Swizzle, LdmatrixAgreesWithTmaWhereRowsAreOnePanel) {
  for (const Swizzle mode : kModes) {
    for (int row = 0; row < 64; ++row) {
      for (int chunk = 0; chunk < panel_bytes(mode) / kChunkBytes; ++chunk) {
        ASSERT_EQ(ldmatrix_offset(panel_bytes(mode), row, chunk),
                  panel_offset(mode, 64, row, chunk * kChunkBytes));
      }
    }
  }
}

TEST(Swizzle, BankPassesOfKnownPatterns) {
  std::vector<std::uint32_t> lanes(32);
  const auto stride = [&](std::uint32_t bytes) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      lanes[lane] = lane * bytes;
    }
    return lanes;
  };
  EXPECT_EQ(passes(stride(4), 4), 1);     // one word a bank
  EXPECT_EQ(passes(stride(0), 4), 1);     // a broadcast
  EXPECT_EQ(passes(stride(8), 4), 2);     // every second bank
  EXPECT_EQ(passes(stride(12), 4), 1);    // odd strides never collide
  EXPECT_EQ(passes(stride(128), 4), 32);  // all in one bank
  EXPECT_EQ(passes(stride(2), 4), 1);     // two lanes a word
  EXPECT_EQ(passes(stride(8), 8), 2);     // 256 bytes
  EXPECT_EQ(passes(stride(16), 16), 4);   // 512 bytes
  EXPECT_EQ(passes(stride(128), 16), 32);
  constexpr std::uint32_t kTwoWords[] = {0, 128};
  constexpr int kPasses = bank_passes(kTwoWords, 2, 4);
  EXPECT_EQ(kPasses, 2);
}

}  // namespace
