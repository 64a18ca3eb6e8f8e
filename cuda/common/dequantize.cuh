// FP8 operands as numbers again, for a 16-bit backward on what the codes stand for. One block of
// threads for each block of 128 rows of a head; Q first, then K, then V. One read, one write.
#pragma once

#include "common/dequantize_rows.cuh"
#include "common/dequantize_values.cuh"

namespace pantile::common {

struct DequantizeParams {
  QuantizeSide sides[3];  // Q, K, V, as they are written; their data are not read
  NumbersOutput out[3];
  int batch;
};

template <DType kDType, int kDim>
__global__ void __launch_bounds__(RowDequantizer<kDType, kDim>::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  using Values = ValueDequantizer<kDType, kDim>;
  __shared__ typename Values::Shared shared;
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
    RowDequantizer<kDType, kDim>(side, p.out[which], block).run();
  } else {
    Values(side, p.out[which], block, shared).run();
  }
}

}  // namespace pantile::common
