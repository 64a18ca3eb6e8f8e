// The FP8 quantiser: Q, K and V to e4m3 codes with scales, in the form of pantile/quantize.h. One
// block of threads for each block of 128 rows of a head; Q first, then K, then V. One read, one
// write.
#pragma once

#include "common/quantize_rows.cuh"
#include "common/quantize_values.cuh"
#include "prim/grid_dependency.cuh"

namespace pantile::common {

struct QuantizeParams {
  QuantizeSide sides[3];   // Q, K, V
  RowsOutput rows_out[2];  // Q, K
  ValuesOutput v_out;
  int batch;
};

template <DType kDType, int kDim>
__global__ void __launch_bounds__(RowQuantizer<kDType, kDim>::kThreads, kDim == 64    ? 4
                                                                        : kDim == 128 ? 2
                                                                                      : 1)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  using Rows = RowQuantizer<kDType, kDim>;
  using Values = ValueQuantizer<kDType, kDim>;
  __shared__ union {
    typename Rows::Shared rows;
    typename Values::Shared values;
  } shared;
  // Attention may start as soon as the last of these blocks has started; the mean must be there.
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  int work = static_cast<int>(blockIdx.x);
  int which = 0;
  while (work >= p.sides[which].heads * p.sides[which].blocks) {
    work -= p.sides[which].heads * p.sides[which].blocks;
    ++which;
  }
  const QuantizeSide& side = p.sides[which];
  const RowBlock block = locate_block(side, p.batch, work);
  if (block.rows == 0) {
    return;
  }
  if (which < 2) {
    Rows(side, p.rows_out[which], block, shared.rows).run();
  } else {
    Values(side, p.v_out, block, shared.values).run();
  }
}

}  // namespace pantile::common
