// What a 16-bit O lacks: 8 more bits of the unrounded O, from which the backward takes
// delta = rowsum(dO * O).
//
// The error of a delta made of 16-bit O does not average out: dS = P (dP - delta) is then off in
// one direction along its row, by P times that error, and dQ = dS K sums it up with the mean of K.
// Where K and V have a common offset, or K a mean of 3 sigma, that is most of dQ's error.
//
// Distances are counted in last bits of the f32 numbers, as integers: those bits are in the order
// of the magnitudes, so that one rule serves both signs, subnormals and steps across a power of
// two. Neighbours in bf16 stand 2^16 apart, in f16 2^13; half of that in 128 steps is 2^8 or 2^5 a
// step. Subnormals of f16 stand further apart: their distance saturates.
//
// A distance is rounded to whole steps, not cut off: an O that is a 16-bit number, as where one
// weight is 1, must come back as it was. There dS is 0, and delta may not be off by 2^-17 of
// dO * O, because such a row's Q may be the loudest: with distances cut off, and O put in the
// middle of its step, one row of Q a thousand times the others cost dK 1.4 % (bf16, N 512).
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

// log2 of a step, by type of O.
inline constexpr int kLowShiftBf16 = 8;
inline constexpr int kLowShiftF16 = 5;

// Whether a 16-bit number has low bits: not if it is zero, infinite or NaN.
PANTILE_HD constexpr bool has_low_bits(float rounded) {
  return (float_bits(rounded) & 0x7fffffffu) - 1u < 0x7f7fffffu;
}

// Steps from `rounded`, the 16-bit number nearest to `exact` (ties to even), to `exact`: the
// nearest number of steps, halves up. 0 where `rounded` has no low bits.
template <int kShift>
PANTILE_HD constexpr std::int8_t low_bits(float exact, float rounded) {
  const auto distance = static_cast<std::int32_t>(float_bits(exact) - float_bits(rounded));
  const std::int32_t steps = (distance + (1 << (kShift - 1))) >> kShift;
  return static_cast<std::int8_t>(has_low_bits(rounded) ? clamp(steps, -128, 127) : 0);
}

// O as its low bits say: within half a step of the exact one; within one at the upper end, where
// 128 steps are stored as 127. `rounded` itself where it has no low bits, whatever `low` holds.
template <int kShift>
PANTILE_HD constexpr float with_low_bits(float rounded, std::int8_t low) {
  const std::uint32_t steps = static_cast<std::uint32_t>(std::int32_t{low}) << kShift;
  return has_low_bits(rounded) ? bits_float(float_bits(rounded) + steps) : rounded;
}

}  // namespace pantile::core
