// Element types in memory, read and written as vectors of floats.
#pragma once

#include "core/low_bits.h"
#include "cpu/isa/simd.h"
#include "pantile/dtype.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

PANTILE_INLINE Words widen(Halves x) {
  return __builtin_convertvector(x, Words);
}
PANTILE_INLINE Halves narrow(Words x) {
  return __builtin_convertvector(x, Halves);
}

struct F32 {
  using Raw = float;
  static PANTILE_INLINE Floats read(const Raw* from) { return load(from); }
  static PANTILE_INLINE void write(Raw* to, Floats x) { store(to, x); }
};

struct BF16 {
  using Raw = std::uint16_t;
  static constexpr int kLowShift = core::kLowShiftBf16;
  static PANTILE_INLINE Floats read(const Raw* from) { return from_bits(widen(load(from)) << 16); }

  // Round to nearest, ties to even. The carry of rounding may reach the exponent, which is right
  // for every number; NaN keeps its upper half and is made quiet.
  static PANTILE_INLINE void write(Raw* to, Floats x) {
    const Words rounded = (bits(x) + 0x7fff + ((bits(x) >> 16) & 1)) >> 16;
    const Words quiet = (bits(x) >> 16) | 0x40;
    store(to, narrow(x == x ? rounded : quiet));
  }
};

struct F16 {
  using Raw = std::uint16_t;
  static constexpr int kLowShift = core::kLowShiftF16;

#if defined(__AVX512F__)
  // The forms with a mask: GCC 12 warns of an uninitialised value inside the others.
  static constexpr __mmask16 kAllLanes = 0xffff;
  static PANTILE_INLINE Floats read(const Raw* from) {
    return reinterpret_cast<Floats>(
        _mm512_maskz_cvtph_ps(kAllLanes, reinterpret_cast<__m256i>(load(from))));
  }
  static PANTILE_INLINE void write(Raw* to, Floats x) {
    store(to, reinterpret_cast<Halves>(_mm512_maskz_cvtps_ph(kAllLanes, reinterpret_cast<__m512>(x),
                                                             _MM_FROUND_TO_NEAREST_INT)));
  }
#elif defined(__F16C__)
  static PANTILE_INLINE Floats read(const Raw* from) {
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(load(from))));
  }
  static PANTILE_INLINE void write(Raw* to, Floats x) {
    store(to, reinterpret_cast<Halves>(
                  _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT)));
  }
#else
  // Moves exponent and mantissa into place and corrects the bias with a multiplication, which also
  // normalises subnormals. Infinity and NaN get the largest exponent.
  static PANTILE_INLINE Floats read(const Raw* from) {
    const Words half = widen(load(from));
    const Words magnitude = (half & 0x7fff) << 13;
    const Floats value = from_bits(magnitude) * splat(0x1p112f);
    const Words special = magnitude | 0x7f800000;
    const Words sign = (half & 0x8000) << 16;
    return from_bits((magnitude >= (0x7c00u << 13) ? special : bits(value)) | sign);
  }

  // Numbers that stay normal are rounded in integers. For subnormals, adding 0.5 puts the last bit
  // of a half at the last bit of the sum, so that the addition rounds.
  static PANTILE_INLINE void write(Raw* to, Floats x) {
    const Words sign = (bits(x) >> 16) & 0x8000;
    const Words magnitude = bits(x) & 0x7fffffff;
    const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Words subnormal = bits(from_bits(magnitude) + splat(0.5f)) - 0x3f000000;
    const Words nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    Words half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? Words{} + 0x7c00 : half;  // 65520 and more round to infinity
    half = magnitude > 0x7f800000u ? nan : half;
    store(to, narrow(half | sign));
  }
#endif
};

// The first `count` < kLanes elements; the other lanes are 0. Nothing past them is touched.
template <class Element>
PANTILE_INLINE Floats read_some(const typename Element::Raw* from, int count) {
  typename Element::Raw lanes[kLanes] = {};
  __builtin_memcpy(lanes, from, static_cast<std::size_t>(count) * sizeof *lanes);
  return Element::read(lanes);
}

template <class Element>
PANTILE_INLINE void write_some(typename Element::Raw* to, Floats x, int count) {
  typename Element::Raw lanes[kLanes];
  Element::write(lanes, x);
  __builtin_memcpy(to, lanes, static_cast<std::size_t>(count) * sizeof *lanes);
}

// The vector of elements [at, at + kLanes) of a row of `length` elements, 0 past its end.
template <class Element>
PANTILE_INLINE Floats read_row(const typename Element::Raw* row, int at, int length) {
  if (at + kLanes <= length) {
    return Element::read(row + at);
  }
  return at < length ? read_some<Element>(row + at, length - at) : Floats{};
}

template <class Element>
PANTILE_INLINE void write_row(typename Element::Raw* row, int at, int length, Floats x) {
  if (at + kLanes <= length) {
    Element::write(row + at, x);
  } else {
    write_some<Element>(row + at, x, length - at);
  }
}

// ---- low bits of O (core/low_bits.h), an int8 beside each element

struct I8 {
  using Raw = std::int8_t;
};

// Those of a row of f32 numbers, of which `row` holds the rounded ones; `at` as in write_row.
template <class Element>
PANTILE_INLINE void write_low_row(std::int8_t* low, const typename Element::Raw* row, int at,
                                  int length, Floats exact) {
  float from[kLanes];
  float to[kLanes];
  std::int8_t lanes[kLanes];
  store(from, exact);
  store(to, read_row<Element>(row, at, length));
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = core::low_bits<Element::kLowShift>(from[lane], to[lane]);
  }
  __builtin_memcpy(low + at, lanes, static_cast<std::size_t>(core::min_of(kLanes, length - at)));
}

// read_row with the low bits.
template <class Element>
PANTILE_INLINE Floats read_row_with_low(const typename Element::Raw* row, const std::int8_t* low,
                                        int at, int length) {
  float x[kLanes];
  std::int8_t lanes[kLanes] = {};
  store(x, read_row<Element>(row, at, length));
  __builtin_memcpy(lanes, low + at, static_cast<std::size_t>(core::min_of(kLanes, length - at)));
  for (int lane = 0; lane < kLanes; ++lane) {
    x[lane] = core::with_low_bits<Element::kLowShift>(x[lane], lanes[lane]);
  }
  return load(x);
}

// Calls function(Element()) for the type that `dtype` names; never called with e4m3.
template <class Function>
PANTILE_INLINE void with_element(DType dtype, Function function) {
  switch (dtype) {
    case DType::f32: function(F32()); break;
    case DType::f16: function(F16()); break;
    default: function(BF16()); break;
  }
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
