// What a variant (pantile/variant.h) changes of plain attention, as a math thread of a forward
// kernel sees it: all of it happens in registers, between the product Q K^T and the product P V. A
// variant is a type. Plain attention is NoVariant, whose hooks vanish.
//
//   begin(params, place)  once a tile of rows: what depends on the head and the thread's two rows
//   load_ahead(key)       once a step: starts copies into kSharedBytes of the warp's for the step
//                         whose keys begin at `key`, after the step before has changed its scores
//   fetch(params, key)    once a step, before the scores are waited for; `key` is the position of
//                         the thread's first column. Loads, random bytes.
//   score(S)              changes the scores, in place
//   logits(unit)          makes exponents of them; an additive variant folds its term in here
//   visible(place)        of one pair, where score() hides some: for rare repairs
//   drop(P)               zeroes the weights that dropout removes, after their sums were taken
//
// Scores count in units of `params.unit` base-2 logits: scale * log2(e) for raw scores, and
// softcap * log2(e) behind Softcap. Masks come after score(), and nothing that the variants read
// lies outside of its tensor. Both<A, B> is A, then B.
#pragma once

#include <cstdint>

#include "attn/dropout.cuh"
#include "attn/expression.cuh"
#include "attn/tile_mask.cuh"
#include "attn/variant_params.h"
#include "core/dropout.h"
#include "core/integer.h"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "prim/math.cuh"
#include "prim/registers.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::attn {

// Where a thread's fragment lies. Rows and keys count from the start of their sequence.
struct FragmentPlace {
  int batch, head;
  int row;                   // of register i = 0; i = 1 is 8 rows below
  int position;              // the key that this row faces: row + keys - rows
  int rows, keys;            // of the sequence
  std::uint32_t shared = 0;  // memory of the warp, as much as the variant asks for
};

// Column of register e of a fragment, counted from the thread's first.
PANTILE_DEVICE constexpr int column_of(int e) {
  return e / 4 * 8 + e % 2;
}

// Row of it, in units of 8 rows.
PANTILE_DEVICE constexpr int row_of(int e) {
  return e / 2 % 2;
}

// ---- exponents

// Scores are proportional to logits: an exponent is one multiply-add.
struct ScaledLogits {
  // Whether 2^x of element e is computed without the special-function unit.
  static PANTILE_DEVICE constexpr bool by_polynomial(int) { return false; }

  float unit;
  PANTILE_DEVICE float exponent(float score, int, float shift) const {
    return fmaf(score, unit, -shift);
  }
  // What maxima are taken of, and the shift of a maximum.
  PANTILE_DEVICE float comparable(float score, int) const { return score; }
  PANTILE_DEVICE float shift_of(float most) const { return most * unit; }
};

// Of scores that the special-function unit has made: it does not make all of the exponentials.
struct CappedLogits : ScaledLogits {
  static PANTILE_DEVICE constexpr bool by_polynomial(int e) { return e % 16 >= 14; }
};

// A term linear in the column is added: two multiply-adds.
struct SlopedLogits {
  static PANTILE_DEVICE constexpr bool by_polynomial(int) { return false; }

  float unit, slope;  // base-2 logits a column
  float base[2];      // of the thread's first column, a row
  PANTILE_DEVICE float exponent(float score, int e, float shift) const {
    return fmaf(score, unit, term(e, base[row_of(e)] - shift));
  }
  PANTILE_DEVICE float comparable(float score, int e) const {
    return fmaf(score, unit, term(e, base[row_of(e)]));
  }
  PANTILE_DEVICE float shift_of(float most) const { return most; }

 private:
  PANTILE_DEVICE float term(int e, float first) const {
    return fmaf(slope, static_cast<float>(column_of(e)), first);
  }
};

// ---- variants

struct NoVariant {
  static constexpr bool kAny = false;    // some hook is not empty
  static constexpr bool kAdds = false;   // logits() are sloped
  static constexpr bool kDrops = false;  // drop()
  static constexpr bool kMasks = false;  // score() hides pairs, and visible() says which
  static constexpr int kSharedBytes = 0;

  PANTILE_DEVICE void load_ahead(int) const {}
  PANTILE_DEVICE void begin(const VariantParams&, const FragmentPlace&) {}
  PANTILE_DEVICE void fetch(const VariantParams&, int) {}
  template <int kCount>
  PANTILE_DEVICE void score(float (&)[kCount]) const {}
  PANTILE_DEVICE ScaledLogits logits(float unit) const { return ScaledLogits{unit}; }
  template <int kSteps>
  PANTILE_DEVICE void drop(std::uint32_t (&)[kSteps][4]) const {}
};

struct SomeVariant : NoVariant {
  static constexpr bool kAny = true;
};

// tanh(S), in units of the cap. One MUFU: relative error 2^-11, below that of scores that bf16
// holds. kExact: absolute error 2^-22, two MUFU, for f16.
template <bool kExact>
PANTILE_DEVICE float capped(float score, float cap_inner) {
  float result;
  if constexpr (kExact) {
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(result)
        : "f"(1.0f + prim::exp2_approx(score * cap_inner)));
    return fmaf(result, -2.0f, 1.0f);
  } else {
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(score * cap_inner));
    return result;
  }
}

