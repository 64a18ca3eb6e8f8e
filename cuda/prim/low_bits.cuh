// The low bits of O (core/low_bits.h), several at a time.
#pragma once

#include <cstdint>

#include "core/low_bits.h"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/unpack.cuh"

namespace pantile::prim {

template <DType kDType>
inline constexpr int kLowShift = kDType == DType::bf16 ? core::kLowShiftBf16 : core::kLowShiftF16;

// Two int8 with saturation in the lower half, the lower half of `upper` above them. PTX ISA,
// "cvt.pack".
PANTILE_DEVICE std::uint32_t pack_s8(int low, int high, std::uint32_t upper) {
  std::uint32_t packed;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(high), "r"(low), "r"(upper));
  return packed;
}

// The low bits of x and y in the lower half, the lower half of `upper` above them: core::low_bits,
// but for numbers that have none, where it does not matter what is stored.
template <DType kDType>
PANTILE_DEVICE std::uint32_t low_bits(float x, float y, std::uint32_t upper) {
  constexpr int kHalf = 1 << (kLowShift<kDType> - 1);
  const float2 rounded = unpack<kDType>(pack<kDType>(x, y));
  const auto steps = [](float exact, float rounded_to) {
    const std::uint32_t distance = __float_as_uint(exact) - __float_as_uint(rounded_to);
    return static_cast<int>(distance + kHalf) >> kLowShift<kDType>;
  };
  return pack_s8(steps(x, rounded.x), steps(y, rounded.y), upper);
}

// Two numbers of O from a pair of 16-bit ones and bytes `byte` and `byte + 1` of `low`.
template <DType kDType>
PANTILE_DEVICE float2 with_low_bits(std::uint32_t pair, std::uint32_t low, int byte) {
  const float2 rounded = unpack<kDType>(pair);
  const auto exact = [low](float x, int at) {
    return core::with_low_bits<kLowShift<kDType>>(x, static_cast<std::int8_t>(low >> (8 * at)));
  };
  return make_float2(exact(rounded.x, byte), exact(rounded.y, byte + 1));
}

}  // namespace pantile::prim
