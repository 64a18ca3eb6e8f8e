// Softmax of the Hopper FP8 forward on scores that lie as pairs of fp16 in the accumulators of
// Q K^T (64 x 128 of a warpgroup; a thread holds two rows):
//
//   S2 = block S                     scores in units of log2; `block` holds all scales
//   P  = 2^(S2 + c)                  c = 8 - the row's maximum, so that the largest P is 2^8
//
// P becomes e4m3 codes in one of two ways, chosen for each register of P:
// * code: an e4m3 code is 8 exponent + mantissa, a piecewise linear log2, so that
//     code = 8 (S2 + c) + 56 - 0.46
//   rounded and clamped at 0. Two FMA and a byte permutation for two numbers, no MUFU; the map's
//   own error is at most 3 %. Adding 1024 to an fp16 number leaves it rounded in the low bits.
// * exp2: the hardware's exponential and conversion.
//
// The row maximum is stale: c moves only when some row of the warp would gain more than 2^0.5.
#pragma once

#include <cstdint>

#include "hopper/fp8_config.h"
#include "prim/e4m3.cuh"
#include "prim/half2.cuh"
#include "prim/math.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

// Scores are clamped to this many units of log2 in blocks whose scales allow for more: what is
// further out saturates and never becomes an fp16 infinity.
inline constexpr float kFp8ScoreLimit = 7160.0f;

template <Fp8Exp kExp>
class Fp8Softmax {
 public:
  // Of the last step: how much c fell, {row 0, row 1}. What came before must be multiplied with
  // alpha = 2^-fall.
  std::uint32_t fall;
  bool raised;  // some row's fall is not 0

  PANTILE_DEVICE void begin_tile() {
    c_ = prim::twice(kUnseen);
    far_ = false;
  }

  // c of row i, as a float.
  PANTILE_DEVICE float offset(int i) const {
    return i == 0 ? prim::low_float(c_) : prim::high_float(c_);
  }

