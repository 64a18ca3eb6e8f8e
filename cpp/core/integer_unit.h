// The unit of sums that are made of integers (integer_sum.h): a power of two a row of dQ, so small
// that the sum keeps the precision of fp32 and so large that no partial sum leaves 32 bits.
//
// Of a row i, whose dQ / scale is the sum over keys j of dS_ij K_j, with sum_j P_ij = 1:
//   |sum_j dS_ij K_jd| <= (||dO_i|| max_j ||V_j|| + |delta_i|) max |K|
// That is a bound whatever the scores are, but a loud key that no query attends to makes it, and
// with it the unit, far larger than the row. Heads with such keys are measured instead: a first
// pass finds the largest addition to each row, and the unit comes from that.
//
// Magnitudes are mantissa and exponent, so that norms and products of numbers at the ends of the
// range stay finite and do not vanish.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

// mantissa * 2^exponent; the mantissa is 0 or at least 1 and stays near it.
struct Magnitude {
  float mantissa = 0.0f;
  int exponent = 0;
};

// Of a finite |x|.
PANTILE_HD constexpr Magnitude magnitude_of(float x) {
  constexpr int kDenormalShift = 24;
  std::uint32_t bits = float_bits(x) & 0x7fffffffu;
  int exponent = 0;
  if (bits != 0 && bits < (1u << 23)) {
    bits = float_bits(bits_float(bits) * 16777216.0f);  // 2^24
    exponent = -kDenormalShift;
  }
  if (bits == 0) {
    return Magnitude{};
  }
  return Magnitude{bits_float((bits & 0x7fffffu) | 0x3f800000u),
                   exponent + static_cast<int>(bits >> 23) - 127};
}

PANTILE_HD constexpr Magnitude product(const Magnitude& a, const Magnitude& b) {
  return Magnitude{a.mantissa * b.mantissa, a.exponent + b.exponent};
}

// Exact but for numbers far below the other one, which count as less than its last bit.
PANTILE_HD constexpr Magnitude sum(const Magnitude& a, const Magnitude& b) {
  const bool a_larger = b.mantissa == 0.0f || (a.mantissa != 0.0f && a.exponent >= b.exponent);
  const Magnitude& large = a_larger ? a : b;
  const Magnitude& small = a_larger ? b : a;
  const int shift = clamp(large.exponent - small.exponent, 0, 60);
  const float part = small.mantissa * bits_float(static_cast<std::uint32_t>(127 - shift) << 23);
  return Magnitude{large.mantissa + part, large.exponent};
}

// The power of two that brings sums of at most `bound` to less than 2^30 units; 1.1 covers the
// rounding of P and dS. Finite, and so small that units of 2^22 have a scale, too.
PANTILE_HD constexpr float unit_scale(const Magnitude& bound) {
  if (bound.mantissa == 0.0f) {
    return 1.0f;
  }
  const Magnitude covered = magnitude_of(1.1f * bound.mantissa);
  const int shift = clamp(29 - bound.exponent - covered.exponent, -120, 120);
  return bits_float(static_cast<std::uint32_t>(shift + 127) << 23);
}

// What is known of the keys of a head before the main pass. Numbers that do not depend on the order
// of the keys: maxima, and sums of integers.
struct KeyBounds {
  std::uint32_t max_k, max_v;  // bits of max |K| and of max ||V_j||, which order like the floats
  // Of the keys that are finite and not 0: their number, and the sum of the exponents of max |K_j|
  // or of ||V_j||. The mean exponent is that of a usual key, whatever a few others hold.
  std::int32_t keys_k, keys_v;
  std::int32_t exponents_k, exponents_v;
  std::int32_t measured;  // what must_be_measured() said of the finished bounds
};

PANTILE_HD constexpr bool is_finite_bits(std::uint32_t magnitude_bits) {
  return magnitude_bits < 0x7f800000u;
}

// Takes a key into bounds: the bits of its max |K_j| and of its ||V_j||.
PANTILE_HD constexpr void count_key(KeyBounds* bounds, std::uint32_t k, std::uint32_t v) {
  bounds->max_k = max_of(bounds->max_k, k);
  bounds->max_v = max_of(bounds->max_v, v);
  if (k != 0 && is_finite_bits(k)) {
    ++bounds->keys_k;
    bounds->exponents_k += magnitude_of(bits_float(k)).exponent;
  }
  if (v != 0 && is_finite_bits(v)) {
    ++bounds->keys_v;
    bounds->exponents_v += magnitude_of(bits_float(v)).exponent;
  }
}

