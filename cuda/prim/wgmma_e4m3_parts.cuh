// wgmma on e4m3 operands for short sums that start from zero, as the FP8 backward has them: scores
// of 64 columns in fp16, and parts of 32, 48 or 64 columns in fp32. Layouts, descriptors and the
// adder's precision: wgmma_e4m3.cuh.
//
// kWrite: overwrites D, whose registers are then pure outputs: the old values are dead until the
// product is done.
#pragma once

#include <cstdint>

#include "prim/wgmma_e4m3.cuh"

namespace pantile::prim {

#define PANTILE_E4M3_WRITE "{ .reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
#define PANTILE_E4M3_ADD "{ .reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"

// D (+)= A B in fp16, 64 columns, both operands in shared memory.
template <bool kWrite>
PANTILE_DEVICE void wgmma_e4m3_f16_n64_ss(std::uint32_t (&d)[16], std::uint64_t a,
                                          std::uint64_t b) {
#define PANTILE_E4M3_SCORES \
  "wgmma.mma_async.sync.aligned.m64n64k32.f16.e4m3.e4m3 {" PANTILE_N_32 "}, %16, %17, p, 1, 1; }"
  if constexpr (kWrite) {
    asm volatile(PANTILE_E4M3_WRITE PANTILE_E4M3_SCORES : PANTILE_D_32("=r") : "l"(a), "l"(b));
  } else {
    asm volatile(PANTILE_E4M3_ADD PANTILE_E4M3_SCORES : PANTILE_D_32("+r") : "l"(a), "l"(b));
  }
#undef PANTILE_E4M3_SCORES
}

// D (+)= A B in fp32, kN columns.
template <int kN>
struct E4m3Part;

#define PANTILE_E4M3_PART(n, r0, r1, r2, r3, r4)                                                 \
  template <>                                                                                    \
  struct E4m3Part<n> {                                                                           \
    template <bool kWrite>                                                                       \
    static PANTILE_DEVICE void rs(float (&d)[n / 2], const std::uint32_t (&a)[4],                \
                                  std::uint64_t b) {                                             \
      if constexpr (kWrite) {                                                                    \
        asm volatile(PANTILE_E4M3_WRITE "wgmma.mma_async.sync.aligned.m64n" #n                   \
                                        "k32.f32.e4m3.e4m3 {" PANTILE_N_##n                      \
                     "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", p, 1, 1; }"            \
                     : PANTILE_D_##n("=f")                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
      } else {                                                                                   \
        asm volatile(PANTILE_E4M3_ADD "wgmma.mma_async.sync.aligned.m64n" #n                     \
                                      "k32.f32.e4m3.e4m3 {" PANTILE_N_##n                        \
                     "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", p, 1, 1; }"            \
                     : PANTILE_D_##n("+f")                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
      }                                                                                          \
    }                                                                                            \
    template <bool kWrite>                                                                       \
    static PANTILE_DEVICE void ss(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {         \
      if constexpr (kWrite) {                                                                    \
        asm volatile(PANTILE_E4M3_WRITE "wgmma.mma_async.sync.aligned.m64n" #n                   \
                                        "k32.f32.e4m3.e4m3 {" PANTILE_N_##n "}, %" #r0 ", %" #r1 \
                                                                            ", p, 1, 1; }"       \
                     : PANTILE_D_##n("=f")                                                       \
                     : "l"(a), "l"(b));                                                          \
      } else {                                                                                   \
        asm volatile(PANTILE_E4M3_ADD "wgmma.mma_async.sync.aligned.m64n" #n                     \
                                      "k32.f32.e4m3.e4m3 {" PANTILE_N_##n "}, %" #r0 ", %" #r1   \
                                                                          ", p, 1, 1; }"         \
                     : PANTILE_D_##n("+f")                                                       \
                     : "l"(a), "l"(b));                                                          \
      }                                                                                          \
    }                                                                                            \
  }

PANTILE_E4M3_PART(32, 16, 17, 18, 19, 20);
PANTILE_E4M3_PART(48, 24, 25, 26, 27, 28);
PANTILE_E4M3_PART(64, 32, 33, 34, 35, 36);

#undef PANTILE_E4M3_PART
#undef PANTILE_E4M3_WRITE
#undef PANTILE_E4M3_ADD

}  // namespace pantile::prim
