// The mean of K over each sequence, per channel, for K smoothing. Two kernels: sums over blocks of
// 128 rows, then over blocks. The order of all sums is fixed (core/blocked.h).
#pragma once

#include "common/quantize_load.cuh"
#include "core/hadamard.h"
#include "prim/grid_dependency.cuh"

namespace pantile::common {

struct MeanParams {
  QuantizeSide k;
  int batch;
  float* partial;  // [heads_k, blocks, dim]
  float* mean;     // [batch, heads_k, dim]
  float* turned;   // the same with the signs of the rotation, if there is one
  bool rotates;
};

// A block sums 128 rows of a head: 16 rows x kDim / 8 chunks at a time.
template <DType kDType, int kDim>
__global__ void __launch_bounds__(2 * kDim) sum_keys_kernel(const __grid_constant__ MeanParams p) {
  constexpr int kChunks = kDim / 8;
  __shared__ float sums[core::kMeanRowSums][kDim + 4];
  prim::allow_next_grid();
  const RowBlock block = locate_block(p.k, p.batch, static_cast<int>(blockIdx.x));
  if (block.rows == 0) {
    return;
  }
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int first = static_cast<int>(threadIdx.x) / kChunks;
  Chunk<kDType> raw[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first + core::kMeanRowSums * i;
    raw[i].load(p.k.data, block.element + row * p.k.sequences.seq_stride + 8 * chunk,
                row < block.rows && 8 * chunk < p.k.dim);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = __fadd_rn(sum, core::mean_term(raw[i].element(e)));
    }
    sums[first][8 * chunk + e] = sum;
  }
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel < p.k.dim) {
    float lanes[core::kMeanRowSums];
#pragma unroll
    for (int t = 0; t < core::kMeanRowSums; ++t) {
      lanes[t] = sums[t][channel];
    }
#pragma unroll
    for (int o = core::kMeanRowSums / 2; o > 0; o /= 2) {
#pragma unroll
      for (int t = 0; t < o; ++t) {
        lanes[t] = __fadd_rn(lanes[t], lanes[t + o]);
      }
    }
    p.partial[block.index * p.k.dim + channel] = lanes[0];
  }
}

// A block of 32 x 32 threads: 32 channels of one head of one sequence.
template <DType kDType>  // of the sums before; one kernel an instance, so that nothing is defined
                         // twice
__global__ void __launch_bounds__(1024) mean_keys_kernel(const __grid_constant__ MeanParams p) {
  __shared__ float sums[core::kMeanBlockSums][33];
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  const int column = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.y);
  const int channel = static_cast<int>(blockIdx.x) * 32 + column;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const int length = core::locate_sequence(p.k.sequences, batch).length;
  const int blocks = core::ceil_div(length, core::kBlockedRows);
  const std::int64_t first =
      std::int64_t{head} * p.k.blocks + core::first_block(p.k.sequences, batch);
  float sum = 0.0f;
  if (channel < p.k.dim) {
#pragma unroll 4
    for (int i = lane; i < blocks; i += core::kMeanBlockSums) {
      sum = __fadd_rn(sum, p.partial[(first + i) * p.k.dim + channel]);
    }
  }
  sums[lane][column] = sum;
#pragma unroll
  for (int o = core::kMeanBlockSums / 2; o > 0; o /= 2) {
    __syncthreads();
    if (lane < o) {
      sums[lane][column] = __fadd_rn(sums[lane][column], sums[lane + o][column]);
    }
  }
  if (lane == 0 && channel < p.k.dim) {
    const float mean = core::channel_mean(sums[0][column], length);
    const std::int64_t at = (std::int64_t{batch} * p.k.heads + head) * p.k.dim + channel;
    p.mean[at] = mean;
    p.turned[at] = p.rotates && core::hadamard_factor(channel, 1) < 0.0f ? -mean : mean;
  }
}

}  // namespace pantile::common
