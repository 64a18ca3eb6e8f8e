// Before the fp32 backward: per row and query head the two numbers that its scores start from.
#pragma once

#include <cstdint>

#include "ampere/operand.cuh"
#include "core/sequence.h"
#include "core/softmax_state.h"
#include "prim/warp.cuh"

namespace pantile::ampere {

struct RowTermsParamsF32 {
  Operand o, grad_o;  // strides in floats
  core::SequenceSide queries;
  int heads_q, head_dim_v;
  const float* lse;       // [batch][heads_q][seqlen_q], packed [heads_q][total_q]
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
  std::int64_t rows;  // of all sequences, term_rows of the main kernel
  float2* row_terms;
};

inline constexpr int kTermThreadsF32 = 256;

// One warp a row and head. Rows that no sequence has (seqused) are passed over or never read.
// A template on the table row's head dim only so that every instance has a kernel of its own.
template <int kHeadDim>
__global__ void __launch_bounds__(kTermThreadsF32)
    row_terms_f32(const __grid_constant__ RowTermsParamsF32 params) {
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * (kTermThreadsF32 / 32) + threadIdx.x / 32;
  if (index >= params.rows * params.heads_q) {
    return;
  }
  const int lane = prim::lane_index();
  const int head = static_cast<int>(index % params.heads_q);
  const std::int64_t row = index / params.heads_q;
  const bool packed = params.queries.cu_seqlens != nullptr;
  const std::int64_t batch = packed ? 0 : row / params.queries.max_length;
  const std::int64_t local = packed ? row : row % params.queries.max_length;
  const auto at = [&](const Operand& x) {
    return static_cast<const float*>(x.data) + batch * x.batch + local * x.seq + head * x.head;
  };
  const float* const o = at(params.o);
  const float* const grad_o = at(params.grad_o);
  float delta = 0.0f;
  for (int column = lane * 4; column < params.head_dim_v; column += 32 * 4) {
    const float4 x = *reinterpret_cast<const float4*>(o + column);
    const float4 y = *reinterpret_cast<const float4*>(grad_o + column);
    delta += (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    delta += __shfl_xor_sync(prim::kAllLanes, delta, step);
  }
  if (lane == 0) {
    const std::int64_t from =
        head * params.lse_head_stride + batch * params.lse_batch_stride + local;
    const float lse = params.lse[from];
    const float grad_lse = params.grad_lse == nullptr ? 0.0f : params.grad_lse[from];
    params.row_terms[head * params.rows + row] =
        make_float2(lse == -INFINITY ? -INFINITY : -lse * core::kLog2E, grad_lse - delta);
  }
}

}  // namespace pantile::ampere
