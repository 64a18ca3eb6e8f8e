// Rows that seqused_q leaves out: O = 0, LSE = -inf. The tiles of both Hopper forwards end where
// the used rows do, so that nothing else writes there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/integer.h"
#include "core/softmax_state.h"
#include "prim/address.cuh"

namespace pantile::hopper {

// `thread` counts the kUnusedRowThreads of a block that share the rows with those of all other
// blocks. Params: ForwardParams or Fp8Params. An element of O has `element_bytes`.
inline constexpr int kUnusedRowThreads = 64;

template <class Params>
PANTILE_DEVICE void write_unused_rows(const Params& p, int element_bytes, int thread) {
  const int row_bytes = p.head_dim_v * element_bytes;
#pragma unroll 1
  for (int batch = 0; batch < p.batch; ++batch) {
    const int first = p.cu_seqlens_q == nullptr ? 0 : p.cu_seqlens_q[batch];
    const int rows = p.cu_seqlens_q == nullptr ? p.seqlen_q : p.cu_seqlens_q[batch + 1] - first;
    const int used = core::clamp(p.seqused_q[batch], 0, rows);
#pragma unroll 1
    for (int row = used + static_cast<int>(blockIdx.x); row < rows;
         row += static_cast<int>(gridDim.x)) {
#pragma unroll 1
      for (int head = 0; head < p.heads_q; ++head) {
        const std::int64_t at =
            batch * p.o_strides.batch + head * p.o_strides.head + (first + row) * p.o_strides.seq;
        if (thread * 16 < row_bytes) {
          auto* const to = static_cast<unsigned char*>(p.o) + at * element_bytes + thread * 16;
          *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
        }
        if (thread == 0 && p.lse != nullptr) {
          p.lse[batch * p.lse_batch + head * p.lse_head + first + row] = -core::kInfinity;
        }
      }
    }
  }
}

}  // namespace pantile::hopper
