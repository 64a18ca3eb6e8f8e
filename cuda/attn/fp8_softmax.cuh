// Softmax of the FP8 forwards on scores that lie as pairs of fp16 in the accumulators of Q K^T. A
// warp has 16 rows and kTiles tiles of 8 keys; register 2 j + i of a thread holds two keys of tile
// j in its row i, of two rows 8 apart (the layout of wgmma and of mma.sync):
//
//   S2 = block S                     scores in units of log2; `block` holds all scales
//   P  = 2^(S2 + c)                  c = 8 - the row's maximum, so that the largest P is 2^8
//
// `scale` is block times kSlope, of both rows as a pair of fp16 numbers: what S is multiplied with.
//
// P becomes e4m3 codes in one of two ways, chosen for each register of P:
// * code: an e4m3 code is 8 exponent + mantissa, a piecewise linear log2, so that
//     code = 8 S2 + 8 c + 56 - 0.46
//   rounded and clamped at 0. Two FMA and a byte permutation for two numbers, no MUFU; the map's
//   own error is at most 3 %. Adding 1024 to an fp16 number leaves it rounded in the low bits.
// * exp2: the hardware's exponential and conversion.
//
// The row maximum is stale: c moves only when some row of the warp would gain more than 2^0.5. Each
// lane sees that in its own keys; only then do lanes exchange their maxima. No other branch stands
// between the scores and P: each would cost more than the instructions around it.
#pragma once

#include <cstdint>

#include "attn/fp8_exp.h"
#include "prim/e4m3.cuh"
#include "prim/half2.cuh"
#include "prim/math.cuh"
#include "prim/warp.cuh"

namespace pantile::attn {

template <Fp8Exp kExp, int kTiles>
class Fp8Softmax {
 public:
  static constexpr int kSteps = kTiles / 4;  // of 32 keys, of P V
  using Scores = std::uint32_t[2 * kTiles];
  using Weights = std::uint32_t[kSteps][4];
  static constexpr unsigned kGroups = fp8_code_groups(kExp);
  // S is scaled to codes, of which there are 8 to a unit of log2, where there is nothing else.
  static constexpr float kSlope = kGroups == 0xff ? 8.0f : 1.0f;
  // Scores are clamped to this many units of log2 in blocks whose scales allow for more: what is
  // further out saturates and never becomes an fp16 infinity.
  static constexpr float kLimit = 7160.0f;

  // Of the last step: what all that came before must be multiplied with, 2^-(what c fell).
  float alpha[2];
  bool raised;  // some row's is not 1

  // Above any other and finite: 65504, or 7168 where 8 c must be finite too.
  PANTILE_DEVICE void begin_tile() {
    c_ = prim::twice(kGroups == 0xff || kGroups == 0 ? 0x7bff : 0x6f00);
  }

  // What P's exponent is less than S2, of row i: P = 2^(S2 + offset).
  PANTILE_DEVICE float offset(int i) const {
    const float c = i == 0 ? prim::low_float(c_) : prim::high_float(c_);
    return kGroups == 0xff ? (c - kCodeBias) * 0.125f : c;
  }

  // q: kSlope times all scales but K's. Never 0, so that a masked score, -inf, stays -inf: the
  // smallest fp16 number is added, which no score of a size that matters notices.
  static PANTILE_DEVICE std::uint32_t scale(const float (&q)[2], float k) {
    constexpr float kSmallest = 5.9604645e-8f;
    return prim::half_pair(fmaf(q[0], k, kSmallest), fmaf(q[1], k, kSmallest));
  }

