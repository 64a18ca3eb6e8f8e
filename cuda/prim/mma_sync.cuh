// mma.sync m16n8k16: D = A B + C by one warp, 16-bit operands, fp32 accumulators.
// With g = lane / 4 and t = lane % 4 a lane holds
//   A  a0 (g, 2t..) a1 (g + 8, 2t..) a2 (g, 2t + 8..) a3 (g + 8, 2t + 8..)   row, two columns of k
//   B  b0 (2t.., g) b1 (2t + 8.., g)                                         two rows of k, column
//   C  c0 (g, 2t) c1 (g, 2t + 1) c2 (g + 8, 2t) c3 (g + 8, 2t + 1)
// so that two neighbouring accumulators, packed, are the A operand of the next product.
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::prim {

namespace detail {
template <DType kDType>
PANTILE_DEVICE void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1, float c0, float c1, float c2, float c3) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  if constexpr (kDType == DType::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
          "f"(c3));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
          "f"(c3));
  }
}
}  // namespace detail

// d += a b
template <DType kDType>
PANTILE_DEVICE void mma_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                            std::uint32_t b1) {
  detail::mma_16x8x16<kDType>(d, a, b0, b1, d[0], d[1], d[2], d[3]);
}

// d = a b: the first step of a product, which saves clearing d
template <DType kDType>
PANTILE_DEVICE void mma_set(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                            std::uint32_t b1) {
  detail::mma_16x8x16<kDType>(d, a, b0, b1, 0.0f, 0.0f, 0.0f, 0.0f);
}

// d = a b + (c0, c1) in every row: a product that starts from one value a column
template <DType kDType>
PANTILE_DEVICE void mma_set(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                            std::uint32_t b1, float c0, float c1) {
  detail::mma_16x8x16<kDType>(d, a, b0, b1, c0, c1, c0, c1);
}

// d = a b + first in rows 0..7, + second in rows 8..15 as far as this lane holds them: a product
// that starts from one value a row
template <DType kDType>
PANTILE_DEVICE void mma_set_rows(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1, float first, float second) {
  detail::mma_16x8x16<kDType>(d, a, b0, b1, first, first, second, second);
}

}  // namespace pantile::prim
