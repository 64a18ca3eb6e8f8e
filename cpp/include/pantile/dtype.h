// Element types. The enum values are stable: they appear in plans that users store.
#pragma once

#include <cstdint>

namespace pantile {

enum class DType : std::uint8_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3 };

// How GPU kernels multiply float32 matrices; other dtypes and the CPU ignore it.
//   highest  error of float32: three TF32 products for each
//   tf32     operands rounded to 11 bits of mantissa, sums in float32
enum class Float32Precision : std::uint8_t { highest = 0, tf32 = 1 };

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

constexpr const char* float32_precision_name(Float32Precision precision) {
  switch (precision) {
    case Float32Precision::highest: return "highest";
    case Float32Precision::tf32: return "tf32";
  }
  return "?";
}

}  // namespace pantile
