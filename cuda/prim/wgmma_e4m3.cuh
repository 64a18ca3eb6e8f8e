// wgmma on e4m3 operands: a 64 x 32 tile A in registers or shared memory times a 32 x N tile B in
// shared memory. Protocol, accumulator layout and descriptors as in wgmma.cuh; both operands are
// k-major, a k step is 32 bytes.
//
// A from registers: a[r] packs A[16 w + l / 4 + 8 (r % 2)][4 (l % 4) + 16 (r / 2) + {0, 1, 2, 3}].
// fp16 accumulators: d[2 j + i] packs D[16 w + l / 4 + 8 i][8 j + 2 (l % 4) + {0, 1}].
//
// NOTE: Hopper's adder keeps too few bits in these products: about 2^-11 of the accumulator's value
// is lost in each step when the addends have a common sign. Long sums must be taken over into fp32
// registers now and then.
#pragma once

#include <cstdint>

#include "prim/wgmma.cuh"

namespace pantile::prim {

// High descriptor words: distance between groups of 8 rows, and the swizzle.
inline constexpr std::uint32_t kSwizzle64High = 0x80000020u;  // 64-byte rows

// A descriptor from its low word (descriptor()) and the high word of its swizzle.
PANTILE_DEVICE std::uint64_t whole_descriptor(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint64_t>(high) << 32 | low;
}

namespace detail {

// accumulators: how the list of wgmma.cuh is named that has as many registers as this product.
// Descriptors are 64-bit numbers all the way: ptxas then moves from one k step to the next with one
// uniform addition, where a pair of words takes an addition and a copy.
#define PANTILE_WGMMA_E4M3_SS(d, n, accumulators, out, ra, rb, rp)                              \
  asm volatile(                                                                                 \
      "{ .reg .pred p;\n"                                                                       \
      "setp.ne.b32 p, %" #rp                                                                    \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #n "k32." out ".e4m3.e4m3 {" PANTILE_N_##accumulators \
      "}, %" #ra ", %" #rb ", p, 1, 1; }"                                                       \
      : PANTILE_D_##accumulators(d)                                                             \
      : "l"(a), "l"(b), "r"(accumulate))

#define PANTILE_WGMMA_E4M3_RS(d, n, accumulators, out, r0, r1, r2, r3, rb, rp)                  \
  asm volatile(                                                                                 \
      "{ .reg .pred p;\n"                                                                       \
      "setp.ne.b32 p, %" #rp                                                                    \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #n "k32." out ".e4m3.e4m3 {" PANTILE_N_##accumulators \
      "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #rb ", p, 1, 1; }"                          \
      : PANTILE_D_##accumulators(d)                                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <int kN>
struct E4m3Output;

// O += P V with the N = dims of V (and 8 rows of ones).
#define PANTILE_E4M3_OUTPUT(n, r0, r1, r2, r3, rb, rp)                                    \
  template <>                                                                             \
  struct E4m3Output<n> {                                                                  \
    static_assert(r0 == n / 2 && rp == r0 + 5);                                           \
    static PANTILE_DEVICE void rs(float* d, const std::uint32_t (&a)[4], std::uint64_t b, \
                                  int accumulate) {                                       \
      PANTILE_WGMMA_E4M3_RS("+f", n, n, "f32", r0, r1, r2, r3, rb, rp);                   \
    }                                                                                     \
  }

PANTILE_E4M3_OUTPUT(72, 36, 37, 38, 39, 40, 41);
PANTILE_E4M3_OUTPUT(96, 48, 49, 50, 51, 52, 53);
PANTILE_E4M3_OUTPUT(104, 52, 53, 54, 55, 56, 57);
PANTILE_E4M3_OUTPUT(128, 64, 65, 66, 67, 68, 69);
PANTILE_E4M3_OUTPUT(136, 68, 69, 70, 71, 72, 73);

#undef PANTILE_E4M3_OUTPUT

}  // namespace detail

// D[kOffset and on] (+)= A B in fp32, A from registers, N columns. Overwrites D when `accumulate`
// is 0; as an operand that is read all the same, because pure outputs make ptxas spill here (300
// bytes in the forward at head dim 128, against none).
template <int kN, int kOffset, int kCount>
PANTILE_DEVICE void wgmma_e4m3_rs(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b,
                                  int accumulate) {
  static_assert(kOffset + kN / 2 <= kCount);
  detail::E4m3Output<kN>::rs(d + kOffset, a, b, accumulate);
}

// S (+)= A B in fp16, 128 columns.
template <bool kWrite>
PANTILE_DEVICE void wgmma_e4m3_f16_rs(std::uint32_t (&d)[32], const std::uint32_t (&a)[4],
                                      std::uint64_t b) {
  constexpr int accumulate = kWrite ? 0 : 1;
  if constexpr (kWrite) {
    PANTILE_WGMMA_E4M3_RS("=r", 128, 64, "f16", 32, 33, 34, 35, 36, 37);
  } else {
    PANTILE_WGMMA_E4M3_RS("+r", 128, 64, "f16", 32, 33, 34, 35, 36, 37);
  }
}

template <bool kWrite>
PANTILE_DEVICE void wgmma_e4m3_f16_ss(std::uint32_t (&d)[32], std::uint64_t a, std::uint64_t b) {
  constexpr int accumulate = kWrite ? 0 : 1;
  if constexpr (kWrite) {
    PANTILE_WGMMA_E4M3_SS("=r", 128, 64, "f16", 32, 33, 34);
  } else {
    PANTILE_WGMMA_E4M3_SS("+r", 128, 64, "f16", 32, 33, 34);
  }
}

#undef PANTILE_WGMMA_E4M3_RS
#undef PANTILE_WGMMA_E4M3_SS

}  // namespace pantile::prim
