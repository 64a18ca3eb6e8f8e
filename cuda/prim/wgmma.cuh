// wgmma: one warpgroup multiplies a 64 x 16 tile A by a 16 x N tile B into 64 x N fp32
// accumulators, asynchronously. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Accumulators: thread t of the warpgroup, warp w = t / 32, lane l = t % 32, holds
//   d[4 j + 2 i + c] = D[16 w + l / 4 + 8 i][8 j + 2 (l % 4) + c].
// A from registers: a[r] packs A[16 w + l / 4 + 8 (r % 2)][2 (l % 4) + 8 (r / 2) + {0, 1}], so that
// columns 16 k..16 k + 15 of an accumulator become A by a[r] = pack(d[8 k + 2 r], d[8 k + 2 r +
// 1]).
//
// Protocol: wgmma_fence() before the first product after ordinary code has touched registers that
// the products use; the products; wgmma_commit(); wgmma_wait<n>() leaves at most n batches in
// flight; then pin() the accumulators, so that the compiler keeps their uses behind the wait.
//
// Two things that cost much when done otherwise (both visible in SASS):
// * Descriptors are passed as their low words and completed inside the asm: no 64-bit additions,
//   and with prim::uniform() on the stage offsets no R2UR in the loop.
// * The first product of a fresh accumulator uses the *_write form, whose accumulators are pure
//   outputs: the old values are dead, which frees N / 2 registers until then.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/address.cuh"