// The bounds of the keys of both, which are disjoint.
PANTILE_HD constexpr KeyBounds united(const KeyBounds& a, const KeyBounds& b) {
  return KeyBounds{max_of(a.max_k, b.max_k),
                   max_of(a.max_v, b.max_v),
                   a.keys_k + b.keys_k,
                   a.keys_v + b.keys_v,
                   a.exponents_k + b.exponents_k,
                   a.exponents_v + b.exponents_v,
                   0};
}

// Of which keys the mean is taken that stands for that of all (common/backward_key_means.cuh): how
// many, and the place of number `i` among `keys`. Of that many keys all are taken, in order.
PANTILE_HD constexpr int key_sample_count(int head_dim) {
  return head_dim <= 128 ? 64 : 32;
}

PANTILE_HD constexpr std::int64_t key_sample(int i, int samples, std::int64_t keys) {
  return (2 * i + 1) * keys / (2 * samples);
}

// How many powers of two the loudest keys stand above the usual ones, K and V together.
PANTILE_HD constexpr float loudness(const KeyBounds& bounds) {
  const auto above = [](std::uint32_t most, std::int32_t keys, std::int32_t exponents) {
    return keys == 0 ? 0.0f
                     : static_cast<float>(magnitude_of(bits_float(most)).exponent) -
                           static_cast<float>(exponents) / static_cast<float>(keys);
  };
  return above(bounds.max_k, bounds.keys_k, bounds.exponents_k) +
         above(bounds.max_v, bounds.keys_v, bounds.exponents_v);
}

// Whether the bound may be too far from the rows for the precision of a type of `mantissa_bits`:
// 2 to 3 powers of two are usual for normal data, and each further one costs a bit.
PANTILE_HD constexpr bool must_be_measured(const KeyBounds& bounds, int mantissa_bits) {
  if (!is_finite_bits(bounds.max_k) || !is_finite_bits(bounds.max_v)) {
    return true;
  }
  return loudness(bounds) > static_cast<float>(mantissa_bits > 8 ? 5 : 8);
}

// Of a row of a head that is not measured.
PANTILE_HD constexpr Magnitude row_bound(const KeyBounds& bounds, const Magnitude& grad_o_norm,
                                         float delta) {
  const Magnitude scores =
      sum(product(grad_o_norm, magnitude_of(bits_float(bounds.max_v))), magnitude_of(delta));
  return product(scores, magnitude_of(bits_float(bounds.max_k)));
}

// The power of two of a usual key, at most max |K|: times that, a row's sums of dS are bounded as
// its dQ is, and have the same unit. Not that of the loudest key: in a head that is measured the
// sums would then be all that is seen. 0 where no key has a finite number but 0.
PANTILE_HD constexpr float row_sum_unit(const KeyBounds& bounds) {
  if (bounds.keys_k == 0) {
    return 0.0f;
  }
  const int exponent = clamp(bounds.exponents_k / bounds.keys_k, -126, 126);
  return bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// Of a row whose largest addition, of `additions`, was `largest`.
PANTILE_HD constexpr Magnitude measured_bound(float largest, int additions) {
  return product(magnitude_of(largest), magnitude_of(static_cast<float>(additions)));
}

// A row's number as a word that lies beside numbers which tensor cores multiply, where both of its
// halves are multiplied by 0: neither may be an infinity or a NaN of bf16, whose bits 7 to 14 are
// all ones. So bit 14 stays 0, and a half holds 15 bits.
inline constexpr std::int64_t kMostRowSlots = std::int64_t{1} << 30;

PANTILE_HD constexpr std::uint32_t slot_word(std::uint32_t slot) {
  const std::uint32_t low = slot & 0x7fffu;
  const std::uint32_t high = slot >> 15;
  return (low & 0x3fffu) | (low & 0x4000u) << 1 | (high & 0x3fffu) << 16 | (high & 0x4000u) << 17;
}

PANTILE_HD constexpr std::uint32_t slot_of(std::uint32_t word) {
  return (word & 0x3fffu) | (word & 0x8000u) >> 1 | (word >> 16 & 0x3fffu) << 15 |
         (word >> 31) << 29;
}

}  // namespace pantile::core
