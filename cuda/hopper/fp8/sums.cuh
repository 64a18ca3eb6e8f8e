// O and the row sums of the Hopper FP8 forward, above the FP8 products' short accumulator. Both
// ways carry the output in units of the current step's scale of V, so that the scales of V cost
// nothing while they stay the same; the row sum is the product of P with rows of ones below V^T and
// needs neither additions nor shuffles.
//
// A step's factors: alpha, what a moved row maximum makes of everything before it; unit,
// the ratio of the scale of V before to this one.
#pragma once

#include <cstdint>

#include "hopper/fp8/config.h"
#include "prim/half2.cuh"
#include "prim/math.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"
#include "prim/wgmma_e4m3.cuh"

namespace pantile::hopper {

// Registers of a thread's products: two rows of head_dim columns, then the row sums (of which each
// row has two equal ones).
template <Fp8Config kConfig>
struct Fp8Product {
  static constexpr int kOutputs = kConfig.head_dim / 2;
  static constexpr int kCount = kOutputs + 4;
  // Head dims above 128 take two products, with the ones behind the second.
  static constexpr int kFirst = kConfig.head_dim <= 128   ? kConfig.v_rows()
                                : kConfig.head_dim == 192 ? 96
                                                          : 128;
  static constexpr int kSecond = kConfig.v_rows() - kFirst;

  template <bool kFresh>
  static PANTILE_DEVICE void issue(float (&D)[kCount], const std::uint32_t (&P)[4][4],
                                   std::uint32_t v_low) {
    const std::uint64_t v = prim::whole_descriptor(v_low, prim::kSwizzle128High);
    prim::wgmma_fence();
    // All steps of one product, then all of the other: ptxas gives up on the mixed order (C7511).
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t b = v + prim::descriptor_step(32 * step);
      prim::wgmma_e4m3_rs<kFirst, 0>(D, P[step], b, kFresh && step == 0 ? 0 : 1);
    }
    if constexpr (kSecond > 0) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t b = v + prim::descriptor_step(32 * step + kFirst * Fp8Config::kTileK);
        prim::wgmma_e4m3_rs<kSecond, kFirst / 2>(D, P[step], b, kFresh && step == 0 ? 0 : 1);
      }
    }
    prim::wgmma_commit();
  }
};

// Each step's product starts from zero and is added to fp32 registers; that costs one FFMA where
// rescaling would cost an FMUL.
template <Fp8Config kConfig>
class Fp8StepSums {
 public:
  using Product = Fp8Product<kConfig>;
  static constexpr bool kFreshProduct = true;

  float D[Product::kCount];  // the product under way
  float O[Product::kOutputs];
  float l[2];

  PANTILE_DEVICE void begin_tile() {
#pragma unroll
    for (int k = 0; k < Product::kOutputs; ++k) {
      O[k] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] = 0.0f;
    }
    alpha_[0] = alpha_[1] = 1.0f;
    unit_ = 1.0f;
  }

  // After the product of the step before; alpha and unit are this step's. That product is already
  // in the units of its own step, O is not, hence the factors kept from then.
  PANTILE_DEVICE void next_step(const float (&alpha)[2], bool, float unit, float, float, int, int,
                                std::uint32_t) {
    add_product();
    alpha_[0] = alpha[0];
    alpha_[1] = alpha[1];
    unit_ = unit;
  }

  // After the last product. Returns the unit of O. Not in tiles that issue no product: D is not
  // this tile's then, and O and l are what begin_tile() made them.
  PANTILE_DEVICE float end_tile(float v_scale, std::uint32_t) {
    add_product();
    return v_scale;
  }

  PANTILE_DEVICE float output(int k) const { return O[k]; }
  PANTILE_DEVICE float divisor(int i) const { return l[i]; }

 private:
  PANTILE_DEVICE void add_product() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = alpha_[i] * unit_;
#pragma unroll
      for (int j = 0; j < kConfig.head_dim / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int k = 4 * j + 2 * i + c;
          O[k] = fmaf(O[k], factor, D[k]);
        }
      }
      l[i] = fmaf(l[i], alpha_[i], D[Product::kOutputs + 2 * i]);
    }
  }

  float alpha_[2];  // of the step before
  float unit_;
};

// Products accumulate; every kFoldSteps steps O is folded, divided by the row sum so far and in
// fp16, into a copy in the warp's place for O, in units of the largest scale of V that any step of
// the tile had so far: normalised, nothing exceeds 448 of them, which fp16 holds. A thread reads
// only what it wrote: no barrier.
template <Fp8Config kConfig>
class Fp8FoldedSums {
 public:
  using Product = Fp8Product<kConfig>;
  static constexpr bool kFreshProduct = false;

  float D[Product::kCount];
  float l[2];  // of all steps whose row sums are no longer in D

