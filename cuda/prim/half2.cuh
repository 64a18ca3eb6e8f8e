// Arithmetic on pairs of fp16 numbers in one register. PTX ISA, "Half Precision Floating-Point".
//
// max2 and min2 prefer a number to NaN, max2_nan and min2_nan keep NaN; a NaN in fma2_relu's
// operands comes out as the canonical NaN, whose low byte is 0xff.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE std::uint32_t max2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t min2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t max2_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t min2_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t add2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t subtract2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

PANTILE_DEVICE std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// max(a b + c, 0)
PANTILE_DEVICE std::uint32_t fma2_relu(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// 2^x; two MUFU instructions.
PANTILE_DEVICE std::uint32_t exp2_approx2(std::uint32_t x) {
  std::uint32_t r;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// `low` lands in bits 0-15.
PANTILE_DEVICE std::uint32_t half_pair(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

PANTILE_DEVICE float low_float(std::uint32_t pair) {
  float r;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }"
      : "=f"(r)
      : "r"(pair));
  return r;
}

PANTILE_DEVICE float high_float(std::uint32_t pair) {
  float r;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }"
      : "=f"(r)
      : "r"(pair));
  return r;
}

// The same fp16 constant twice.
PANTILE_DEVICE constexpr std::uint32_t twice(std::uint16_t bits) {
  return bits * 0x10001u;
}

}  // namespace pantile::prim
