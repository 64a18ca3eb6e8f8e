// int8 numbers, four to a register, the first in bits 0-7.
#pragma once

#include <cstdint>

#include "prim/address.cuh"
#include "prim/half2.cuh"

namespace pantile::prim {

// All four, exactly, as two pairs of fp16: a byte x below 0x64, the high byte of 1024, is 1024 + x.
PANTILE_DEVICE void unpack_s8(std::uint32_t codes, std::uint32_t& first, std::uint32_t& second) {
  constexpr std::uint32_t kBias = twice(0x6480);  // 1024 + 128
  const std::uint32_t positive = codes ^ 0x80808080u;
  first = subtract2(__byte_perm(positive, 0x64646464u, 0x4140), kBias);
  second = subtract2(__byte_perm(positive, 0x64646464u, 0x4342), kBias);
}

}  // namespace pantile::prim
