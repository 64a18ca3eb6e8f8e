// Infinities and NaNs in registers of two 16-bit elements.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::tile {

// Bits of the exponent, all set in an infinity or a NaN.
template <DType kDType>
inline constexpr std::uint32_t kExponentBits = kDType == DType::bf16 ? 0x7f80u : 0x7c00u;

// Finds out whether any of many elements is infinite or NaN, at one instruction a pair: x * 0 is a
// zero for all others, and a NaN stays one.
template <DType kDType>
class NonfiniteSearch {
 public:
  PANTILE_DEVICE void add(std::uint32_t pair) {
    if constexpr (kDType == DType::bf16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum_) : "r"(pair), "r"(0));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum_) : "r"(pair), "r"(0));
    }
  }
  PANTILE_DEVICE bool found() const { return (sum_ & 0x7fff7fffu) != 0; }

 private:
  std::uint32_t sum_ = 0;
};

template <DType kDType>
PANTILE_DEVICE std::uint32_t finite_or_zero(std::uint32_t pair) {
  constexpr std::uint32_t kBits = kExponentBits<kDType>;
  const std::uint32_t low = (pair & kBits) == kBits ? 0 : pair & 0xffffu;
  const std::uint32_t high = (pair >> 16 & kBits) == kBits ? 0 : pair & 0xffff0000u;
  return low | high;
}

// One element as a float if it is infinite or NaN, else 0.
template <DType kDType>
PANTILE_DEVICE float nonfinite_or_zero(std::uint16_t element) {
  constexpr std::uint32_t kBits = kExponentBits<kDType>;
  if ((element & kBits) != kBits) {
    return 0.0f;
  }
  return kDType == DType::bf16 ? __uint_as_float(static_cast<std::uint32_t>(element) << 16)
                               : __half2float(__ushort_as_half(element));
}

}  // namespace pantile::tile