  // Scores to what pack() takes. block: of both rows, log2 units of one unit of S.
  template <bool kFirst>
  PANTILE_DEVICE void exponentiate(std::uint32_t (&S)[32], const float (&block)[2]) {
    constexpr std::uint32_t kEight = prim::twice(0x4800);
    const std::uint32_t scale = prim::half_pair(block[0], block[1]);
    raise<kFirst>(prim::fma2(row_max(S), scale ^ prim::twice(0x8000), kEight));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned pick = i == 0 ? 0x1010 : 0x3232;
      std::uint32_t scale_i = __byte_perm(scale, scale, pick);
      std::uint32_t c_i = __byte_perm(c_, c_, pick);
      if (kGroups != 0 && far_) {
        approach(S, i, scale_i, c_i);
      }
      if constexpr (kGroups == 0xff) {
        encode_row(S, i, 0, prim::fma2(scale_i, kEight, 0), code_offset(c_i), 0);
      } else if constexpr (kGroups == 0) {
        encode_row(S, i, scale_i, 0, 0, c_i);
      } else {
        encode_row(S, i, scale_i, prim::fma2(scale_i, kEight, 0), code_offset(c_i), c_i);
      }
    }
  }

  // To the A operand of P V. The keys of V are stored in the order in which the registers of the
  // accumulator come (core/scaling.h, v_slot), so that no value changes lanes.
  PANTILE_DEVICE static void pack(std::uint32_t (&P)[4][4], const std::uint32_t (&S)[32]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::uint32_t first = S[index(step, r)], second = S[index(step, r) + 2];
        P[step][r] =
            is_code(step, r) ? __byte_perm(first, second, 0x6420) : prim::pack_e4m3(first, second);
      }
    }
  }

 private:
  static constexpr unsigned kGroups = fp8_code_groups(kExp);
  static constexpr std::uint16_t kUnseen = 0x6f00;             // 7168: 8 c is still finite
  static constexpr std::uint32_t kNear = prim::twice(0x5800);  // 128

  // First of the two registers of S that register r of k step `step` of P is made of.
  static PANTILE_DEVICE constexpr int index(int step, int r) {
    return 2 * (4 * step + 2 * (r >> 1)) + (r & 1);
  }

  static PANTILE_DEVICE constexpr bool is_code(int step, int r) {
    return (kGroups >> (4 * step + r) % 8 & 1) != 0;
  }

  // 8 c + 55.53
  static PANTILE_DEVICE std::uint32_t code_offset(std::uint32_t c) {
    return prim::fma2(c, prim::twice(0x4800), prim::twice(0x52f1));
  }

  // {row 0, row 1}, over the four lanes that share them.
  static PANTILE_DEVICE std::uint32_t row_max(const std::uint32_t (&S)[32]) {
    std::uint32_t most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t even = S[i], odd = S[2 + i];
#pragma unroll
      for (int j = 2; j < 16; j += 2) {
        even = prim::max2(even, S[2 * j + i]);
        odd = prim::max2(odd, S[2 * j + 2 + i]);
      }
      most[i] = prim::max2(even, odd);
    }
    std::uint32_t both =
        prim::max2(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
    both = prim::max2(both, __shfl_xor_sync(prim::kAllLanes, both, 1));
    return prim::max2(both, __shfl_xor_sync(prim::kAllLanes, both, 2));
  }

  // Takes over what this step's maxima ask of c, unless it is too little to matter.
  template <bool kFirst>
  PANTILE_DEVICE void raise(std::uint32_t wanted) {
    constexpr std::uint32_t kGrid = prim::twice(0x5a00);   // 192: fp16 there has steps of 1/8
    constexpr std::uint32_t kSlack = prim::twice(0x3800);  // 0.5
    // On the grid 8 c is an integer, as codes need it, and a fall that matters is exact.
    wanted = prim::subtract2(prim::add2(wanted, kGrid), kGrid);
    wanted = prim::min2(wanted, c_);
    if constexpr (!kFirst) {
      fall = prim::subtract2(c_, wanted);
      raised = __any_sync(prim::kAllLanes, prim::max2(fall, kSlack) != kSlack);
      if (!raised) {
        fall = 0;
        return;
      }
    }
    if constexpr (kGroups != 0) {
      // Not counting rows that have seen no key yet, whose c is 7168 and whose P is 0 anyway.
      const std::uint32_t size = wanted & prim::twice(0x7fff);
      const std::uint32_t beyond = prim::max2(size, kNear) ^ kNear;
      const std::uint32_t unseen = wanted ^ prim::twice(kUnseen);
      far_ = __any_sync(prim::kAllLanes, ((beyond & 0xffffu) != 0 && (unseen & 0xffffu) != 0) ||
                                             ((beyond >> 16) != 0 && (unseen >> 16) != 0));
      if (far_) {
        // Lower by more than all roundings that a c of this size has met.
        const std::uint32_t excess = prim::subtract2(prim::max2(size, kNear), kNear);
        wanted = prim::fma2(excess, prim::twice(0x9800), wanted);  // - excess / 512
        if constexpr (!kFirst) {
          fall = prim::subtract2(c_, wanted);
        }
      }
    }
    c_ = wanted;
  }

  // Scores so far from 0 that 8 c is no longer near enough to an integer, which would let codes run
  // over into NaN and the sign: moves row i first, S := S2 + c.
  static PANTILE_DEVICE void approach(std::uint32_t (&S)[32], int i, std::uint32_t& scale,
                                      std::uint32_t& c) {
    constexpr std::uint32_t kMost = prim::twice(0x4860);  // 8.75
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      std::uint32_t& x = S[2 * j + i];
      x = prim::fma2(x, scale, c);
      x = prim::min2_nan(x, kMost);
    }
    scale = prim::twice(0x3c00);
    c = 0;
  }

  static PANTILE_DEVICE void encode_row(std::uint32_t (&S)[32], int i, std::uint32_t scale,
                                        std::uint32_t code_scale, std::uint32_t code_offset,
                                        std::uint32_t c) {
    constexpr std::uint32_t kRound = prim::twice(0x6400);  // 1024
#pragma unroll
    for (int step = 0; step < 4; ++step) {
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

  std::uint32_t c_;  // {row 0, row 1}
  bool far_;         // some c of the warp is beyond kNear
};

// Keeps scores within the limit; see kFp8ScoreLimit. Before masking, which needs infinities.
PANTILE_DEVICE void clamp_scores(std::uint32_t (&S)[32], const float (&block)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float most = fminf(__fdividef(kFp8ScoreLimit, block[i]), 65504.0f);
    const std::uint32_t high = prim::half_pair(most, most);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      std::uint32_t& x = S[2 * j + i];
      x = prim::max2_nan(prim::min2_nan(x, high), high ^ prim::twice(0x8000));
    }
  }
}

}  // namespace pantile::hopper
