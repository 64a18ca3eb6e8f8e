// Integer helpers. All arguments are non-negative unless a comment says otherwise.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::core {

template <class T>
PANTILE_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
PANTILE_HD constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
PANTILE_HD constexpr T clamp(T x, T low, T high) {
  return x < low ? low : x > high ? high : x;
}

template <class T>
PANTILE_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
PANTILE_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// Rounds towards minus infinity; `a` may be negative, `b` is positive.
PANTILE_HD constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

}  // namespace pantile::core
