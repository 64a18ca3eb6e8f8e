// Steps of the softmax as matrix products (FlashAttention-T, PPoPP 2026,
// DOI 10.1145/3774934.3786425; docs/design/flashattention-t.md). The A operand is always registers
// that are there anyway: four accumulators of an m16n8 tile, unchanged, or P of 16 keys as it
// enters P V. Which element of which matrix they then are, and what the constant B must hold, is
// core/tensor_softmax.h.
//
// A lane holds rows g and g + 8 of a tile (prim/mma_sync.cuh); "first" and "second" are those two.
// No infinity or NaN may enter a TF32 product: times 0 it is NaN, in row g as well as in g + 8.
#pragma once

#include <cstdint>

#include "core/tensor_softmax.h"
#include "pantile/dtype.h"
#include "prim/mma_sync.cuh"
#include "prim/mma_tf32.cuh"
#include "prim/warp.cuh"

namespace pantile::attn {

// The B operand of an 8-deep TF32 product.
struct TensorOperand {
  std::uint32_t b0, b1;
};

// factor x shuffle. The tensor core reads 11 significant bits of the factor: round it first where
// that matters (prim::round_to_tf32).
PANTILE_DEVICE TensorOperand shuffle_operand(std::uint32_t factor_bits, int lane) {
  return TensorOperand{core::shuffle_operand_holds(lane, 0) ? factor_bits : 0u,
                       core::shuffle_operand_holds(lane, 1) ? factor_bits : 0u};
}

// x = factor * x + addend of its row: one product in place of four FFMA. The results come out in
// the order 0, 2, 1, 3, which costs nothing when another instruction reads them.
PANTILE_DEVICE void scale_and_add(float (&x)[4], const TensorOperand& factor, float first,
                                  float second) {
  float d[4];
  prim::mma_tf32(d, x, factor.b0, factor.b1, first, second, first, second);
#pragma unroll
  for (int element = 0; element < 4; ++element) {
    x[element] = d[core::shuffled_element(element)];
  }
}

// x = factor * x, one factor for all 16 rows.
PANTILE_DEVICE void scale_rows(float (&x)[4], const TensorOperand& factor) {
  scale_and_add(x, factor, 0.0f, 0.0f);
}

// B of add_row_sums.
PANTILE_DEVICE TensorOperand row_sum_operand(int lane) {
  constexpr std::uint32_t kOne = 0x3f800000u;
  return TensorOperand{core::row_sum_operand_holds(lane, 0) ? kOne : 0u,
                       core::row_sum_operand_holds(lane, 1) ? kOne : 0u};
}

// Adds the sums of the tile's columns: sums[0] + sums[2] belongs to the first row, sums[1] +
// sums[3] to the second, in all lanes of a quad. P is truncated to 11 bits.
PANTILE_DEVICE void add_row_sums(float (&sums)[4], const float (&p)[4], const TensorOperand& ones) {
  prim::mma_tf32(sums, p, ones.b0, ones.b1, sums[0], sums[1], sums[2], sums[3]);
}

// The same from 16 keys of P in 16 bits, half the cost a key: sums[0] = sums[1] belongs to the
// first row, sums[2] = sums[3] to the second.
template <DType kDType>
PANTILE_DEVICE void add_row_sums(float (&sums)[4], const std::uint32_t (&p)[4]) {
  constexpr std::uint32_t kOnes = kDType == DType::bf16 ? 0x3f803f80u : 0x3c003c00u;
  prim::mma_add<kDType>(sums, p, kOnes, kOnes);
}

// The largest of 32 values, in all lanes, by two integer reductions: as integers, floats of which
// one is positive have the order of floats, and negative ones the opposite. No NaN.
PANTILE_DEVICE float warp_max(float x) {
  const int bits = __float_as_int(x);
  const int largest = __reduce_max_sync(prim::kAllLanes, bits);
  const int smallest = __reduce_min_sync(prim::kAllLanes, bits);
  return __int_as_float(core::largest_float_bits(largest, smallest));
}

}  // namespace pantile::attn
