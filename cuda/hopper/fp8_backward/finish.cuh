// The kernels behind the FP8 backward: dQ from its sums, and zeros in rows that no sequence uses.
#pragma once

#include "common/quad_transpose.cuh"
#include "hopper/fp8_backward/prepare.cuh"

namespace pantile::hopper {

struct Fp8FinishParams {
  core::SequenceSide queries;
  int heads_q, batch, q_blocks, head_dim;
  const float* dq_sum;
  std::uint16_t* grad_q;
  Layout grad_q_layout;
  bool is_f16;
};

inline constexpr int kFp8FinishThreads = 128;

// A block of threads takes 64 queries of a head; their sums are in the register order of two
// accumulators of kDim / 2 columns.
template <int kDim>
__global__ void __launch_bounds__(kFp8FinishThreads)
    finish_backward_fp8(const __grid_constant__ Fp8FinishParams p) {
  constexpr int kHalf = kDim / 2;
  prim::wait_for_previous_grid();
  const int half = static_cast<int>(blockIdx.x) % 2;
  const Fp8Block block =
      locate_fp8_block(p.queries, p.batch, p.q_blocks, static_cast<int>(blockIdx.x) / 2);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  if (64 * half >= block.rows) {
    return;
  }
  const std::int64_t sequence = p.queries.cu_seqlens != nullptr
                                    ? block.row * p.grad_q_layout.seq
                                    : block.batch * p.grad_q_layout.batch;
  std::uint16_t* out = p.grad_q + sequence + block.head * p.grad_q_layout.head;
  const std::int64_t tile = 2 * (std::int64_t{block.head} * p.q_blocks + block.block) + half;
#pragma unroll
  for (int fragment = 0; fragment < 2; ++fragment) {
    const auto* from =
        reinterpret_cast<const float4*>(p.dq_sum + (2 * tile + fragment) * 64 * kHalf) + thread;
    float4 sums[kHalf / 8];  // of 8 columns: of two rows a pair each
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
      sums[j] = from[128 * j];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 64 * half + thread / 32 * 16 + lane / 4 + 8 * i;
#pragma unroll
      for (int j = 0; j < kHalf / 8; j += 2) {
        // Lanes with an even pair of columns hold those of j, the others those of j + 1.
        std::uint32_t words[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float a = i == 0 ? sums[j + c].x : sums[j + c].z;
          const float b = i == 0 ? sums[j + c].y : sums[j + c].w;
          words[c] = p.is_f16 ? prim::pack<DType::f16>(a, b) : prim::pack<DType::bf16>(a, b);
        }
        const bool odd = (lane & 1) != 0;
        const std::uint32_t other = __shfl_xor_sync(prim::kAllLanes, odd ? words[0] : words[1], 1);
        const uint2 four = odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
        const int column = fragment * kHalf + 8 * (j + (odd ? 1 : 0)) + (lane & 2) * 2;
        if (row < block.rows && column < p.head_dim) {
          *reinterpret_cast<uint2*>(out + (block.first + row) * p.grad_q_layout.seq + column) =
              four;
        }
      }
    }
  }
}

// Rows of a tensor that no sequence uses, set to zero.
struct Fp8UnusedParams {
  core::SequenceSide side;
  int batch, heads, head_dim, rows;  // rows: of a dense sequence; packed: of all
  std::uint16_t* data;
  Layout layout;
};

// A block of threads takes a row of all heads: of blockIdx.y, packed of all sequences.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    zero_unused_fp8(const __grid_constant__ Fp8UnusedParams p) {
  const int row = static_cast<int>(blockIdx.x);
  const bool packed = p.side.cu_seqlens != nullptr;
  int batch = static_cast<int>(blockIdx.y);
  int own = row;
  bool outside = false;
  if (packed) {
    outside = row < p.side.cu_seqlens[0] || row >= p.side.cu_seqlens[p.batch];
    if (!outside) {
      int above = p.batch;
      for (batch = 0; above - batch > 1;) {
        const int middle = (batch + above) / 2;
        (p.side.cu_seqlens[middle] <= row ? batch : above) = middle;
      }
      own = row - p.side.cu_seqlens[batch];
    }
  }
  if (!outside && own < core::locate_sequence(p.side, batch).length) {
    return;
  }
  const int chunks = p.head_dim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < p.heads * chunks; i += kThreads) {
    std::uint16_t* to = p.data + (packed ? 0 : batch * p.layout.batch) +
                        i / chunks * p.layout.head + row * p.layout.seq + i % chunks * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace pantile::hopper
