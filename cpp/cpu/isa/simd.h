// Vectors of the instruction set this file is compiled for, as GNU vector types: one source serves
// every set. Everything here has internal linkage: code compiled for a newer processor must never
// be the copy that the linker keeps for older ones.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(PANTILE_ISA)
#error "compile the kernel sources with -DPANTILE_ISA=<instruction set>"
#endif

#define PANTILE_INLINE inline __attribute__((always_inline))
#define PANTILE_UNROLL _Pragma("GCC unroll 16")

namespace pantile::cpu::PANTILE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

// Values in registers are naturally aligned; memory has its own type. One unaligned type for both
// makes GCC 12 keep accumulators on the stack (nine times slower).
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef float FloatsInMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::uint32_t WordsInMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::uint16_t HalvesInMemory
    __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

PANTILE_INLINE Floats load(const float* from) {
  return *reinterpret_cast<const FloatsInMemory*>(from);
}
PANTILE_INLINE Words load(const std::uint32_t* from) {
  return *reinterpret_cast<const WordsInMemory*>(from);
}
PANTILE_INLINE Halves load(const std::uint16_t* from) {
  return *reinterpret_cast<const HalvesInMemory*>(from);
}
PANTILE_INLINE void store(float* to, Floats value) {
  *reinterpret_cast<FloatsInMemory*>(to) = value;
}
PANTILE_INLINE void store(std::uint32_t* to, Words value) {
  *reinterpret_cast<WordsInMemory*>(to) = value;
}
PANTILE_INLINE void store(std::uint16_t* to, Halves value) {
  *reinterpret_cast<HalvesInMemory*>(to) = value;
}

// x - 0 is x for every x; x + 0 would turn -0 into 0 and cost an addition.
PANTILE_INLINE Floats splat(float x) {
  return x - Floats{};
}

PANTILE_INLINE Words bits(Floats x) {
  return reinterpret_cast<Words>(x);
}
PANTILE_INLINE Floats from_bits(Words x) {
  return reinterpret_cast<Floats>(x);
}

// `count` is rounded up to whole vectors.
PANTILE_INLINE void fill(float* to, int count, float value) {
  for (int i = 0; i < count; i += kLanes) {
    store(to + i, splat(value));
  }
}

// The larger of the two; `second` when either is NaN.
PANTILE_INLINE Floats max_or_second(Floats first, Floats second) {
#if defined(__AVX512F__)
  // The form with a mask: GCC 12 warns of an uninitialised value inside the other.
  return reinterpret_cast<Floats>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(first),
                                                      reinterpret_cast<__m512>(second)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(
      _mm256_max_ps(reinterpret_cast<__m256>(first), reinterpret_cast<__m256>(second)));
#elif defined(__x86_64__)
  return reinterpret_cast<Floats>(
      _mm_max_ps(reinterpret_cast<__m128>(first), reinterpret_cast<__m128>(second)));
#else
  return first > second ? first : second;
#endif
}

PANTILE_INLINE Floats select(Ints condition, Floats yes, Floats no) {
  return condition ? yes : no;
}

// Whether a lane of a comparison's result is set.
PANTILE_INLINE bool any(Ints condition) {
  std::int32_t joined = 0;
  for (int i = 0; i < kLanes; ++i) {
    joined |= condition[i];
  }
  return joined != 0;
}

// 0, 1, 2, ... kLanes - 1.
PANTILE_INLINE Ints lane_numbers() {
  Ints lanes{};
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = i;
  }
  return lanes;
}

// e^x, relative error below 2e-7 (x > -10); exactly 0 below -87.7, NaN for NaN. For x up to 88.
//
// x * log2(e) = n + f with n whole and |f| <= 1/2. Adding `magic` leaves n + 127 in the low bits of
// the sum, which shifted into the exponent are 2^n, and 0 for n = -127. The clamp takes NaN
// through. The polynomial for 2^f is a minimax fit of the relative error (2e-9) with 1 at f = 0.
// Base 2 would need scores in base 2, which are multiples of a rounded log2(e): that costs digits
// when they are large, while here only their distance to the maximum is multiplied.
PANTILE_INLINE Floats exp(Floats x) {
  const Floats log2e = splat(1.4426950408889634f);
  const Floats magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 + exponent bias
  x = max_or_second(splat(-88.0f), x);
  const Floats sum = x * log2e + magic;
  const Floats f = x * log2e - (sum - magic);
  Floats p = splat(1.53533619e-4f);
  p = p * f + splat(1.33988744e-3f);
  p = p * f + splat(9.61843736e-3f);
  p = p * f + splat(5.55033247e-2f);
  p = p * f + splat(2.40226479e-1f);
  p = p * f + splat(6.93147203e-1f);
  p = p * f + splat(1.0f);
  return p * from_bits(bits(sum) << 23);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
