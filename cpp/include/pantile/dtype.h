// Element types. The enum values are stable: they appear in plans that users store.
#pragma once

#include <cstdint>

namespace pantile {

enum class DType : std::uint8_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3 };

constexpr int dtype_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::e4m3 ? 1 : 2;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::e4m3: return "e4m3";
  }
  return "?";
}

}  // namespace pantile
