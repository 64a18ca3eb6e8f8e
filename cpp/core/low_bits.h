// What a 16-bit O lacks: 8 more bits of the unrounded O, from which the backward takes
// delta = rowsum(dO * O).
//
// The error of a delta made of 16-bit O does not average out: dS = P (dP - delta) is then off in
// one direction along its row, by P times that error, and dQ = dS K sums it up with the mean of K.
// Where K and V have a common offset, or K a mean of 3 sigma, that is most of dQ's error.
//
// Distances are counted in last bits of the f32 numbers, as integers: their bits are in the order
// of their magnitudes, so that one rule serves both signs, subnormals and steps across a power of
// two. A 16-bit float of bf16 stands 2^16 apart, one of f16 2^13: half of that, in 128 steps, is
// 2^8 or 2^5 (f16's subnormals stand further apart; their distance saturates).
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

// log2 of a step of the low bits, by type of O.
inline constexpr int kLowShiftBf16 = 8;
inline constexpr int kLowShiftF16 = 5;

// Whether a number has low bits: neither zero, nor infinite, nor NaN.
PANTILE_HD constexpr bool has_low_bits(float rounded) {
  return (float_bits(rounded) & 0x7fffffffu) - 1u < 0x7f7fffffu;
}

// The low bits of `exact`, of which `rounded` is the nearest 16-bit number (ties to even); 0 where
// it has none.
template <int kShift>
PANTILE_HD constexpr std::int8_t low_bits(float exact, float rounded) {
  const auto distance = static_cast<std::int32_t>(float_bits(exact) - float_bits(rounded));
  return static_cast<std::int8_t>(has_low_bits(rounded) ? clamp(distance >> kShift, -128, 127) : 0);
}

// The middle of the numbers that have these low bits; `rounded` itself where it has none.
template <int kShift>
PANTILE_HD constexpr float with_low_bits(float rounded, std::int8_t low) {
  constexpr std::uint32_t kStep = 1u << kShift;
  const std::uint32_t moved =
      float_bits(rounded) + static_cast<std::uint32_t>(std::int32_t{low}) * kStep + kStep / 2;
  return has_low_bits(rounded) ? bits_float(moved) : rounded;
}

}  // namespace pantile::core
