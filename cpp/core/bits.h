// The bits of a float and back, in constant expressions, on the host and on the device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::core {

PANTILE_HD constexpr std::uint32_t float_bits(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}

PANTILE_HD constexpr float bits_float(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

}  // namespace pantile::core
