// e4m3 numbers, four to a register, the first in bits 0-7. Conversions round to nearest even and
// saturate at 448; NaN becomes 0x7f. PTX ISA, "cvt".
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t r;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(r)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return r;
}

// From two pairs of fp16.
PANTILE_DEVICE std::uint32_t pack_e4m3(std::uint32_t x01, std::uint32_t x23) {
  std::uint32_t r;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(r)
      : "r"(x01), "r"(x23));
  return r;
}

// The two numbers in bits 0-15, exactly, as a pair of fp16.
PANTILE_DEVICE std::uint32_t unpack_e4m3(std::uint32_t codes) {
  std::uint32_t r;
  asm("{ .reg .b16 low; cvt.u16.u32 low, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
      : "=r"(r)
      : "r"(codes));
  return r;
}

}  // namespace pantile::prim
