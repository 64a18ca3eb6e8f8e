// Products of fp32 tiles in shared memory on the tensor cores, as TF32 (11 bits of mantissa) or,
// for `highest`, at the error of fp32:
//
//   a b = big(a) big(b) + (big(a) small(b) + small(a) big(b)),   x = big(x) + small(x)
//
// The tensor cores cut bits off when they add, towards zero, so that long sums would drift. For
// `highest` big and small terms are therefore summed apart, at most 8 steps of a product at a time,
// and joined by ordinary additions.
//
// A tile is SwizzledRows of twice as many 16-bit columns: 16-byte chunks of 4 floats. ldmatrix
// then hands out whole operands where the product runs along the columns of both tiles. Where it
// runs along the rows of one, lane t of a quad takes rows 2t and 2t + 1 of every 8 instead of t
// and t + 4: in this order accumulators are the other operand as they are, and the loads of one
// instruction (4 rows, 8 columns) cover all 32 banks.
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "pantile/dtype.h"
#include "prim/address.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_tf32.cuh"
#include "prim/shared_load.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::tile {

template <Float32Precision kPrecision>
struct ProductsF32 {
  static constexpr bool kHighest = kPrecision == Float32Precision::highest;
  // Of one product, so that the partial sums take 32 registers: row tiles times column tiles.
  static constexpr int kPartialTiles = 4;
  static constexpr int kPartialSteps = 8;  // of 8 columns or rows each

  // Four registers of an operand: A of an m16 tile, or B of two n8 tiles.
  struct Operand {
    std::uint32_t big[4];
    std::uint32_t small[4];  // unused and optimised away but for `highest`

    PANTILE_DEVICE void set(int i, float x) {
      if constexpr (kHighest) {
        prim::split_tf32(x, big[i], small[i]);
      } else {
        big[i] = prim::tf32_operand(x);
      }
    }

    PANTILE_DEVICE void load(std::uint32_t address) {
      std::uint32_t words[4];
      prim::load_matrix_x4(words, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        set(i, __uint_as_float(words[i]));
      }
    }
  };

  template <int kRowTiles, int kColumnTiles>
  struct Partial {
    float big[kRowTiles][kColumnTiles][4];
    float small[kRowTiles][kColumnTiles][4];