// cap_inner: scale / cap, or if exact 2 log2(e) scale / cap.
template <bool kExact>
struct Softcap : SomeVariant {
  float cap_inner;

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace&) {
    cap_inner = p.cap_inner;
  }
  PANTILE_DEVICE CappedLogits logits(float unit) const { return CappedLogits{{unit}}; }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      S[e] = capped<kExact>(S[e], cap_inner);
    }
  }
};

// -slope * |position - key|. Up to a row's position that is linear in the key, and behind it linear
// with the other sign. A step whose keys lie on both sides takes the first line and, in score(),
// the difference to the second from the scores behind: a branch that few steps take, instead of an
// absolute value in all of them. kBehind: some row may see keys behind its position.
template <bool kBehind, int kTileK>
struct Alibi : SomeVariant {
  static constexpr bool kAdds = true;
  float slope;  // base-2 logits a key, towards the position
  float first;  // minus the position of row i = 0
  float sign;   // of the step's line
  float distance;
  float per_unit;  // 2 / unit

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    slope = p.alibi_slopes[at.batch * p.alibi_batch + at.head] * core::kLog2E;
    first = static_cast<float>(-at.position);
    sign = 1.0f;
    if constexpr (kBehind) {
      per_unit = 2.0f / p.unit;
    }
  }
  PANTILE_DEVICE void fetch(const VariantParams&, int key) {
    distance = first + static_cast<float>(key);
    if constexpr (kBehind) {
      // All of the thread's keys lie behind both of its rows.
      sign = distance > 8.0f ? -1.0f : 1.0f;
    }
  }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
    if constexpr (kBehind) {
      const bool mixed = sign > 0.0f && distance + static_cast<float>(kTileK) > 0.0f;
      if (prim::any(mixed)) {
        const float correction = sign > 0.0f ? -slope * per_unit : 0.0f;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          const float behind = distance + static_cast<float>(column_of(e) - 8 * row_of(e));
          S[e] = fmaf(correction, fmaxf(behind, 0.0f), S[e]);
        }
      }
    }
  }
  PANTILE_DEVICE SlopedLogits logits(float unit) const {
    const float signed_slope = kBehind ? slope * sign : slope;
    const float base = signed_slope * distance;
    return SlopedLogits{unit, signed_slope, {base, fmaf(-8.0f, signed_slope, base)}};
  }
};

// bias[batch, head, row, key], fp32 or 16 bits. kPairs: rows and sequences begin at even elements
// of a tensor that is aligned for pairs, and have an even number of keys at most.
template <DType kDType, bool kPairs, int kTileK>
struct Bias : SomeVariant {
  static constexpr int kGroups = kTileK / 8;
  static constexpr int kElementBytes = kDType == DType::f32 ? 4 : 2;
  static constexpr int kWords = kElementBytes / 2;  // of a pair

  const unsigned char* row[2];
  int keys;
  float factor;
  std::uint32_t pair[2][kGroups][kWords];

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    const std::int64_t first = at.batch * p.bias_batch + at.head * p.bias_head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows past the end are not stored: any row does
      const int bounded = core::min_of(at.row + 8 * i, at.rows - 1);
      row[i] = static_cast<const unsigned char*>(p.bias) +
               (first + bounded * p.bias_query) * kElementBytes;
    }
    keys = at.keys;
    factor = p.bias_factor;
  }
  PANTILE_DEVICE void fetch(const VariantParams&, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        load(pair[i][j], row[i] + std::int64_t{key} * kElementBytes + 8 * j * kElementBytes,
             keys - key - 8 * j);
      }
    }
  }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      float2 values;
      const std::uint32_t (&words)[kWords] = pair[row_of(e)][e / 4];
      if constexpr (kDType == DType::f32) {
        values = make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
      } else {
        values = prim::unpack<kDType>(words[0]);
      }
      S[e] = fmaf(values.x, factor, S[e]);
      S[e + 1] = fmaf(values.y, factor, S[e + 1]);
    }
  }

 private:
  // Two neighbours, or what exists of them: `left` keys from here on.
  static PANTILE_DEVICE void load(std::uint32_t (&words)[kWords], const unsigned char* from,
                                  int left) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = 0;
    }
    if constexpr (kPairs && kWords == 2) {
      if (left > 0) {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
        words[0] = both.x, words[1] = both.y;
      }
    } else if constexpr (kPairs) {
      if (left > 0) {
        words[0] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
      }
    } else if constexpr (kWords == 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (left > i) {
          words[i] = __ldg(reinterpret_cast<const std::uint32_t*>(from) + i);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (left > i) {
          const std::uint32_t element = __ldg(reinterpret_cast<const std::uint16_t*>(from) + i);
          words[0] |= element << (16 * i);
        }
      }
    }
  }
};

template <int kTileK>
struct Dropout : SomeVariant {
  static constexpr bool kDrops = true;
  static constexpr int kSteps = kTileK / 16;  // of the product with V
  static_assert(kSteps % 2 == 0);