namespace pantile::prim {

// Which axis of an operand tile is contiguous in shared memory: k (rows of A, columns of B along
// the sum) or the other one. Only 16-bit types have the choice.
enum class Major : int { k = 0, mn = 1 };

// High word of the descriptors used here: 128-byte swizzle, 1024 bytes between groups of 8 rows.
inline constexpr std::uint32_t kSwizzle128High = 0x40000040u;

// Low word of a matrix descriptor: the tile's address, a multiple of 1024 (plus a step along k),
// and the distance between 64-element panels for mn-major operands (ignored when k-major). Steps:
// k-major +32 bytes per 16 elements of k, then the next 128-byte panel; mn-major +2048.
PANTILE_DEVICE std::uint32_t descriptor(std::uint32_t shared_address, int panel_bytes = 16) {
  return ((shared_address & 0x3ffff) >> 4) | (static_cast<std::uint32_t>(panel_bytes >> 4) << 16);
}

// Byte offsets are added to a descriptor in its units.
PANTILE_DEVICE constexpr std::uint32_t descriptor_step(int bytes) {
  return static_cast<std::uint32_t>(bytes) >> 4;
}

PANTILE_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PANTILE_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
PANTILE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

namespace detail {

// An asm statement must list each accumulator by name and by number; the macros below spell both
// lists once for every N. PANTILE_D_8(c) is c(d[0]), ..., c(d[3]); each line adds four more.
#define PANTILE_D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define PANTILE_D_8(c) PANTILE_D4(c, 0)
#define PANTILE_D_16(c) PANTILE_D_8(c), PANTILE_D4(c, 4)
#define PANTILE_D_24(c) PANTILE_D_16(c), PANTILE_D4(c, 8)
#define PANTILE_D_32(c) PANTILE_D_24(c), PANTILE_D4(c, 12)
#define PANTILE_D_40(c) PANTILE_D_32(c), PANTILE_D4(c, 16)
#define PANTILE_D_48(c) PANTILE_D_40(c), PANTILE_D4(c, 20)
#define PANTILE_D_56(c) PANTILE_D_48(c), PANTILE_D4(c, 24)
#define PANTILE_D_64(c) PANTILE_D_56(c), PANTILE_D4(c, 28)
#define PANTILE_D_72(c) PANTILE_D_64(c), PANTILE_D4(c, 32)
#define PANTILE_D_80(c) PANTILE_D_72(c), PANTILE_D4(c, 36)
#define PANTILE_D_88(c) PANTILE_D_80(c), PANTILE_D4(c, 40)
#define PANTILE_D_96(c) PANTILE_D_88(c), PANTILE_D4(c, 44)
#define PANTILE_D_104(c) PANTILE_D_96(c), PANTILE_D4(c, 48)
#define PANTILE_D_112(c) PANTILE_D_104(c), PANTILE_D4(c, 52)
#define PANTILE_D_120(c) PANTILE_D_112(c), PANTILE_D4(c, 56)
#define PANTILE_D_128(c) PANTILE_D_120(c), PANTILE_D4(c, 60)
#define PANTILE_D_136(c) PANTILE_D_128(c), PANTILE_D4(c, 64)
#define PANTILE_D_144(c) PANTILE_D_136(c), PANTILE_D4(c, 68)
#define PANTILE_D_152(c) PANTILE_D_144(c), PANTILE_D4(c, 72)
#define PANTILE_D_160(c) PANTILE_D_152(c), PANTILE_D4(c, 76)
#define PANTILE_D_168(c) PANTILE_D_160(c), PANTILE_D4(c, 80)
#define PANTILE_D_176(c) PANTILE_D_168(c), PANTILE_D4(c, 84)
#define PANTILE_D_184(c) PANTILE_D_176(c), PANTILE_D4(c, 88)
#define PANTILE_D_192(c) PANTILE_D_184(c), PANTILE_D4(c, 92)
#define PANTILE_D_200(c) PANTILE_D_192(c), PANTILE_D4(c, 96)
#define PANTILE_D_208(c) PANTILE_D_200(c), PANTILE_D4(c, 100)
#define PANTILE_D_216(c) PANTILE_D_208(c), PANTILE_D4(c, 104)
#define PANTILE_D_224(c) PANTILE_D_216(c), PANTILE_D4(c, 108)
#define PANTILE_D_232(c) PANTILE_D_224(c), PANTILE_D4(c, 112)
#define PANTILE_D_240(c) PANTILE_D_232(c), PANTILE_D4(c, 116)
#define PANTILE_D_248(c) PANTILE_D_240(c), PANTILE_D4(c, 120)
#define PANTILE_D_256(c) PANTILE_D_248(c), PANTILE_D4(c, 124)
#define PANTILE_N_8 "%0,%1,%2,%3"
#define PANTILE_N_16 PANTILE_N_8 ",%4,%5,%6,%7"
#define PANTILE_N_24 PANTILE_N_16 ",%8,%9,%10,%11"
#define PANTILE_N_32 PANTILE_N_24 ",%12,%13,%14,%15"
#define PANTILE_N_40 PANTILE_N_32 ",%16,%17,%18,%19"
#define PANTILE_N_48 PANTILE_N_40 ",%20,%21,%22,%23"
#define PANTILE_N_56 PANTILE_N_48 ",%24,%25,%26,%27"
#define PANTILE_N_64 PANTILE_N_56 ",%28,%29,%30,%31"
#define PANTILE_N_72 PANTILE_N_64 ",%32,%33,%34,%35"
#define PANTILE_N_80 PANTILE_N_72 ",%36,%37,%38,%39"
#define PANTILE_N_88 PANTILE_N_80 ",%40,%41,%42,%43"
#define PANTILE_N_96 PANTILE_N_88 ",%44,%45,%46,%47"
#define PANTILE_N_104 PANTILE_N_96 ",%48,%49,%50,%51"
#define PANTILE_N_112 PANTILE_N_104 ",%52,%53,%54,%55"
#define PANTILE_N_120 PANTILE_N_112 ",%56,%57,%58,%59"
#define PANTILE_N_128 PANTILE_N_120 ",%60,%61,%62,%63"
#define PANTILE_N_136 PANTILE_N_128 ",%64,%65,%66,%67"
#define PANTILE_N_144 PANTILE_N_136 ",%68,%69,%70,%71"
#define PANTILE_N_152 PANTILE_N_144 ",%72,%73,%74,%75"
#define PANTILE_N_160 PANTILE_N_152 ",%76,%77,%78,%79"
#define PANTILE_N_168 PANTILE_N_160 ",%80,%81,%82,%83"
#define PANTILE_N_176 PANTILE_N_168 ",%84,%85,%86,%87"
#define PANTILE_N_184 PANTILE_N_176 ",%88,%89,%90,%91"
#define PANTILE_N_192 PANTILE_N_184 ",%92,%93,%94,%95"
#define PANTILE_N_200 PANTILE_N_192 ",%96,%97,%98,%99"
#define PANTILE_N_208 PANTILE_N_200 ",%100,%101,%102,%103"
#define PANTILE_N_216 PANTILE_N_208 ",%104,%105,%106,%107"
#define PANTILE_N_224 PANTILE_N_216 ",%108,%109,%110,%111"
#define PANTILE_N_232 PANTILE_N_224 ",%112,%113,%114,%115"
#define PANTILE_N_240 PANTILE_N_232 ",%116,%117,%118,%119"
#define PANTILE_N_248 PANTILE_N_240 ",%120,%121,%122,%123"
#define PANTILE_N_256 PANTILE_N_248 ",%124,%125,%126,%127"

// d: the accumulators' constraint. r0, r1, ...: the numbers of the operands behind them.
#define PANTILE_WGMMA_SS(d, n, type, r0, r1, r2, r3, r4)                                 \
  asm volatile(                                                                          \
      "{ .reg .pred p; .reg .b64 a, b;\n"                                                \
      "mov.b64 a, {%" #r0                                                                \
      ", 0x40000040};\n"                                                                 \
      "mov.b64 b, {%" #r1                                                                \
      ", 0x40000040};\n"                                                                 \
      "setp.ne.b32 p, %" #r2                                                             \
      ", 0;\n"                                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" PANTILE_N_##n \
      "}, a, b, p, 1, 1, %" #r3 ", %" #r4 "; }"                                          \
      : PANTILE_D_##n(d)                                                                 \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kMajorA), "n"(kMajorB))

#define PANTILE_WGMMA_RS(d, n, type, r0, r1, r2, r3, r4, r5, r6)                         \
  asm volatile(                                                                          \
      "{ .reg .pred p; .reg .b64 b;\n"                                                   \
      "mov.b64 b, {%" #r4                                                                \
      ", 0x40000040};\n"                                                                 \
      "setp.ne.b32 p, %" #r5                                                             \
      ", 0;\n"                                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" PANTILE_N_##n \
      "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, b, p, 1, 1, %" #r6 "; }"                \
      : PANTILE_D_##n(d)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kMajorB))

template <int kN>
struct WgmmaShape;

#define PANTILE_WGMMA_SHAPE(n, r0, r1, r2, r3, r4, r5, r6)                                         \
  template <>                                                                                      \
  struct WgmmaShape<n> {                                                                           \
    static_assert(r0 == n / 2 && r1 == r0 + 1 && r2 == r1 + 1 && r3 == r2 + 1);                    \
    static_assert(r4 == r3 + 1 && r5 == r4 + 1 && r6 == r5 + 1);                                   \
    template <DType kDType, bool kWrite, int kMajorA, int kMajorB>                                 \
    static PANTILE_DEVICE void ss(float (&d)[n / 2], std::uint32_t a, std::uint32_t b,             \
                                  int accumulate) {                                                \
      if constexpr (kDType == DType::bf16 && kWrite) {                                             \
        PANTILE_WGMMA_SS("=f", n, "bf16", r0, r1, r2, r3, r4);                                     \
      } else if constexpr (kDType == DType::bf16) {                                                \
        PANTILE_WGMMA_SS("+f", n, "bf16", r0, r1, r2, r3, r4);                                     \
      } else if constexpr (kWrite) {                                                               \
        PANTILE_WGMMA_SS("=f", n, "f16", r0, r1, r2, r3, r4);                                      \
      } else {                                                                                     \
        PANTILE_WGMMA_SS("+f", n, "f16", r0, r1, r2, r3, r4);                                      \
      }                                                                                            \
    }                                                                                              \
    template <DType kDType, bool kWrite, int kMajorB>                                              \
    static PANTILE_DEVICE void rs(float (&d)[n / 2], const std::uint32_t (&a)[4], std::uint32_t b, \
                                  int accumulate) {                                                \
      if constexpr (kDType == DType::bf16 && kWrite) {                                             \
        PANTILE_WGMMA_RS("=f", n, "bf16", r0, r1, r2, r3, r4, r5, r6);                             \
      } else if constexpr (kDType == DType::bf16) {                                                \
        PANTILE_WGMMA_RS("+f", n, "bf16", r0, r1, r2, r3, r4, r5, r6);                             \
      } else if constexpr (kWrite) {                                                               \
        PANTILE_WGMMA_RS("=f", n, "f16", r0, r1, r2, r3, r4, r5, r6);                              \
      } else {                                                                                     \
        PANTILE_WGMMA_RS("+f", n, "f16", r0, r1, r2, r3, r4, r5, r6);                              \
      }                                                                                            \
    }                                                                                              \
  }

PANTILE_WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10);
PANTILE_WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14);
PANTILE_WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18);
PANTILE_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22);
PANTILE_WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26);
PANTILE_WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30);
PANTILE_WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34);
PANTILE_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38);
PANTILE_WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42);
PANTILE_WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46);
PANTILE_WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50);
PANTILE_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54);
PANTILE_WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58);
PANTILE_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62);
PANTILE_WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66);
PANTILE_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70);
PANTILE_WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74);
PANTILE_WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78);
PANTILE_WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82);
PANTILE_WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86);
PANTILE_WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90);
PANTILE_WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94);
PANTILE_WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98);
PANTILE_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102);
PANTILE_WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106);
PANTILE_WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110);
PANTILE_WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114);
PANTILE_WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118);
PANTILE_WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122);
PANTILE_WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126);
PANTILE_WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130);
PANTILE_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134);

