// Softmax steps as m16n8k8 TF32 products: what the constant operands hold, and the products
// themselves, bit by bit, for tests. cuda/attn/tensor_softmax.cuh is the GPU's side of it.
//
// The four accumulators c0..c3 of an m16n8 tile, unchanged, are taken for the A operand a0..a3. The
// tensor core then sees another matrix: A[g][t] = C[g][2t], A[g + 8][t] = C[g][2t + 1],
// A[g][t + 4] = C[g + 8][2t], A[g + 8][t + 4] = C[g + 8][2t + 1].
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/fragment.h"
#include "core/host_device.h"

namespace pantile::core {

// ---- TF32: an fp32 register of which 10 bits of the mantissa count
// --------------------------------

inline constexpr std::uint32_t kTf32Ignored = 0x1fffu;

// What the tensor core reads.
PANTILE_HD constexpr float truncate_to_tf32(float x) {
  return bits_float(float_bits(x) & ~kTf32Ignored);
}

// cvt.rna: nearest, ties away from zero. For finite x.
PANTILE_HD constexpr float round_to_tf32(float x) {
  return bits_float((float_bits(x) + 0x1000u) & ~kTf32Ignored);
}

// ---- operands
// -------------------------------------------------------------------------------------

// B of `factor * x`: factor x a permutation of columns, B[t][2t] = B[t + 4][2t + 1] = factor. Row g
// of the product is factor * (c0, c2) of its lanes and row g + 8 factor * (c1, c3).
PANTILE_HD constexpr bool shuffle_operand_holds(int lane, int reg) {
  const Element at = mma_tf32_b(lane, reg);
  return at.column == 2 * (at.row % 4) + at.row / 4;
}

// Where the result for accumulator `element` stands; its own inverse.
PANTILE_HD constexpr int shuffled_element(int element) {
  return element % 2 * 2 + element / 2;
}

// B of the row sum: even columns add up row g of C (A's columns 0..3), odd columns row g + 8. Ones
// everywhere would mix the two rows.
PANTILE_HD constexpr bool row_sum_operand_holds(int lane, int reg) {
  const Element at = mma_tf32_b(lane, reg);
  return at.row / 4 == at.column % 2;
}

// ---- the largest of several floats by integer reductions
// ------------------------------------------

// From the largest and the smallest of their bits as integers; no NaN among them.
PANTILE_HD constexpr std::int32_t largest_float_bits(std::int32_t largest, std::int32_t smallest) {
  return largest < 0 ? smallest : largest;
}

}  // namespace pantile::core