  PANTILE_DEVICE explicit Fp8FoldedSums(int zero) : zero_(zero) {}

  PANTILE_DEVICE void begin_tile() {
#pragma unroll
    for (int k = 0; k < Product::kCount; ++k) {
      D[k] = 0.0f;
    }
    l[0] = l[1] = 0.0f;
    folded_[0] = folded_[1] = 0.0f;
    unit_ = 0.0f;
    divisor_[0] = divisor_[1] = 0.0f;
  }

  // steps: how many products D holds since the tile began; left: how many more there are to come.
  // NOTE: fold by the step's place in the tile and not by a running count, or the result would
  // depend on which block does which tile. v_scale: the unit of D. most: the largest unit so far:
  // in smaller ones what large values left in D would leave fp16.
  PANTILE_DEVICE void next_step(const float (&alpha)[2], bool raised, float unit, float v_scale,
                                float most, int steps, int left, std::uint32_t place) {
    if (steps % Fp8Config::kFoldSteps == 0 && left > 2) {
      fold<false>(v_scale, most, place);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        l[i] *= alpha[i];
        folded_[i] = l[i];
      }
    } else if (raised || unit != 1.0f) {
      const float zero = __int_as_float(zero_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = alpha[i] * unit;
#pragma unroll
        for (int j = 0; j < kConfig.head_dim / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            D[4 * j + 2 * i + c] *= factor;
          }
        }
        l[i] = (l[i] + D[Product::kOutputs + 2 * i]) * alpha[i];
        clear_row_sum(i, zero);
        folded_[i] *= alpha[i];
      }
    }
  }

  // As in Fp8StepSums.
  PANTILE_DEVICE float end_tile(float v_scale, std::uint32_t place) {
    if (unit_ == 0.0f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        l[i] += D[Product::kOutputs + 2 * i];
        divisor_[i] = l[i];
      }
      return v_scale;
    }
    fold<true>(v_scale, v_scale, place);  // to fp32
    divisor_[0] = l[0] == 0.0f ? 0.0f : 1.0f;
    divisor_[1] = l[1] == 0.0f ? 0.0f : 1.0f;
    return unit_;
  }

  PANTILE_DEVICE float output(int k) const { return D[k]; }
  PANTILE_DEVICE float divisor(int i) const { return divisor_[i]; }

 private:
  // Accumulators must not hold constants that ptxas knows (C7511).
  PANTILE_DEVICE void clear_row_sum(int i, float zero) {
    D[Product::kOutputs + 2 * i] *= zero;
    D[Product::kOutputs + 2 * i + 1] *= zero;
  }

  // kLast: the sum stays in D instead. `most` is at least v_scale.
  template <bool kLast>
  PANTILE_DEVICE void fold(float v_scale, float most, std::uint32_t place) {
    const bool first = unit_ == 0.0f;
    const float unit = fmaxf(unit_, most);
    float old_part[2], new_part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += D[Product::kOutputs + 2 * i];
      const float inverse = l[i] == 0.0f ? 0.0f : __fdividef(1.0f, l[i]);
      new_part[i] = inverse * __fdividef(v_scale, unit);
      old_part[i] = folded_[i] * inverse * __fdividef(unit_, unit);
    }
    unit_ = unit;
    const float zero = __int_as_float(zero_);
    if (!kLast && first) {
      prim::bulk_wait_read<0>();  // the tile of O before has left (the storing lane knows)
      __syncwarp();
    }
#pragma unroll
    for (int chunk = 0; chunk < Product::kOutputs / 8; ++chunk) {
      const std::uint32_t at = place + chunk * 512;
      std::uint32_t w[4] = {0, 0, 0, 0};
      if (kLast || !first) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(at));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = 8 * chunk + 2 * e, i = e & 1;
        const float x0 = fmaf(prim::low_float(w[e]), old_part[i], D[k] * new_part[i]);
        const float x1 = fmaf(prim::high_float(w[e]), old_part[i], D[k + 1] * new_part[i]);
        if constexpr (kLast) {
          D[k] = x0;
          D[k + 1] = x1;
        } else {
          w[e] = prim::half_pair(x0, x1);
          D[k] *= zero;
          D[k + 1] *= zero;
        }
      }
      if constexpr (!kLast) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w[0]), "r"(w[1]),
                     "r"(w[2]), "r"(w[3])
                     : "memory");
      }
    }
    if constexpr (!kLast) {
      clear_row_sum(0, zero);
      clear_row_sum(1, zero);
    }
  }

  int zero_;
  float folded_[2];  // row sums that the copy was divided by, times the alphas since
  float unit_;       // of the copy; 0: there is none
  float divisor_[2];
};

}  // namespace pantile::hopper