  DropoutStream stream;
  std::uint32_t row_cell;         // counter word 1
  bool odd;                       // the thread's rows are
  std::uint32_t keep[kSteps][2];  // of even and of odd keys

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    stream.start(p.dropout_seed, p.dropout_add, p.head_offset + static_cast<std::uint32_t>(at.head),
                 p.batch_offset + static_cast<std::uint32_t>(at.batch));
    const std::uint32_t row = p.row_offset + static_cast<std::uint32_t>(at.row);
    row_cell = core::dropout_cell(0, 0, row, 0).word[1];
    odd = (row & 1u) != 0;
  }
  PANTILE_DEVICE void fetch(const VariantParams& p, int key) {
    core::PhiloxWords cell = core::dropout_cell(stream.batch, stream.head, 0,
                                                p.key_offset + static_cast<std::uint32_t>(key));
    cell.word[1] = row_cell;
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      const CellPair cells = stream.pair<0, 2>(cell, 4, odd);
      keep[k][0] = cells.first[0], keep[k][1] = cells.first[1];
      keep[k + 1][0] = cells.second[0], keep[k + 1][1] = cells.second[1];
      cell.word[0] += 8;
    }
    prim::pin(keep);  // here, where the product Q K^T runs
  }
  // P[k]: keys 16 k on, (row, key), (row + 8, key), (row, key + 8), (row + 8, key + 8).
  PANTILE_DEVICE void drop(std::uint32_t (&P)[kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      P[k][0] &= kept_halves<0>(keep[k][0], keep[k][1]);
      P[k][2] &= kept_halves<1>(keep[k][0], keep[k][1]);
      P[k][1] &= kept_halves<2>(keep[k][0], keep[k][1]);
      P[k][3] &= kept_halves<3>(keep[k][0], keep[k][1]);
    }
  }
};

// A mask of tensors (attn/tile_mask.cuh) that is asked in every step. Tiles that it shows, or
// hides, as a whole are found without asking about pairs, if one thread can say that.
template <class Mask>
struct MaskedPairs : SomeVariant {
  static constexpr bool kMasks = true;

  const MaskParams* mask;
  MaskPlace place;
  int row, column;

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    mask = &p.mask;
    place = MaskPlace{at.batch, at.head, at.rows, at.keys, at.position - at.row};
    row = at.row;
  }
  PANTILE_DEVICE void fetch(const VariantParams&, int key) { column = key; }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
    constexpr int kGroups = kCount / 4;
    const int first_row = row - prim::lane_index() / 4;
    const int first_key = column - prim::lane_index() % 4 * 2;
    const core::Span rows{first_row, core::min_of(first_row + 16, place.rows)};
    const core::Span keys{first_key, core::min_of(first_key + 8 * kGroups, place.keys)};
    if (rows.begin >= rows.end || keys.begin >= keys.end) {
      return;  // hidden by the ends of the sequence
    }
    const std::uint32_t seen = Mask::see(*mask, place, rows, keys);
    const Sight sight = Mask::sight(*mask, seen);
    if (sight == Sight::all) {
      return;
    }
    std::uint32_t shown[2] = {0, 0};
    if (sight == Sight::some) {
      Mask::template fragment<false, kGroups>(*mask, place, row, column, shown);
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if ((shown[row_of(e)] >> (e / 4 * 2 + e % 2) & 1u) == 0) {
        S[e] = -core::kInfinity;
      }
    }
  }
};

// A, then B. At most one of them adds.
template <class A, class B>
struct Both : SomeVariant {
  static constexpr bool kAdds = A::kAdds || B::kAdds;
  static constexpr bool kDrops = A::kDrops || B::kDrops;
  static constexpr bool kMasks = A::kMasks || B::kMasks;
  static_assert(!(A::kAdds && B::kAdds));

  static constexpr int kSharedBytes = A::kSharedBytes + B::kSharedBytes;  // one of them has some

  A a;
  B b;

  PANTILE_DEVICE void load_ahead(int key) const {
    a.load_ahead(key);
    b.load_ahead(key);
  }
  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    a.begin(p, at);
    b.begin(p, at);
  }
  PANTILE_DEVICE void fetch(const VariantParams& p, int key) {
    a.fetch(p, key);
    b.fetch(p, key);
  }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
    a.score(S);
    b.score(S);
  }
  PANTILE_DEVICE auto logits(float unit) const {
    if constexpr (A::kAdds) {
      return a.logits(unit);
    } else if constexpr (B::kAdds) {
      return b.logits(unit);
    } else {
      return a.logits(unit);
    }
  }
  template <int kSteps>
  PANTILE_DEVICE void drop(std::uint32_t (&P)[kSteps][4]) const {
    a.drop(P);
    b.drop(P);
  }
  static PANTILE_DEVICE bool visible(const VariantParams& p, int batch, int head, int row,
                                     int key) {
    if constexpr (A::kMasks && B::kMasks) {
      return A::visible(p, batch, head, row, key) && B::visible(p, batch, head, row, key);
    } else if constexpr (A::kMasks) {
      return A::visible(p, batch, head, row, key);
    } else {
      return B::visible(p, batch, head, row, key);
    }
  }
};

}  // namespace pantile::attn
