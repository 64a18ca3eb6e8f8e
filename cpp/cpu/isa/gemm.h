// Small matrix products C = start + A B on tiles in scratch memory, the inner loop of everything.
//
// A register block is kRows x kVectors vectors of C. Each step loads kVectors vectors of B and
// broadcasts kRows numbers of A. Tiles are padded so that no block is ever ragged: rows of A and C
// are rounded up to block_rows(), columns to whole vectors.
#pragma once

#include "core/integer.h"
#include "cpu/isa/simd.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// What C holds before the products are added.
enum class Start { zero, old, old_scaled };
// A(i, k) is a[i * lda + k] or a[k * lda + i].
enum class Walk { along_rows, along_columns };

struct Product {
  const float* a;
  std::int64_t lda;
  const float* b;  // B(k, n) = b[k * ldb + n]
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  int rows;             // of A and C
  int vectors;          // columns of B and C / kLanes
  int steps;            // along the summed axis
  const float* factor;  // one a row of C; only for Start::old_scaled
};

// Rows of the register block for a width in vectors: all sums, the vectors of B and a broadcast fit
// the registers, and there are enough sums to cover the latency of the multiply-adds.
constexpr int block_rows(int vectors) {
  if (kRegisters >= 32) {
    return vectors == 4 ? 6 : vectors == 2 ? 12 : 8;
  }
  return vectors == 2 ? 6 : 12;
}
constexpr int kMaxBlockRows = 12;

// Rows of A and C that blocks of any width touch for a product of `rows` rows.
PANTILE_INLINE int touched_rows(int rows) {
  return core::max_of(core::round_up(rows, 8), core::round_up(rows, kMaxBlockRows));
}
constexpr int kMaxPanelVectors = kRegisters >= 32 ? 4 : 2;

// Width of the next panel when `left` vectors remain.
constexpr int panel_vectors(int left) {
  if (kMaxPanelVectors == 2) {
    return left >= 2 ? 2 : 1;
  }
  return left % 4 == 0 ? 4 : left % 3 == 0 || left == 5 ? 3 : left > 4 ? 4 : left;
}

// Calls function(first vector, vectors) for each panel of a matrix of `vectors` columns.
template <class Function>
PANTILE_INLINE void for_each_panel(int vectors, Function function) {
  for (int first = 0; first < vectors;) {
    const int width = panel_vectors(vectors - first);
    function(first, width);
    first += width;
  }
}

template <Start kStart, Walk kWalk, int kVectors>
PANTILE_INLINE void multiply_block(const Product& p, int row, int column) {
  constexpr int kRows = block_rows(kVectors);
  Floats sum[kRows][kVectors];
  float* c = p.c + row * p.ldc + column;
  PANTILE_UNROLL for (int i = 0; i < kRows; ++i) {
    PANTILE_UNROLL for (int j = 0; j < kVectors; ++j) {
      if (kStart == Start::zero) {
        sum[i][j] = Floats{};
      } else {
        sum[i][j] = load(c + i * p.ldc + j * kLanes);
        if (kStart == Start::old_scaled) {
          sum[i][j] *= splat(p.factor[row + i]);
        }
      }
    }
  }
  const float* b = p.b + column;
  const float* a = p.a + (kWalk == Walk::along_rows ? row * p.lda : row);
  for (int k = 0; k < p.steps; ++k) {
    Floats columns[kVectors];
    PANTILE_UNROLL for (int j = 0; j < kVectors; ++j) {
      columns[j] = load(b + j * kLanes);
    }
    PANTILE_UNROLL for (int i = 0; i < kRows; ++i) {
      const Floats item = splat(kWalk == Walk::along_rows ? a[i * p.lda] : a[i]);
      PANTILE_UNROLL for (int j = 0; j < kVectors; ++j) {
        sum[i][j] += item * columns[j];
      }
    }
    b += p.ldb;
    a += kWalk == Walk::along_rows ? 1 : p.lda;
  }
  PANTILE_UNROLL for (int i = 0; i < kRows; ++i) {
    PANTILE_UNROLL for (int j = 0; j < kVectors; ++j) {
      store(c + i * p.ldc + j * kLanes, sum[i][j]);
    }
  }
}

// All rows of one panel of columns: the panel of B stays in L1.
template <Start kStart, Walk kWalk, int kVectors>
__attribute__((noinline)) void multiply_panel(const Product& p, int column) {
  for (int row = 0; row < p.rows; row += block_rows(kVectors)) {
    multiply_block<kStart, kWalk, kVectors>(p, row, column);
  }
}

template <Start kStart, Walk kWalk>
void multiply(const Product& p) {
  for_each_panel(p.vectors, [&p](int first, int vectors) {
    const int column = first * kLanes;
    switch (vectors) {
#if defined(__AVX512F__)
      case 4: multiply_panel<kStart, kWalk, 4>(p, column); break;
      case 3: multiply_panel<kStart, kWalk, 3>(p, column); break;
#endif
      case 2: multiply_panel<kStart, kWalk, 2>(p, column); break;
      default: multiply_panel<kStart, kWalk, 1>(p, column); break;
    }
  });
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
