// Fast scalar mathematics on the special-function unit.
#pragma once

#include <math.h>

#include "prim/address.cuh"

namespace pantile::prim {

// 2^x, relative error 2^-22; subnormal results are flushed to 0, 2^-inf = 0, 2^NaN = NaN.
PANTILE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error 2^-22 near 1 and relative 2^-22 elsewhere.
PANTILE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) from 2 log2(e) x: absolute error 2^-22.
PANTILE_DEVICE float tanh_of_log2(float twice) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exp2_approx(twice)));
  return fmaf(result, -2.0f, 1.0f);
}

}  // namespace pantile::prim
