// Register coordinates: every element has one owner, operands chain without shuffles, and ldmatrix
// (whose layout is a separate statement of the ISA) delivers the same elements.
#include "core/fragment.h"

#include <gtest/gtest.h>

#include <vector>

namespace {

using pantile::core::Element;
using pantile::core::fp8_accumulator_element;
using pantile::core::fp8_key_of_slot;
using pantile::core::mma_accumulator;
using pantile::core::mma_k16_a;
using pantile::core::mma_k16_b;
using pantile::core::mma_k8_a;
using pantile::core::mma_k8_b;
using pantile::core::mma_tf32_a;
using pantile::core::mma_tf32_b;
using pantile::core::wgmma_a16;
using pantile::core::wgmma_a8;
using pantile::core::wgmma_accumulator;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

template <class Fragment>
void expect_one_owner_each(Fragment fragment, int threads, int elements, int rows, int columns) {
  ASSERT_EQ(threads * elements, rows * columns);
  std::vector<int> owners(static_cast<std::size_t>(rows * columns), 0);
  for (int thread = 0; thread < threads; ++thread) {
    for (int element = 0; element < elements; ++element) {
      const Element at = fragment(thread, element);
      ASSERT_TRUE(at.row >= 0 && at.row < rows && at.column >= 0 && at.column < columns);
      ASSERT_EQ(++owners[static_cast<std::size_t>(at.row * columns + at.column)], 1);
    }
  }
}

void expect_at(const Element& at, int row, int column) {
  EXPECT_EQ(at.row, row);
  EXPECT_EQ(at.column, column);
}

TEST(Fragment, EveryElementHasOneOwner) {
  expect_one_owner_each(mma_accumulator, kWarp, 4, 16, 8);
  expect_one_owner_each(mma_k16_a, kWarp, 8, 16, 16);
  expect_one_owner_each(mma_k16_b, kWarp, 4, 16, 8);
  expect_one_owner_each(mma_k8_a, kWarp, 4, 16, 8);
  expect_one_owner_each(mma_k8_b, kWarp, 2, 8, 8);
  expect_one_owner_each(mma_tf32_a, kWarp, 4, 16, 8);
  expect_one_owner_each(mma_tf32_b, kWarp, 2, 8, 8);
  expect_one_owner_each(wgmma_a16, kWarpgroup, 8, 64, 16);
  expect_one_owner_each(wgmma_a8, kWarpgroup, 16, 64, 32);
  for (int n = 8; n <= 256; n += 8) {
    expect_one_owner_each(wgmma_accumulator, kWarpgroup, n / 2, 64, n);
  }
}

// Points read off the figures of the PTX ISA.
TEST(Fragment, PointsOfTheFiguresAreWhereTheyAre) {
  expect_at(mma_accumulator(0, 1), 0, 1);
  expect_at(mma_accumulator(31, 2), 15, 6);
  expect_at(mma_k16_a(5, 0), 1, 2);   // a0 of T5
  expect_at(mma_k16_a(5, 2), 9, 2);   // a2 of T5: eight rows on
  expect_at(mma_k16_a(5, 5), 1, 11);  // a5 of T5: eight columns on
  expect_at(mma_k16_a(31, 7), 15, 15);
  expect_at(mma_k16_b(6, 1), 5, 1);
  expect_at(mma_k16_b(6, 2), 12, 1);
  expect_at(mma_k8_a(9, 3), 10, 3);
  expect_at(mma_k8_b(9, 1), 3, 2);
  expect_at(mma_tf32_a(6, 1), 9, 2);
  expect_at(mma_tf32_a(6, 2), 1, 6);
  expect_at(mma_tf32_b(6, 1), 6, 1);
  expect_at(wgmma_accumulator(33, 0), 16, 2);
  expect_at(wgmma_accumulator(33, 2), 24, 2);
  expect_at(wgmma_accumulator(127, 5), 55, 15);
  expect_at(wgmma_accumulator(127, 7), 63, 15);
  expect_at(wgmma_a16(64, 3), 40, 1);
  expect_at(wgmma_a16(64, 4), 32, 8);
  expect_at(wgmma_a8(1, 3), 0, 7);
  expect_at(wgmma_a8(1, 4), 8, 4);
  expect_at(wgmma_a8(1, 8), 0, 20);
}

// ldmatrix: register i of a lane holds elements 2 (lane % 4) and the next of row lane / 4 of matrix
// i. .trans: the same elements of the transposed matrix.
TEST(Fragment, LdmatrixDeliversTheOperands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4;
      const int column = 2 * (lane % 4) + half;
      for (int matrix = 0; matrix < 4; ++matrix) {  // x4: rows 0-7, rows 8-15, then columns 8-15
        expect_at(mma_k16_a(lane, 2 * matrix + half), row + matrix % 2 * 8,
                  column + matrix / 2 * 8);
      }
      for (int matrix = 0; matrix < 2; ++matrix) {
        expect_at(mma_k8_a(lane, 2 * matrix + half), row + matrix * 8, column);
        // B from keys stored as rows (K): a matrix holds 8 columns of B, its rows run along n.
        expect_at(mma_k16_b(lane, 2 * matrix + half), column + matrix * 8, row);
      }
      expect_at(mma_k8_b(lane, half), column, row);
      // tf32 as pairs of 16 bits: an 8x8 matrix of halves is an 8x4 matrix of words.
      for (int matrix = 0; matrix < 4; ++matrix) {
        expect_at(mma_tf32_a(lane, matrix), row + matrix % 2 * 8, lane % 4 + matrix / 2 * 4);
      }
    }
  }
}

// An accumulator of S is, without moving a register, the A operand of P V.
TEST(Fragment, AccumulatorsAreTheNextOperand) {
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    for (int step = 0; step < 8; ++step) {
      for (int element = 0; element < 8; ++element) {
        const Element from = wgmma_accumulator(thread, 8 * step + element);
        const Element to = wgmma_a16(thread, element);
        ASSERT_EQ(from.row, to.row);
        ASSERT_EQ(from.column, 16 * step + to.column);
      }
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int element = 0; element < 8; ++element) {  // two neighbouring 16 x 8 accumulators
      const Element from = mma_accumulator(lane, element % 4);
      const Element to = mma_k16_a(lane, element);
      ASSERT_EQ(from.row, to.row);
      ASSERT_EQ(from.column + element / 4 * 8, to.column);
    }
  }
}

TEST(Fragment, Fp8OperandsComeFromTheAccumulatorInTheOrderOfTheSlots) {
  bool held[16] = {};
  for (int slot = 0; slot < 16; ++slot) {
    ASSERT_FALSE(held[fp8_key_of_slot(slot)]);
    held[fp8_key_of_slot(slot)] = true;
  }
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    for (int step = 0; step < 4; ++step) {
      for (int element = 0; element < 16; ++element) {
        const Element from =
            wgmma_accumulator(thread, 16 * step + fp8_accumulator_element(element));
        const Element to = wgmma_a8(thread, element);
        const int slot = to.column % 16;
        ASSERT_EQ(from.row, to.row);
        ASSERT_EQ(from.column, 32 * step + to.column - slot + fp8_key_of_slot(slot));
      }
    }
  }
}

TEST(Fragment, CoordinatesAreConstantExpressions) {
  constexpr Element element = wgmma_accumulator(127, 3);
  EXPECT_EQ(element.row, 63);
  EXPECT_EQ(element.column, 7);
}

}  // namespace