    PANTILE_DEVICE Partial() {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            big[m][n][c] = small[m][n][c] = 0.0f;
          }
        }
      }
    }

    // Column tile n; `half` says which two registers of b are its operand.
    PANTILE_DEVICE void add(int m, int n, const Operand& a, const Operand& b, int half) {
      const int i = 2 * half;
      if constexpr (kHighest) {
        prim::mma_add_tf32(small[m][n], a.small, b.big[i], b.big[i + 1]);
        prim::mma_add_tf32(small[m][n], a.big, b.small[i], b.small[i + 1]);
      }
      prim::mma_add_tf32(big[m][n], a.big, b.big[i], b.big[i + 1]);
    }

    PANTILE_DEVICE float sum(int m, int n, int c) const {
      return kHighest ? big[m][n][c] + small[m][n][c] : big[m][n][c];
    }
  };

  // s = a b^T over kDepth columns: kRowTiles * 16 rows at a_lane (lane_offset_rows_first) and
  // kColumnTiles * 8 rows at b_lane (lane_offset_columns_first).
  template <class Rows, int kDepth, int kRowTiles, int kColumnTiles>
  PANTILE_DEVICE static void multiply_rows(float (&s)[kRowTiles][kColumnTiles][4],
                                           std::uint32_t a_lane, std::uint32_t b_lane) {
    constexpr int kTiles =
        kHighest ? core::min_of(kPartialTiles / kRowTiles, kColumnTiles) : kColumnTiles;
    constexpr int kSteps = kHighest ? kPartialSteps : kDepth / 8;
    static_assert(kColumnTiles % kTiles == 0 && kTiles % 2 == 0 && kDepth / 8 % kSteps == 0);
#pragma unroll
    for (int first = 0; first < kColumnTiles; first += kTiles) {
#pragma unroll
      for (int depth = 0; depth < kDepth / 8; depth += kSteps) {
        Partial<kRowTiles, kTiles> part;
#pragma unroll
        for (int k = depth; k < depth + kSteps; ++k) {
          Operand a[kRowTiles];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            a[m].load(Rows::step(a_lane, m, k));
          }
#pragma unroll
          for (int n = 0; n < kTiles; n += 2) {
            Operand b;
            b.load(Rows::step(b_lane, (first + n) / 2, k));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              part.add(m, n, a[m], b, 0);
              part.add(m, n + 1, a[m], b, 1);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float sum = part.sum(m, n, c);
              s[m][first + n][c] = depth == 0 ? sum : s[m][first + n][c] + sum;
            }
          }
        }
      }
    }
  }

  // Where a lane reads a tile that add_rows() goes through: row 2t, column g of the first 8 x 8.
  template <class Rows>
  PANTILE_DEVICE static int lane_offset_down(int lane) {
    const int g = lane / 4;
    return Rows::offset(lane % 4 * 2, g / 4) + g % 4 * 4;
  }

  // sums += w b: w is kSteps * 8 columns of weights in the order of accumulators, b as many rows of
  // a tile at b_lane (lane_offset_down) with kColumnTiles * 8 columns.
  template <class Rows, int kRowTiles, int kColumnTiles, int kSteps>
  PANTILE_DEVICE static void add_rows(float (&sums)[kRowTiles][kColumnTiles][4],
                                      const float (&w)[kRowTiles][kSteps][4],
                                      std::uint32_t b_lane) {
    if constexpr (kHighest) {
      constexpr int kTiles = kPartialTiles / kRowTiles;
      static_assert(kColumnTiles % kTiles == 0 && kSteps <= kPartialSteps);
#pragma unroll
      for (int first = 0; first < kColumnTiles; first += kTiles) {
        Partial<kRowTiles, kTiles> part;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          Operand a[kRowTiles];
          take_weights(a, w, k);
#pragma unroll
          for (int n = 0; n < kTiles; n += 2) {
            const Operand b = load_down<Rows>(b_lane, k, first + n);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              part.add(m, n, a[m], b, 0);
              part.add(m, n + 1, a[m], b, 1);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              sums[m][first + n][c] += part.sum(m, n, c);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Operand a[kRowTiles];
        take_weights(a, w, k);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
          const Operand b = load_down<Rows>(b_lane, k, n);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            prim::mma_add_tf32(sums[m][n], a[m].big, b.big[0], b.big[1]);
            prim::mma_add_tf32(sums[m][n + 1], a[m].big, b.big[2], b.big[3]);
          }
        }
      }
    }
  }

 private:
  // Accumulators (row, 2t) and (row, 2t + 1) in the places of columns t and t + 4.
  template <int kRowTiles, int kSteps>
  PANTILE_DEVICE static void take_weights(Operand (&a)[kRowTiles],
                                          const float (&w)[kRowTiles][kSteps][4], int k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      a[m].set(0, w[m][k][0]);
      a[m].set(1, w[m][k][2]);
      a[m].set(2, w[m][k][1]);
      a[m].set(3, w[m][k][3]);
    }
  }

  // Rows 8 k + 2t and 8 k + 2t + 1 of column tiles n and n + 1, n even.
  template <class Rows>
  PANTILE_DEVICE static Operand load_down(std::uint32_t b_lane, int k, int n) {
    const std::uint32_t even = b_lane + k * 8 * Rows::kRowBytes;
    const std::uint32_t odd = (b_lane ^ 16) + (k * 8 + 1) * Rows::kRowBytes;
    Operand b;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = 2 * (n + half);
      const std::uint32_t twist = chunk % Rows::kGroup << 4;
      const std::uint32_t group = chunk / Rows::kGroup * (Rows::kGroup * 16);
      b.set(2 * half, prim::load_shared((even ^ twist) + group));
      b.set(2 * half + 1, prim::load_shared((odd ^ twist) + group));
    }
    return b;
  }
};

}  // namespace pantile::tile
