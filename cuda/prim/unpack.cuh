// Two 16-bit elements of one register as floats.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::prim {

// x is the element in bits 0-15.
template <DType kDType>
PANTILE_DEVICE float2 unpack(std::uint32_t pair) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  if constexpr (kDType == DType::bf16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    float2 value;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(pair));
    return value;
  }
}

}  // namespace pantile::prim
