// Operands of PairMath: pairs of bf16 neighbours along the summed axis. See pack.h for what each
// function does; only bf16 tensors come here.
#pragma once

#include "cpu/isa/pack.h"

#if defined(__AVX512BF16__)

namespace pantile::cpu::PANTILE_ISA {
namespace {

// Words of a row from word `at` on; 0 past the row's end.
PANTILE_INLINE Words read_pairs(const std::uint16_t* row, int at, int dim) {
  std::uint32_t words[kLanes] = {};
  const int left = dim - 2 * at;
  __builtin_memcpy(words, row + 2 * at,
                   sizeof(std::uint16_t) * static_cast<unsigned>(core::min_of(2 * kLanes, left)));
  return load(words);
}

inline void pack_rows(PairMath, std::uint32_t* to, const Rows& from, int capacity) {
  const int width = padded(from.dim) / 2;
  for (int i = 0; i < from.count; ++i) {
    std::uint32_t* row = to + i * width;
    __builtin_memset(row, 0, static_cast<unsigned>(width) * sizeof *row);
    __builtin_memcpy(row, from.row<BF16>(i), static_cast<unsigned>(from.dim) * sizeof(BF16::Raw));
  }
  const int end = core::min_of(touched_rows(from.count), capacity);
  __builtin_memset(to + from.count * width, 0,
                   static_cast<unsigned>((end - from.count) * width) * sizeof *to);
}

inline void pack_transposed(PairMath, std::uint32_t* to, int ld, const Rows& from, float) {
  const int depth = core::ceil_div(from.dim, 2);
  for (int i = 0; i < from.count; i += kLanes) {
    for (int w = 0; w < depth; w += kLanes) {
      Floats block[kLanes];
      PANTILE_UNROLL for (int lane = 0; lane < kLanes; ++lane) {
        block[lane] = Floats{};
        if (i + lane < from.count) {
          block[lane] = from_bits(read_pairs(from.row<BF16>(i + lane), w, from.dim));
        }
      }
      transpose(block);
      const int lanes = core::min_of(kLanes, depth - w);
      for (int lane = 0; lane < lanes; ++lane) {
        store(to + (w + lane) * ld + i, bits(block[lane]));
      }
    }
  }
}

// kLanes elements in the low halves of words.
PANTILE_INLINE Words read_halves(const std::uint16_t* row, int at, int dim) {
  if (at + kLanes <= dim) {
    return widen(load(row + at));
  }
  std::uint16_t lanes[kLanes] = {};
  if (at < dim) {
    __builtin_memcpy(lanes, row + at, sizeof *lanes * static_cast<unsigned>(dim - at));
  }
  return widen(load(lanes));
}

inline bool pack_summed(PairMath, std::uint32_t* to, const Rows& from) {
  constexpr std::uint32_t kLow = 0x7f80;  // an exponent of infinity or NaN
  constexpr std::uint32_t kHigh = kLow << 16;
  const int width = padded(from.dim);
  Words dropped{};
  for (int i = 0; i < from.count; i += 2) {
    for (int d = 0; d < width; d += kLanes) {
      Words pair = read_halves(from.row<BF16>(i), d, from.dim);
      if (i + 1 < from.count) {
        pair |= read_halves(from.row<BF16>(i + 1), d, from.dim) << 16;
      }
      const Words low = (pair & kLow) == kLow ? Words{} + 0xffffu : Words{};
      const Words high = (pair & kHigh) == kHigh ? Words{} + 0xffff0000u : Words{};
      dropped |= low | high;
      store(to + i / 2 * width + d, pair & ~(low | high));
    }
  }
  return any(reinterpret_cast<Ints>(dropped));
}

PANTILE_INLINE float half_value(const std::uint32_t* items, std::int64_t item, int half) {
  const std::uint32_t word = half == 0 ? items[item] << 16 : items[item] & 0xffff0000u;
  float value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

template <Walk kWalk>
PANTILE_INLINE float item_value(const Product<PairMath>& p, int i, int k) {
  return half_value(p.a, kWalk == Walk::along_rows ? i * p.lda + k / 2 : k / 2 * p.lda + i, k % 2);
}

PANTILE_INLINE void store_bf16(std::uint16_t* to, Floats x) {
  store(to, reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x))));
}

// bf16 of `first` in the low halves, of `second` in the high halves.
PANTILE_INLINE Words pair_up(Floats first, Floats second) {
  const auto low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(first)));
  const auto high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(second)));
  return widen(reinterpret_cast<Halves>(low)) | (widen(reinterpret_cast<Halves>(high)) << 16);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA

#endif  // __AVX512BF16__
