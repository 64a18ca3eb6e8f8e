// mma.sync m16n8k32 on e4m3 numbers: D = A B + C by one warp, from compute capability 8.9 on. With
// g = lane / 4 and t = lane % 4 a lane holds, four numbers a register,
//   A  a0 (g, 4t..) a1 (g + 8, 4t..) a2 (g, 4t + 16..) a3 (g + 8, 4t + 16..)   row, columns of k
//   B  b0 (4t.., g) b1 (4t + 16.., g)                                         rows of k, column
//   C  as m16n8k16 (mma_sync.cuh); of fp16, two columns a register: c0 (g, 2t..) c1 (g + 8, 2t..)
// Where the hardware has no such product (compute capabilities 9.x and 10.x), ptxas makes two of
// fp16 of it, after conversions: right, and no faster than fp16.
// PTX ISA, "Matrix Fragments for mma.m16n8k32"; fp16 accumulators from PTX ISA 8.7 on.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

// (d0, d1) = a b + (c0, c1), in fp16
PANTILE_DEVICE void mma_e4m3_f16(std::uint32_t& d0, std::uint32_t& d1, const std::uint32_t (&a)[4],
                                 std::uint32_t b0, std::uint32_t b1, std::uint32_t c0,
                                 std::uint32_t c1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 "
      "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"
      : "=r"(d0), "=r"(d1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}

// d += a b, in fp32
PANTILE_DEVICE void mma_e4m3_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b
PANTILE_DEVICE void mma_e4m3_set(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  mma_e4m3_add(d, a, b0, b1);
}

}  // namespace pantile::prim
