// Rows of elements as floats, exactly, on any processor. The attention kernels have their own
// vector conversions.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/bits.h"
#include "core/scaling.h"
#include "pantile/dtype.h"

namespace pantile::cpu {

inline float bf16_to_float(std::uint16_t half) {
  return core::bits_float(static_cast<std::uint32_t>(half) << 16);
}

inline float f16_to_float(std::uint16_t half) {
  constexpr float kExponentShift = 5.192296858534828e33f;  // 2^112: from bias 15 to bias 127
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t bits =
      magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13
                           : core::float_bits(core::bits_float(magnitude << 13) * kExponentShift);
  return core::bits_float(sign | bits);
}

// `count` elements from element `first` on.
inline void load_row(DType dtype, const void* data, std::int64_t first, int count, float* out) {
  const auto* bytes = static_cast<const std::uint8_t*>(data) + first * dtype_bytes(dtype);
  if (dtype == DType::f32) {
    std::memcpy(out, bytes, static_cast<std::size_t>(count) * sizeof *out);
    return;
  }
  for (int i = 0; i < count; ++i) {
    if (dtype == DType::e4m3) {
      out[i] = core::decode_e4m3(bytes[i]);
    } else {
      std::uint16_t half;
      std::memcpy(&half, bytes + 2 * i, sizeof half);
      out[i] = dtype == DType::bf16 ? bf16_to_float(half) : f16_to_float(half);
    }
  }
}

// Nearest, ties to even.
inline std::uint16_t float_to_bf16(float x) {
  const std::uint32_t bits = core::float_bits(x);
  const bool nan = x != x;
  return static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u
                                        : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Nearest, ties to even; from 65520 on infinity. Adding 0.5 puts the last bit of a subnormal half
// at the last bit of the sum.
inline std::uint16_t float_to_f16(float x) {
  const std::uint32_t sign = (core::float_bits(x) >> 16) & 0x8000u;
  const std::uint32_t magnitude = core::float_bits(x) & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (magnitude < (113u << 23)) {
    half = core::float_bits(core::bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(half | sign);
}

// `count` numbers to elements from element `first` on; f32, f16 or bf16.
inline void store_floats(DType dtype, void* data, std::int64_t first, int count,
                         const float* from) {
  auto* const bytes = static_cast<std::uint8_t*>(data) + first * dtype_bytes(dtype);
  if (dtype == DType::f32) {
    std::memcpy(bytes, from, static_cast<std::size_t>(count) * sizeof *from);
    return;
  }
  for (int i = 0; i < count; ++i) {
    const std::uint16_t half =
        dtype == DType::bf16 ? float_to_bf16(from[i]) : float_to_f16(from[i]);
    std::memcpy(bytes + 2 * i, &half, sizeof half);
  }
}

}  // namespace pantile::cpu
