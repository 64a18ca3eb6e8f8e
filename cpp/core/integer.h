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

// a + b must not overflow.
template <class T>
PANTILE_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
PANTILE_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// Exact division of any 0 <= n < 2^31 by a divisor that is known only at run time: a multiply and a
// shift where a GPU would need about twenty instructions. Built on the host, passed by value.
// With s = ceil(log2 d) and m = ceil(2^(31+s) / d) the quotient is n * m >> (31 + s): m * d exceeds
// 2^(31+s) by less than d <= 2^s, and n is below 2^31, so that the error stays below one quotient.
// Source: Granlund and Montgomery 1994, theorem 4.2.
class FastDivmod {
 public:
  struct Result {
    int quotient, remainder;
  };

  PANTILE_HD constexpr FastDivmod() : FastDivmod(1) {}

  PANTILE_HD constexpr explicit FastDivmod(int divisor)  // at least 1
      : divisor_(divisor), multiplier_(0), shift_(0) {
    const std::uint64_t d = static_cast<std::uint32_t>(divisor);
    while ((std::uint64_t{1} << shift_) < d) {
      ++shift_;
    }
    multiplier_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) + d - 1) / d);
  }

  PANTILE_HD constexpr int divisor() const { return divisor_; }

  PANTILE_HD constexpr int divide(int n) const {
    // 2 n * m >> 32 is n * m >> 31, with the high half of one 32-bit multiply.
    const std::uint64_t twice = static_cast<std::uint32_t>(n) << 1;
    return static_cast<int>(static_cast<std::uint32_t>((twice * multiplier_) >> 32) >> shift_);
  }

  PANTILE_HD constexpr Result divmod(int n) const {
    const int quotient = divide(n);
    return Result{quotient, n - quotient * divisor_};
  }

 private:
  int divisor_;
  std::uint32_t multiplier_;
  int shift_;
};

}  // namespace pantile::core
