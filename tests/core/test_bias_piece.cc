// A warp's piece of a bias, emulated: the chunks that 32 lanes copy, and what ldmatrix, as the PTX
// ISA describes it, then gives each lane, against bias[row][key] at the coordinates of the lane's
// scores.
#include "core/bias_piece.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "bank_passes.h"
#include "core/fragment.h"

namespace {

using pantile::core::bank_passes;
using pantile::core::bias_chunk_bytes;
using pantile::core::BiasPiece;
using pantile::core::Element;
using pantile::core::mma_accumulator;

constexpr int kLanes = 32;
constexpr std::uint16_t kUntouched = 0xdead;

// bias[row][key] of a sequence: no two are equal.
std::uint16_t element(int row, int key) {
  return static_cast<std::uint16_t>(row * 128 + key + 1);
}

// What lies in shared memory after the copies of all lanes of the piece at (row0, key0).
template <class Piece>
std::vector<std::uint16_t> copied(int row0, int key0, int rows, int keys) {
  std::vector<std::uint16_t> memory(Piece::kBytes / 2, kUntouched);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int chunk = Piece::copy_chunk(lane);
    for (int i = 0; i < Piece::kCopies; ++i) {
      const int row = Piece::copy_row(lane) + i * Piece::kCopyRows;
      const int key = key0 + chunk * 8;
      const int bytes = row0 + row < rows ? bias_chunk_bytes(key, keys) : 0;
      EXPECT_EQ(bytes % 2, 0);
      for (int c = 0; c < 8; ++c) {
        const auto to = Piece::place(row, chunk) / 2 + static_cast<std::uint32_t>(c);
        EXPECT_EQ(memory[to], kUntouched) << "written twice";
        memory[to] = 2 * c < bytes ? element(row0 + row, key + c) : std::uint16_t{0};
      }
    }
  }
  return memory;
}

std::uint16_t expected(int row, int key, int rows, int keys) {
  return row < rows && key < keys ? element(row, key) : std::uint16_t{0};
}

// Lane `lane` of ldmatrix.x4: matrix i has the rows whose addresses lanes 8 i to 8 i + 7 pass; a
// lane gets elements 2 (lane % 4) and the next one of row lane / 4, and with .trans the same of
// column lane / 4.
template <class Address>
void load_matrix(const std::vector<std::uint16_t>& memory, Address address, bool transposed,
                 int lane, std::uint16_t (&values)[4][2]) {
  for (int i = 0; i < 4; ++i) {
    for (int c = 0; c < 2; ++c) {
      const int along = 2 * (lane % 4) + c;
      const int row = transposed ? along : lane / 4;
      const int column = transposed ? lane / 4 : along;
      values[i][c] = memory[address(8 * i + row) / 2 + static_cast<std::uint32_t>(column)];
    }
  }
}

template <class Piece>
void expect_scores(int row0, int key0, int rows, int keys) {
  const auto memory = copied<Piece>(row0, key0, rows, keys);
  for (int row16 = 0; row16 < Piece::kRows / 16; ++row16) {
    for (int key16 = 0; key16 < Piece::kKeys / 16; ++key16) {
      for (int lane = 0; lane < kLanes; ++lane) {
        std::uint16_t by_query[4][2], by_key[4][2];
        load_matrix(
            memory, [&](int from) { return Piece::query_major(from, row16, key16); }, false, lane,
            by_query);
        load_matrix(
            memory, [&](int from) { return Piece::key_major(from, row16, key16); }, true, lane,
            by_key);
        for (int i = 0; i < 4; ++i) {
          for (int c = 0; c < 2; ++c) {
            // Register 2 i + c of two accumulators of 16 x 8 that lie beside each other.
            const Element at = mma_accumulator(lane, 2 * (i % 2) + c);
            const int along = at.column + i / 2 * 8;
            ASSERT_EQ(by_query[i][c],
                      expected(row0 + row16 * 16 + at.row, key0 + key16 * 16 + along, rows, keys));
            ASSERT_EQ(by_key[i][c],
                      expected(row0 + row16 * 16 + along, key0 + key16 * 16 + at.row, rows, keys));
          }
        }
      }
    }
  }
}

template <class Piece>
void expect_all() {
  for (int rows = 1; rows <= 2 * Piece::kRows; rows += 5) {
    for (int keys = 1; keys <= 2 * Piece::kKeys; ++keys) {
      expect_scores<Piece>(0, 0, rows, keys);
      expect_scores<Piece>(Piece::kRows, Piece::kKeys, rows, keys);
    }
  }
}

TEST(BiasPiece, LanesGetTheBiasOfTheirScores) {
  expect_all<BiasPiece<16, 64>>();
  expect_all<BiasPiece<32, 64>>();
  expect_all<BiasPiece<32, 32>>();
}

// The forward's hook knows 16 rows at a time, which lie at multiples of their size.
TEST(BiasPiece, SixteenRowsAreAPieceOfTheirOwn) {
  using Whole = BiasPiece<32, 32>;
  using Part = BiasPiece<16, 32>;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int key16 = 0; key16 < 2; ++key16) {
      EXPECT_EQ(Whole::query_major(lane, 1, key16),
                Part::kBytes + Part::query_major(lane, 0, key16));
    }
  }
}

template <class Piece>
void expect_no_conflicts() {
  for (int i = 0; i < 4; ++i) {  // a matrix is one access of 8 rows
    std::vector<std::uint32_t> by_query, by_key;
    for (int lane = 8 * i; lane < 8 * i + 8; ++lane) {
      by_query.push_back(Piece::query_major(lane, 0, 1));
      by_key.push_back(Piece::key_major(lane, 0, 1));
    }
    EXPECT_EQ(bank_passes(by_query.data(), 8, 16), 1);
    EXPECT_EQ(bank_passes(by_key.data(), 8, 16), 1);
  }
}

TEST(BiasPiece, ReadsHaveNoBankConflicts) {
  expect_no_conflicts<BiasPiece<32, 32>>();
  expect_no_conflicts<BiasPiece<32, 64>>();
}

// A copy of a warp reads whole sectors of 32 bytes, in runs of a row of the piece.
TEST(BiasPiece, CopiesAreRunsOfARow) {
  using Piece = BiasPiece<32, 32>;
  for (int lane = 1; lane < kLanes; ++lane) {
    const bool same_row = Piece::copy_row(lane) == Piece::copy_row(lane - 1);
    EXPECT_EQ(same_row, lane % 4 != 0);
    EXPECT_EQ(Piece::copy_chunk(lane), same_row ? Piece::copy_chunk(lane - 1) + 1 : 0);
  }
  EXPECT_EQ(bias_chunk_bytes(8, 8), 0);
  EXPECT_EQ(bias_chunk_bytes(8, 9), 2);
  EXPECT_EQ(bias_chunk_bytes(8, 16), 16);
  EXPECT_EQ(bias_chunk_bytes(8, 17), 16);
}

}  // namespace
