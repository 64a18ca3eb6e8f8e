// FP8 with block scales: x is stored as code * scale, where code is an e4m3 number and one scale
// serves a block of 64 or 128 rows of one head.
//
// Scales are powers of two: dividing by one is exact, and the ratio of neighbouring scales, which
// rescales the output accumulator, is exact and nearly always 1. Against amax / limit they cost no
// accuracy at head dim 128 and 3 % of the RMS error at 64 and 256 (e4m3 is floating point, so that
// an unused factor of two only matters to the smallest numbers).
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kLargestPower = 1.70141183e38f;  // 2^127
inline constexpr float kLargestFloat = 3.402823466e38f;
inline constexpr float kSmallestScale = 8.67361738e-19f;  // 2^-60: products and ratios stay normal

// ---- e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN
// ----

// Nearest, ties to even, saturating: what cvt.rn.satfinite.e4m3x2.f32 gives. Infinity becomes 448;
// NaN becomes 0x7f whatever its sign.
PANTILE_HD constexpr std::uint8_t encode_e4m3(float x) {
  constexpr std::uint32_t kInfinityBits = 0x7f800000u;
  constexpr float kSmallestNormal = 0.015625f;  // 2^-6
  constexpr float kDenormalShift = 16384.0f;    // 2^14, whose last bit is worth 2^-9
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > kInfinityBits) {
    return 0x7f;
  }
  if (magnitude >= float_bits(kE4m3Max)) {
    return static_cast<std::uint8_t>(sign | 0x7eu);
  }
  std::uint32_t code = 0;
  if (magnitude < float_bits(kSmallestNormal)) {
    // The float adder rounds to a multiple of 2^-9, the step of the denormals.
    code = float_bits(bits_float(magnitude) + kDenormalShift) - float_bits(kDenormalShift);
  } else {
    const std::uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
    code = (rounded >> 20) - ((127u - 7u) << 3);
  }
  return static_cast<std::uint8_t>(sign | code);
}

PANTILE_HD constexpr float decode_e4m3(std::uint8_t code) {
  constexpr float kDenormalStep = 0.001953125f;  // 2^-9
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) {
    return bits_float(sign | 0x7fc00000u);
  }
  if (magnitude < 8u) {
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * kDenormalStep));
  }
  return bits_float(sign | ((magnitude + ((127u - 7u) << 3)) << 20));
}

// ---- blocks -------------------------------------------------------------------------------------

// Rows are counted from the start of their sequence; block_rows is 64 or 128.
PANTILE_HD constexpr int scale_blocks(int length, int block_rows) {
  return ceil_div(length, block_rows);
}

// Packed sequences share one array of scales. The sequence that starts at packed row `begin` may
// use the blocks from here on: the ranges of sequences never overlap, without a prefix sum over
// them.
PANTILE_HD constexpr std::int64_t first_packed_block(std::int64_t begin, int batch,
                                                     int block_rows) {
  return begin / block_rows + batch;
}

// Size of that array.
PANTILE_HD constexpr std::int64_t packed_blocks(std::int64_t total_rows, int batch,
                                                int block_rows) {
  return total_rows / block_rows + batch;
}

// ---- scales -------------------------------------------------------------------------------------

// False for NaN and Inf, which no amax, mean or finite code may take in.
PANTILE_HD constexpr bool is_finite(float x) {
  return x >= -kLargestFloat && x <= kLargestFloat;
}

// The largest finite |x| so far. Infinity and NaN do not count: they make their own element NaN
// (see quantize) and must not cost the rest of the block its precision.
PANTILE_HD constexpr float raise_amax(float amax, float x) {
  const float magnitude = x < 0.0f ? -x : x;
  return magnitude > amax && magnitude <= kLargestFloat ? magnitude : amax;
}

// The largest code of Q and K: sums of head_dim products must stay below 65504, for fp16
// accumulators. V and P use all of e4m3.
PANTILE_HD constexpr float score_code_limit(int head_dim) {
  return head_dim <= 128 ? 16.0f : 15.0f;
}
inline constexpr int kMaxFp8Dim = 256;

struct BlockScale {
  float scale, inverse;  // powers of two, both finite, normal and positive; scale * inverse = 1
};

// The smallest power of two with amax / scale <= limit, kept between 2^-60 and the largest for
// which limit * scale is finite; 1 for a block of zeros. `limit` is the largest code to be used,
// between 2 and 448: 448, or less where sums of products must fit an fp16 accumulator (16 for head
// dims to 128, 15 above). A finite amax may be out of reach: values beyond 3.0e38 saturate
// with 448, and beyond 1.7e38 with 16.
PANTILE_HD constexpr BlockScale block_scale(float amax, float limit) {
  if (!(amax > 0.0f)) {
    return BlockScale{1.0f, 1.0f};
  }
  // 2^(127 - e) for a limit in [2^e, 2^(e+1))
  const float largest = bits_float((254u << 23) - (float_bits(limit) & 0x7f800000u) + (127u << 23));
  float scale = largest;
  if (amax <= kSmallestScale * limit) {
    scale = kSmallestScale;
  } else if (amax < largest * limit) {
    // amax / limit rounded up to a power of two: the exponents' difference, one more if amax has
    // the larger mantissa. No division, which would cost GPU code a function call.
    scale =
        bits_float((float_bits(amax) - float_bits(limit) + (127u << 23) + 0x7fffffu) & 0x7f800000u);
  }
  return BlockScale{scale, bits_float((254u << 23) - float_bits(scale))};
}

// Infinity and NaN become NaN, so that attention over them is NaN and not a wrong finite number.
PANTILE_HD constexpr std::uint8_t quantize(float x, const BlockScale& block, float limit) {
  if (!is_finite(x)) {
    return 0x7f;
  }
  return encode_e4m3(clamp(x * block.inverse, -limit, limit));
}

// What is stored for a block of queries: `factor` is their Hadamard group (hadamard.h), or 1.
PANTILE_HD constexpr float stored_scale(const BlockScale& block, float factor) {
  return block.scale < kLargestPower / factor ? block.scale * factor : kLargestPower;
}

// What is stored for a block of values with that amax: 0 for a block of zeros, whose scale of 1
// would say nothing. Attention then goes on in the units of the blocks before, and neither rescales
// to 1 and back nor takes 1 for the size of values.
PANTILE_HD constexpr float stored_value_scale(const BlockScale& block, float amax, float descale) {
  return amax > 0.0f ? block.scale * descale : 0.0f;
}

// The unit of the output after a block of values, from the stored scale without its sign; `before`:
// that after the blocks before, or kSmallestScale.
PANTILE_HD constexpr float value_unit(float stored, float before) {
  return stored > 0.0f ? stored : before;
}

// Factor that brings an accumulator from units of `from` to units of `to`. Finite even when the
// scales are further apart than floats reach, so that 0 stays 0.
PANTILE_HD constexpr float scale_ratio(const BlockScale& from, const BlockScale& to) {
  const float ratio = from.scale * to.inverse;
  return ratio < kLargestFloat ? ratio : kLargestFloat;
}

}  // namespace pantile::core
