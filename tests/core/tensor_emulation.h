// What a tensor core computes, bit by bit, on the CPU: for tests of the code that relies on it.
//
// D = A B + C of one warp: products are exact; they and C are aligned to the largest exponent, cut
// (not rounded) a few bits below the last place of an fp32 number, added, and cut to fp32. How many
// bits are kept depends on the chip. An exponent is that of the factors together: a product of two
// significands may be as large as 4. Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior
// of NVIDIA tensor cores" (2021); tests/gpu/test_tensor_softmax.cu compares with the chip at hand.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/fragment.h"
#include "core/tensor_softmax.h"

namespace pantile::core {

namespace detail {

// x = significand * 2^(exponent - 23).
struct Decoded {
  std::int64_t significand;
  int exponent;
};

constexpr Decoded decode(float x) {
  const std::uint32_t bits = float_bits(x);
  const int field = static_cast<int>(bits >> 23 & 0xffu);
  const std::int64_t fraction = static_cast<std::int64_t>(bits & 0x7fffffu);
  const std::int64_t magnitude = field == 0 ? fraction : fraction | 0x800000;
  return Decoded{(bits >> 31) != 0 ? -magnitude : magnitude, field == 0 ? -126 : field - 127};
}

// x * 2^shift, cut towards zero.
constexpr std::int64_t shifted(std::int64_t x, int shift) {
  const std::int64_t magnitude = x < 0 ? -x : x;
  const std::int64_t moved = shift >= 0    ? magnitude << shift
                             : shift > -63 ? magnitude >> -shift
                                           : 0;
  return x < 0 ? -moved : moved;
}

// sum * 2^exponent, cut towards zero to fp32. Results below the normal range are flushed to 0.
constexpr float cut_to_float(std::int64_t sum, int exponent) {
  if (sum == 0) {
    return 0.0f;
  }
  std::uint64_t magnitude = static_cast<std::uint64_t>(sum < 0 ? -sum : sum);
  while (magnitude >= std::uint64_t{1} << 24) {
    magnitude >>= 1;
    ++exponent;
  }
  while (magnitude < std::uint64_t{1} << 23) {
    magnitude <<= 1;
    --exponent;
  }
  const int field = exponent + 23 + 127;
  const std::uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  if (field <= 0) {
    return bits_float(sign);
  }
  if (field >= 255) {
    return bits_float(sign | 0x7f800000u);
  }
  return bits_float(sign | static_cast<std::uint32_t>(field) << 23 |
                    (static_cast<std::uint32_t>(magnitude) & 0x7fffffu));
}

constexpr bool is_finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace detail

// c + sum of a[i] * b[i], of numbers as the tensor core reads them (truncate_to_tf32, or 16-bit
// numbers). Infinities and NaN as IEEE has them.
constexpr float tensor_dot(const float* a, const float* b, int count, float c, int kept_bits) {
  bool finite = detail::is_finite(c);
  float plain = c;
  int top = c == 0.0f ? -1000 : detail::decode(c).exponent;
  for (int i = 0; i < count; ++i) {
    finite = finite && detail::is_finite(a[i]) && detail::is_finite(b[i]);
    plain += a[i] * b[i];
    if (a[i] != 0.0f && b[i] != 0.0f) {
      const int exponent = detail::decode(a[i]).exponent + detail::decode(b[i]).exponent;
      top = exponent > top ? exponent : top;
    }
  }
  if (!finite) {
    return plain;
  }
  const int unit = top - 23 - kept_bits;  // exponent of the last bit that is kept
  const detail::Decoded start = detail::decode(c);
  std::int64_t sum = detail::shifted(start.significand, start.exponent - 23 - unit);
  for (int i = 0; i < count; ++i) {
    const detail::Decoded x = detail::decode(a[i]);
    const detail::Decoded y = detail::decode(b[i]);
    const std::int64_t product = x.significand * y.significand;
    sum += product == 0 ? 0 : detail::shifted(product, x.exponent + y.exponent - 46 - unit);
  }
  return detail::cut_to_float(sum, unit);
}

// The registers of a warp, [lane][element].
using WarpQuads = float[32][4];
using WarpPairs = float[32][2];

// d = a b + c with m16n8k8 TF32 fragments.
constexpr void emulate_mma_tf32(WarpQuads& d, const WarpQuads& a, const WarpPairs& b,
                                const WarpQuads& c, int kept_bits) {
  float A[16][8] = {};
  float B[8][8] = {};  // [column][k]
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element at = mma_tf32_a(lane, i);
      A[at.row][at.column] = truncate_to_tf32(a[lane][i]);
    }
    for (int i = 0; i < 2; ++i) {
      const Element at = mma_tf32_b(lane, i);
      B[at.column][at.row] = truncate_to_tf32(b[lane][i]);
    }
  }
  WarpQuads result = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element at = mma_accumulator(lane, i);
      result[lane][i] = tensor_dot(A[at.row], B[at.column], 8, c[lane][i], kept_bits);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      d[lane][i] = result[lane][i];
    }
  }
}

// ---- the steps of cuda/attn/tensor_softmax.cuh
// ----------------------------------------------------

// x = factor * x + addend of its row; addend[lane] holds those of rows lane / 4 and lane / 4 + 8.
constexpr void emulate_scale_and_add(WarpQuads& x, float factor, const WarpPairs& addend,
                                     int kept_bits) {
  WarpPairs b = {};
  WarpQuads c = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2; ++i) {
      b[lane][i] = shuffle_operand_holds(lane, i) ? factor : 0.0f;
    }
    for (int i = 0; i < 4; ++i) {
      c[lane][i] = addend[lane][i % 2];
    }
  }
  WarpQuads d = {};
  emulate_mma_tf32(d, x, b, c, kept_bits);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      x[lane][i] = d[lane][shuffled_element(i)];
    }
  }
}

// sums += the columns of p, as add_row_sums leaves them.
constexpr void emulate_row_sums_tf32(WarpQuads& sums, const WarpQuads& p, int kept_bits) {
  WarpPairs b = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2; ++i) {
      b[lane][i] = row_sum_operand_holds(lane, i) ? 1.0f : 0.0f;
    }
  }
  emulate_mma_tf32(sums, p, b, sums, kept_bits);
}

// The same from the 16-bit operand of 16 keys: p[lane] holds its 8 elements, rounded already.
constexpr void emulate_row_sums_16bit(WarpQuads& sums, const float (&p)[32][8], int kept_bits) {
  float A[16][16] = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const Element at = mma_k16_a(lane, i);
      A[at.row][at.column] = p[lane][i];
    }
  }
  constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element at = mma_accumulator(lane, i);
      sums[lane][i] = tensor_dot(A[at.row], kOnes, 16, sums[lane][i], kept_bits);
    }
  }
}

}  // namespace pantile::core
