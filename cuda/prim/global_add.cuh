// Adds and stores from registers into global memory, without a returned value. PTX ISA, "red". The
// L2 cache performs them; their order is not defined.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE void global_add(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

PANTILE_DEVICE void global_store_if(bool wanted, float* to, float x) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;"
      " @wanted st.global.f32 [%0], %1; }" ::"l"(to),
      "f"(x), "r"(static_cast<int>(wanted))
      : "memory");
}

// `to`, `count` times `step` bytes further, in one instruction.
PANTILE_DEVICE float* advance(float* to, std::int32_t count, std::int32_t step) {
  float* result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(count), "r"(step), "l"(to));
  return result;
}

PANTILE_DEVICE void global_add(int* to, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Four neighbouring floats, 16-byte aligned.
PANTILE_DEVICE void global_add(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Two int32 in one 64-bit addition. The sum's low word is the sum of the `low`s; its high word is
// the sum of the `high`s, less one if the low word is negative.
PANTILE_DEVICE void global_add_pair(std::uint64_t* to, int low, int high) {
  const std::uint32_t upper = static_cast<std::uint32_t>(high) + (low < 0 ? 0xffffffffu : 0u);
  const std::uint64_t pair =
      (static_cast<std::uint64_t>(upper) << 32) | static_cast<std::uint32_t>(low);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(pair) : "memory");
}

}  // namespace pantile::prim
