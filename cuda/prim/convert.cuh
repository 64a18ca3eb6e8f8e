// Two floats into one register of two 16-bit elements, round to nearest even.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::prim {

// `low` lands in bits 0-15, which is the element at the lower address.
template <DType kDType>
PANTILE_DEVICE std::uint32_t pack(float low, float high) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  std::uint32_t packed;
  if constexpr (kDType == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace pantile::prim
