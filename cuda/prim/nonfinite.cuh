// Infinities and NaN in 16-bit elements: an exponent of all ones.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::prim {

template <DType kDType>
inline constexpr std::uint32_t kExponentBits = kDType == DType::bf16 ? 0x7f80u : 0x7c00u;

template <DType kDType>
PANTILE_DEVICE bool is_nonfinite(std::uint16_t bits) {
  return (bits & kExponentBits<kDType>) == kExponentBits<kDType>;
}

// Sets the non-finite elements of a pair to 0.
template <DType kDType>
PANTILE_DEVICE std::uint32_t zero_nonfinite(std::uint32_t pair) {
  constexpr std::uint32_t kLow = kExponentBits<kDType>;
  constexpr std::uint32_t kHigh = kLow << 16;
  pair = (pair & kLow) == kLow ? pair & 0xffff0000u : pair;
  return (pair & kHigh) == kHigh ? pair & 0x0000ffffu : pair;
}

// a + b of single elements.
template <DType kDType>
PANTILE_DEVICE std::uint16_t add_16bit(std::uint16_t a, std::uint16_t b) {
  std::uint16_t sum;
  if constexpr (kDType == DType::bf16) {
    asm("{ .reg .b16 one; mov.b16 one, 0x3f80; fma.rn.bf16 %0, %1, one, %2; }"
        : "=h"(sum)
        : "h"(a), "h"(b));
  } else {
    asm("add.f16 %0, %1, %2;" : "=h"(sum) : "h"(a), "h"(b));
  }
  return sum;
}

// Looks at many elements for one instruction a pair: x * 0 + accumulator is NaN from the first
// non-finite x on, and 0 until then. Four independent accumulators.
template <DType kDType>
class NonFiniteScan {
 public:
  PANTILE_DEVICE void add(const uint4& elements) {
    add(sum_[0], elements.x);
    add(sum_[1], elements.y);
    add(sum_[2], elements.z);
    add(sum_[3], elements.w);
  }

  // In any lane of the warp, which must be converged.
  PANTILE_DEVICE bool any() const {
    // NaN survives all four additions; zeros leave at most a sign.
    std::uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      seen |= sum_[i];
    }
    return __any_sync(0xffffffffu, (seen & 0x7fff7fffu) != 0);
  }

 private:
  static PANTILE_DEVICE void add(std::uint32_t& sum, std::uint32_t pair) {
    if constexpr (kDType == DType::bf16) {
      asm("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 %0, %1, zero, %0; }"
          : "+r"(sum)
          : "r"(pair));
    } else {
      asm("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 %0, %1, zero, %0; }"
          : "+r"(sum)
          : "r"(pair));
    }
  }

  std::uint32_t sum_[4] = {0, 0, 0, 0};
};

}  // namespace pantile::prim
