// Single elements as doubles, bit-exact and independent of the processor: for the reference and for
// tests. The kernels have their own vector conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pantile/dtype.h"

namespace pantile::cpu {

inline double bf16_to_double(std::uint16_t half) {
  const std::uint32_t word = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return static_cast<double>(value);
}

inline double f16_to_double(std::uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa != 0 ? std::nan("") : HUGE_VAL;
  } else {
    value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  }
  return (half & 0x8000) != 0 ? -value : value;
}

// The nearest number with `digits` binary digits and exponents from `lowest` (of the last digit of
// a subnormal) on, ties to even; infinity from `limit` on. Straight from double: rounding to float
// first could round twice.
inline double round_to_digits(double x, int digits, int lowest, double limit) {
  if (x == 0.0 || !std::isfinite(x)) {
    return x;
  }
  int exponent;
  std::frexp(x, &exponent);
  const int last = exponent - digits < lowest ? lowest : exponent - digits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
  return std::fabs(rounded) >= limit ? std::copysign(HUGE_VAL, x) : rounded;
}

inline std::uint16_t double_to_bf16(double x) {
  const float value = static_cast<float>(round_to_digits(x, 8, -133, std::ldexp(1.0, 128)));
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return static_cast<std::uint16_t>(std::isnan(x) ? (word >> 16) | 0x40 : word >> 16);
}

inline std::uint16_t double_to_f16(double x) {
  const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
  if (std::isnan(x)) {
    return static_cast<std::uint16_t>(sign | 0x7e00u);
  }
  const double rounded = std::fabs(round_to_digits(x, 11, -24, 65536.0));
  unsigned bits;
  if (std::isinf(rounded)) {
    bits = 0x7c00u;
  } else if (rounded < std::ldexp(1.0, -14)) {
    bits = static_cast<unsigned>(std::ldexp(rounded, 24));
  } else {
    int exponent;
    const double fraction = std::frexp(rounded, &exponent);  // in [1/2, 1)
    bits = (static_cast<unsigned>(exponent + 14) << 10) +
           static_cast<unsigned>(std::ldexp(fraction, 11)) - 1024u;
  }
  return static_cast<std::uint16_t>(sign | bits);
}

inline double read_element(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::f32: return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::f16: return f16_to_double(static_cast<const std::uint16_t*>(data)[index]);
    default: return bf16_to_double(static_cast<const std::uint16_t*>(data)[index]);
  }
}

inline void write_element(DType dtype, void* data, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case DType::f16: static_cast<std::uint16_t*>(data)[index] = double_to_f16(value); break;
    default: static_cast<std::uint16_t*>(data)[index] = double_to_bf16(value); break;
  }
}

}  // namespace pantile::cpu
