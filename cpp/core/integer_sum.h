// Sums that do not depend on the order of their terms: every term becomes an integer in one common
// unit, and integers are added modulo 2^32.
//
// A term of less than 2^22 units is converted by one fused multiply-add, of which a GPU does eight
// times as many a clock as of conversions. Scaled to units of 2^22 and with 3 added it lies in
// [2, 4), where the last bit of a float counts units: the bits are kHeldZero plus the term, rounded
// to nearest even. Such words are added as they are. Of n words the sum is n * kHeldZero too large,
// which the reader of the sum, who knows n, takes away.
//
// Sign and exponent of the floats in [2, 4) are a single bit, the second highest. Every other float
// but 0 has another one of the upper nine, so that the union of the bits of many words shows
// whether all are in range. The scale's odd factor keeps 0 away: 3 * 2^n is no multiple of 2^23
// + 1.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"

#if !defined(__CUDACC__)
#include <math.h>
#endif

namespace pantile::core {

inline constexpr float kHeldScale = 0x1.000002p-22f;  // (1 + 2^-23) * 2^-22
inline constexpr float kHeldOffset = 3.0f;
inline constexpr std::uint32_t kHeldZero = 0x40400000u;  // the bits of 3

// `scale` is kHeldScale times what turns x into units.
PANTILE_HD float hold_term(float x, float scale) {
  return fmaf(x, scale, kHeldOffset);
}

// Of the united bits of words from hold_term(): are they all in range?
PANTILE_HD constexpr bool all_in_range(std::uint32_t bits) {
  return (bits & 0xff800000u) == 0x40000000u;
}

// Of a float from hold_term() that is out of range: the same in units 16 times as large, for terms
// of less than 2^26 units. What is rounded off is 2^-19 of the largest such term. Here an odd
// factor would show in the result, so the check is one that finds 0 as well.
PANTILE_HD float hold_large_term(float held) {
  return fmaf(held, 0x1p-4f, kHeldOffset - kHeldOffset / 16);
}

// Unites to less than 2^23 over words that are in range.
PANTILE_HD constexpr std::uint32_t large_term_bits(float held) {
  return float_bits(held) ^ 0x40000000u;
}

PANTILE_HD constexpr bool all_large_in_range(std::uint32_t bits) {
  return bits < 0x800000u;
}

PANTILE_HD constexpr std::uint32_t large_word(float held) {
  return float_bits(held) * 16 - 15 * kHeldZero;
}

// The word of a float from hold_large_term(), in range or not, up to terms of 2^30 units; NaN
// counts as 0.
PANTILE_HD std::uint32_t converted_word(float held) {
  const float units = fmaf(held, 0x1p26f, -kHeldOffset * 0x1p26f);
#if defined(__CUDA_ARCH__)
  const int integer = __float2int_rn(units);
#else
  const int integer = units == units ? static_cast<int>(lrintf(units)) : 0;
#endif
  return kHeldZero + static_cast<std::uint32_t>(integer);
}

// The integers' sum from the sum of `terms` words.
PANTILE_HD constexpr int integer_sum(std::uint32_t words, std::uint32_t terms) {
  return static_cast<int>(words - terms * kHeldZero);
}

}  // namespace pantile::core