  // Keeps scores within the limit. Before masking, which needs infinities. Returns their scale.
  static PANTILE_DEVICE std::uint32_t clamp(Scores& S, const float (&q)[2], float k) {
    constexpr float kLargest = 8188.0f;  // 8 block is an fp16 number
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = fminf(q[i] * k, kLargest * kSlope);
      const float most = fminf(__fdividef(kLimit * kSlope, scale[i]), 65504.0f);
      const std::uint32_t high = prim::half_pair(most, most);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        std::uint32_t& x = S[2 * j + i];
        x = prim::max2_nan(prim::min2_nan(x, high), high ^ prim::twice(0x8000));
      }
    }
    return Fp8Softmax::scale(scale, 1.0f);
  }

  // Scores to what pack() takes.
  template <bool kFirst>
  PANTILE_DEVICE void exponentiate(Scores& S, std::uint32_t scale) {
    raise<kFirst>(prim::fma2(row_max(S), scale ^ prim::twice(0x8000), prim::twice(kTop)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned pick = i == 0 ? 0x1010 : 0x3232;
      const std::uint32_t scale_i = __byte_perm(scale, scale, pick);
      const std::uint32_t c_i = __byte_perm(c_, c_, pick);
      if constexpr (kGroups == 0xff) {
        encode_row(S, i, 0, scale_i, c_i, 0);
      } else if constexpr (kGroups == 0) {
        encode_row(S, i, scale_i, 0, 0, c_i);
      } else {
        constexpr std::uint32_t kEight = prim::twice(0x4800);
        encode_row(S, i, scale_i, prim::fma2(scale_i, kEight, 0),
                   prim::fma2(c_i, kEight, prim::twice(0x52f1)), c_i);
      }
    }
  }

  // To the A operand of P V. The keys of V are stored in the order in which the registers of the
  // accumulator come (core/scaling.h, v_slot), so that no value changes lanes.
  PANTILE_DEVICE static void pack(Weights& P, const Scores& S) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::uint32_t first = S[index(step, r)], second = S[index(step, r) + 2];
        P[step][r] =
            is_code(step, r) ? __byte_perm(first, second, 0x6420) : prim::pack_e4m3(first, second);
      }
    }
  }

 private:
  static constexpr float kCodeBias = 55.53125f;  // 56 - 0.46
  // Where the largest P goes, in units of c: 2^8, of codes 8 * 8 + kCodeBias.
  static constexpr std::uint16_t kTop = kGroups == 0xff ? 0x5779 : 0x4800;

  // First of the two registers of S that register r of k step `step` of P is made of.
  static PANTILE_DEVICE constexpr int index(int step, int r) {
    return 2 * (4 * step + 2 * (r >> 1)) + (r & 1);
  }

  static PANTILE_DEVICE constexpr bool is_code(int step, int r) {
    return (kGroups >> (4 * step + r) % 8 & 1) != 0;
  }

  // {row 0, row 1}, of this lane's keys.
  static PANTILE_DEVICE std::uint32_t row_max(const Scores& S) {
    std::uint32_t most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t even = S[i], odd = S[2 + i];
#pragma unroll
      for (int j = 2; j < kTiles; j += 2) {
        even = prim::max2(even, S[2 * j + i]);
        odd = prim::max2(odd, S[2 * j + 2 + i]);
      }
      most[i] = prim::max2(even, odd);
    }
    return prim::max2(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
  }

  // Over the four lanes that share the rows.
  static PANTILE_DEVICE std::uint32_t least(std::uint32_t x) {
    x = prim::min2(x, __shfl_xor_sync(prim::kAllLanes, x, 1));
    return prim::min2(x, __shfl_xor_sync(prim::kAllLanes, x, 2));
  }

  // 2^-fall in row i.
  static PANTILE_DEVICE float alpha_of(std::uint32_t fall, int i) {
    const float f = i == 0 ? prim::low_float(fall) : prim::high_float(fall);
    return prim::exp2_approx(kGroups == 0xff ? f * -0.125f : -f);
  }

  // Takes over what this step's maxima ask of c, unless it is too little to matter; `wanted` is
  // what this lane's keys ask. c is lowered by more than all roundings that a number of its size
  // has met: a code of more than 126 would be NaN or negative.
  template <bool kFirst>
  PANTILE_DEVICE void raise(std::uint32_t wanted) {
    constexpr std::uint32_t kSlack = prim::twice(kGroups == 0xff ? 0x4400 : 0x3800);  // 0.5 in S2
    // - |wanted| / 1024; in mixed kernels, whose codes have an offset that is rounded again, / 256
    constexpr std::uint32_t kMargin =
        prim::twice(kGroups == 0xff || kGroups == 0 ? 0x9400 : 0x9c00);
    wanted = prim::fma2(wanted & prim::twice(0x7fff), kMargin, wanted);
    if constexpr (kFirst) {
      c_ = prim::min2(least(wanted), c_);
      return;
    }
    // Most steps raise nothing, which each lane can tell from its own keys.
    const std::uint32_t own_fall = prim::subtract2(c_, prim::min2(wanted, c_));
    raised = prim::any(prim::max2(own_fall, kSlack) != kSlack);
    alpha[0] = alpha[1] = 1.0f;
    if (raised) {
      wanted = prim::min2(least(wanted), c_);
      const std::uint32_t fall = prim::subtract2(c_, wanted);
      alpha[0] = alpha_of(fall, 0);
      alpha[1] = alpha_of(fall, 1);
      c_ = wanted;
    }
  }

  static PANTILE_DEVICE void encode_row(Scores& S, int i, std::uint32_t scale,
                                        std::uint32_t code_scale, std::uint32_t code_offset,
                                        std::uint32_t c) {
    constexpr std::uint32_t kRound = prim::twice(0x6400);  // 1024
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = i; r < 4; r += 2) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          std::uint32_t& x = S[index(step, r) + 2 * part];
          x = is_code(step, r) ? prim::add2(prim::fma2_relu(x, code_scale, code_offset), kRound)
                               : prim::exp2_approx2(prim::fma2(x, scale, c));
        }
      }
    }
  }

  // {row 0, row 1}. In units of S2; in kernels of codes only, in codes: 8 S2 + c_ is the code.
  std::uint32_t c_;
};

}  // namespace pantile::attn
