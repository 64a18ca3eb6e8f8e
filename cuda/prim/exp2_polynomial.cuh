// 2^x without the special-function unit, for kernels in which that unit is the bottleneck.
#pragma once

#include "prim/address.cuh"

namespace pantile::prim {

// Relative error 1e-4, a fortieth of a unit in the last place of bf16 and a tenth of one of f16.
// Below 2^-126 results lose accuracy; 2^x = 0 for x <= -127. 2^NaN is 2^128, not finite in bf16
// and f16.
PANTILE_DEVICE float exp2_polynomial(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum's low mantissa bits are its integer
  float clamped;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(-127.0f));
  float shifted;
  asm("add.rm.f32 %0, %1, %2;" : "=f"(shifted) : "f"(clamped), "f"(kRound));
  const float fraction = clamped - (shifted - kRound);  // [0, 1)
  const float power = fmaf(
      fmaf(fmaf(0.0771190897f, fraction, 0.227564394f), fraction, 0.695146143f), fraction, 1.0f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(shifted) << 23));
}

}  // namespace pantile::prim