#undef PANTILE_WGMMA_SHAPE
#undef PANTILE_WGMMA_RS
#undef PANTILE_WGMMA_SS

}  // namespace detail

// D (+)= A B with both operands in shared memory; N is twice the number of accumulators. D is
// added to when `accumulate` is not 0.
template <DType kDType, Major kMajorA, Major kMajorB, int kCount>
PANTILE_DEVICE void wgmma_ss(float (&d)[kCount], std::uint32_t a, std::uint32_t b,
                             int accumulate = 1) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  detail::WgmmaShape<2 * kCount>::template ss<kDType, false, static_cast<int>(kMajorA),
                                              static_cast<int>(kMajorB)>(d, a, b, accumulate);
}

// D = A B; the old D is dead.
template <DType kDType, Major kMajorA, Major kMajorB, int kCount>
PANTILE_DEVICE void wgmma_ss_write(float (&d)[kCount], std::uint32_t a, std::uint32_t b) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  detail::WgmmaShape<2 * kCount>::template ss<kDType, true, static_cast<int>(kMajorA),
                                              static_cast<int>(kMajorB)>(d, a, b, 0);
}

// The same with A in registers.
template <DType kDType, Major kMajorB, int kCount>
PANTILE_DEVICE void wgmma_rs(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint32_t b,
                             int accumulate = 1) {
  static_assert(kDType == DType::bf16 || kDType == DType::f16);
  detail::WgmmaShape<2 * kCount>::template rs<kDType, false, static_cast<int>(kMajorB)>(d, a, b,
                                                                                        accumulate);
}

}  // namespace pantile::prim
