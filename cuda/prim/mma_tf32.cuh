// mma.sync m16n8k8 on TF32 operands: D = A B + C by one warp, fp32 accumulators. Operands are fp32
// registers; the tensor core reads the sign, the exponent and the upper 10 bits of the mantissa and
// ignores the rest. With g = lane / 4 and t = lane % 4 a lane holds
//   A  a0 (g, t) a1 (g + 8, t) a2 (g, t + 4) a3 (g + 8, t + 4)
//   B  b0 (t, g) b1 (t + 4, g)
//   C  c0 (g, 2t) c1 (g, 2t + 1) c2 (g + 8, 2t) c3 (g + 8, 2t + 1)
// PTX ISA, "Matrix Fragments for mma.m16n8k8".
#pragma once

#include <math.h>

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

// d = a b + c; every operand may share registers with d.
PANTILE_DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], std::uint32_t b0, std::uint32_t b1,
                             float c0, float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// Nearest TF32 number, ties away from zero.
PANTILE_DEVICE std::uint32_t round_to_tf32(float x) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// d += a b
PANTILE_DEVICE void mma_add_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

inline constexpr std::uint32_t kTf32Bits = 0xffffe000u;
inline constexpr std::uint32_t kTf32HalfUlp = 0x1000u;

// What the tensor core reads of it is round_to_tf32(x); an instruction less, because the bits below
// are left as they come.
PANTILE_DEVICE std::uint32_t tf32_operand(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return fabsf(x) < INFINITY ? bits + kTf32HalfUlp : bits;  // infinities and NaN stay
}

// x = big + small up to 2^-22: the upper 11 bits of the mantissa, and the rest as an operand.
PANTILE_DEVICE void split_tf32(float x, std::uint32_t& big, std::uint32_t& small) {
  big = __float_as_uint(x) & kTf32Bits;
  small = __float_as_uint(x - __uint_as_float(big)) + kTf32HalfUlp;
}

}  // namespace pantile::prim
