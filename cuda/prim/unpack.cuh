// Two 16-bit elements of one register as floats.
#pragma once

#include <cuda_fp16.h>

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
    __half2 halves;
    memcpy(&halves, &pair, sizeof(halves));  // the compiler's own; CUDA 12's NVRTC has no <cstring>
    return __half22float2(halves);
  }
}

}  // namespace pantile::prim
