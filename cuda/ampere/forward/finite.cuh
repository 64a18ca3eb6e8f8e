// Where a tensor product would carry an infinity or a NaN of one row into another: the same for the
// finite values by the product, for the others on vector units (SoftmaxRows).
#pragma once

#include "attn/tensor_softmax.cuh"

namespace pantile::ampere {

// x * scale - reference as attn::scale_and_add gives it, of four accumulators.
PANTILE_DEVICE void scale_finite(float (&x)[4], const attn::TensorOperand& scale_operand,
                                 float scale, const float (&minus_reference)[2]) {
  float y[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    y[c] = fabsf(x[c]) < INFINITY ? x[c] : 0.0f;
  }
  attn::scale_and_add(y, scale_operand, minus_reference[0], minus_reference[1]);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    x[c] = fabsf(x[c]) < INFINITY ? y[c] : fmaf(x[c], scale, minus_reference[c >> 1]);
  }
}

PANTILE_DEVICE void add_finite_sums(float (&row_sum)[4], const float (&p)[4],
                                    const attn::TensorOperand& ones) {
  float finite[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    finite[c] = p[c] < INFINITY ? p[c] : 0.0f;
  }
  attn::add_row_sums(row_sum, finite, ones);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    row_sum[c >> 1] += p[c] < INFINITY ? 0.0f : p[c];
  }
}

template <int kTiles>
PANTILE_DEVICE bool all_finite(const float (&x)[kTiles][4]) {
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      finite &= fabsf(x[j][c]) < INFINITY;
    }
  }
  return finite;
}

}  // namespace pantile::ampere
