// One wgmma that adds a per-column term to a 64 x N tile of S or dP before the real product:
//   D[m][n] = hi(n) + mid(n) + lo(n)
// The term of column n is a float cut into three bf16 that lie, with five zeros, in 16 bytes; N of
// these follow each other. As operand B that is k-major without swizzle: core matrices of 8 columns
// x 16 bytes, 128 bytes from one to the next. A is the constant {1, 1, 1, 0, ..., 0} in every row.
//
// Both k halves of B read the same 16 bytes (leading offset 0) and A is zero in the second half.
// So are A's elements 3..7, beside which B may carry any finite bf16.
#pragma once

#include <cstdint>

#include "prim/address.cuh"
#include "prim/wgmma.cuh"

namespace pantile::prim {

inline constexpr std::uint32_t kTermsHigh = 8;  // B: 128 bytes between groups of 8 columns
inline constexpr std::uint32_t kOnesHigh = 0;   // A: all groups of 8 rows are the same 8 rows
inline constexpr int kOnesTileBytes = 256;      // 8 rows x 16 bytes, twice (k halves)

// Low descriptor words.
PANTILE_DEVICE std::uint32_t terms_descriptor(std::uint32_t shared_address) {
  return (shared_address & 0x3ffff) >> 4;
}

PANTILE_DEVICE std::uint32_t ones_descriptor(std::uint32_t shared_address) {
  return ((shared_address & 0x3ffff) >> 4) | (128u >> 4 << 16);
}

// Word `index` (0..63) of the constant A tile in shared memory.
PANTILE_DEVICE std::uint32_t ones_tile_word(int index) {
  if (index >= 32) {
    return 0;
  }
  return index % 4 == 0 ? 0x3f803f80u : index % 4 == 1 ? 0x3f80u : 0u;
}

// The same constant as A fragment in registers, for a thread of lane `lane`; a[2] and a[3], the
// second half of k, are zero.
PANTILE_DEVICE std::uint32_t ones_fragment_word(int lane) {
  return (lane & 3) == 0 ? 0x3f803f80u : (lane & 3) == 1 ? 0x3f80u : 0u;
}

namespace detail {

#define PANTILE_ROW_TERMS(n, r0, r1, r2, r3)                                                    \
  template <>                                                                                   \
  struct RowTerms<n> {                                                                          \
    static PANTILE_DEVICE void ss(float (&d)[n / 2], std::uint32_t ones, std::uint32_t terms) { \
      asm volatile(                                                                             \
          "{ .reg .pred p; .reg .b64 a, b;\n"                                                   \
          "mov.b64 a, {%" #r0                                                                   \
          ", 0};\n"                                                                             \
          "mov.b64 b, {%" #r1                                                                   \
          ", 8};\n"                                                                             \
          "setp.ne.b32 p, 0, 0;\n"                                                              \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" PANTILE_N_##n            \
          "}, a, b, p, 1, 1, 0, 0; }"                                                           \
          : PANTILE_D_##n("=f")                                                                 \
          : "r"(ones), "r"(terms));                                                             \
    }                                                                                           \
    static PANTILE_DEVICE void rs(float (&d)[n / 2], std::uint32_t one, std::uint32_t zero,     \
                                  std::uint32_t terms) {                                        \
      asm volatile(                                                                             \
          "{ .reg .pred p; .reg .b64 b;\n"                                                      \
          "mov.b64 b, {%" #r2                                                                   \
          ", 8};\n"                                                                             \
          "setp.ne.b32 p, 0, 0;\n"                                                              \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" PANTILE_N_##n            \
          "}, {%" #r0 ",%" #r0 ",%" #r1 ",%" #r1 "}, b, p, 1, 1, 0; }"                          \
          : PANTILE_D_##n("=f")                                                                 \
          : "r"(one), "r"(zero), "r"(terms));                                                   \
    }                                                                                           \
  }

template <int kN>
struct RowTerms;

PANTILE_ROW_TERMS(64, 32, 33, 34, 35);
PANTILE_ROW_TERMS(128, 64, 65, 66, 67);

#undef PANTILE_ROW_TERMS

}  // namespace detail

// D = terms, A from the constant tile in shared memory. The old D is dead.
template <int kCount>
PANTILE_DEVICE void wgmma_terms_ss(float (&d)[kCount], std::uint32_t ones, std::uint32_t terms) {
  detail::RowTerms<2 * kCount>::ss(d, ones, terms);
}

// The same with A from registers.
template <int kCount>
PANTILE_DEVICE void wgmma_terms_rs(float (&d)[kCount], std::uint32_t one, std::uint32_t zero,
                                   std::uint32_t terms) {
  detail::RowTerms<2 * kCount>::rs(d, one, zero, terms);
}

}  // namespace pantile::prim
