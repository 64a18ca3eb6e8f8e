// What the math warpgroups of the Hopper forward hand over: O, LSE, the largest logit.
#pragma once

#include "attn/max_logit.cuh"
#include "attn/softmax.cuh"
#include "core/softmax_state.h"
#include "hopper/forward/config.h"
#include "hopper/forward/storage.cuh"
#include "prim/convert.cuh"
#include "prim/matrix.cuh"
#include "prim/nonfinite.cuh"
#include "prim/special_registers.cuh"
#include "tile/fragment.cuh"

namespace pantile::hopper {

// A warp's rows of O, divided by the row sums, to a tile in shared memory at `to`. True if some
// lane's values are not finite and, kScans, the mask is such that an unattended V may be the cause.
template <ForwardConfig kConfig, DType kDType, bool kScans>
PANTILE_DEVICE bool store_fragment(std::uint32_t to, const float (&O)[kConfig.head_dim_v / 2],
                                   const float (&inverse)[2], int warp, int lane) {
  prim::NonFiniteScan<kDType> scan;
  // 16 rows x 16 columns at a time; lane l gives the address of row l % 16, half l / 16.
  const int row = warp * 16 + (lane & 15);
#pragma unroll
  for (int j = 0; j < kConfig.head_dim_v / 16; ++j) {
    uint4 packed;
    packed.x = prim::pack<kDType>(O[8 * j] * inverse[0], O[8 * j + 1] * inverse[0]);
    packed.y = prim::pack<kDType>(O[8 * j + 2] * inverse[1], O[8 * j + 3] * inverse[1]);
    packed.z = prim::pack<kDType>(O[8 * j + 4] * inverse[0], O[8 * j + 5] * inverse[0]);
    packed.w = prim::pack<kDType>(O[8 * j + 6] * inverse[1], O[8 * j + 7] * inverse[1]);
    if constexpr (kScans) {
      scan.add(packed);
    }
    const int column = 16 * j + lane / 16 * 8;
    prim::store_matrix_x4(to + kConfig.o_tile().offset(row, column), packed.x, packed.y, packed.z,
                          packed.w);
  }
  if constexpr (!kScans) {
    return false;
  }
  return scan.any();
}

// All that finished rows still need while their last product runs: 1 / sum, the LSE and the largest
// logit, `logit_scale` times what maxima were taken of. The thread's place is worked out anew, here
// and in store_float32: nothing more may stay in registers over the loop.
template <int kCount>
PANTILE_DEVICE void finish_rows(const ForwardParams& p, const TileInfo& done,
                                const attn::OnlineSoftmax<kCount>& softmax, float logit_scale,
                                float (&inverse)[2]) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const int first = done.row0 + tile::fragment_row(thread / 32, thread & 31);
  float sums[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = sums[i] = tile::quad_sum(softmax.row_sum[i]);
    inverse[i] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    const int row = first + 8 * i;
    if (p.lse != nullptr && (thread & 3) == 0 && row < done.rows) {
      p.lse[done.batch * p.lse_batch + done.head * p.lse_head + done.q_row + row] =
          sum == 0.0f ? attn::kMaskedScore
                      : (softmax.shift[i] + prim::log2_approx(sum)) * core::kLn2;
    }
  }
  if (p.max_logit != nullptr) {
    float row_max[2] = {softmax.row_max[0], softmax.row_max[1]};
    tile::quad_max(row_max);
    int largest = attn::kSmallestLogit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + 8 * i < done.rows) {
        largest = max(largest, attn::row_logit_order(row_max[i] * logit_scale, sums[i]));
      }
    }
    attn::raise_max_logit(p.max_logit + std::int64_t{done.batch} * p.heads_q + done.head, largest);
  }
}

// Row `row` of a tile's sequence and head in an O of fp32.
PANTILE_DEVICE float* float_row(const ForwardParams& p, const TileInfo& info, int row) {
  return static_cast<float*>(p.o) + info.batch * p.o_strides.batch + info.head * p.o_strides.head +
         (info.q_row + row) * p.o_strides.seq;
}

// A thread's two rows of O straight to global memory. A quad writes 32 bytes at a time, a whole
// sector.
template <int kCount>
PANTILE_DEVICE void store_float32(const ForwardParams& p, const TileInfo& info,
                                  const float (&O)[kCount], const float (&inverse)[2]) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const int lane = thread & 31;
  const int first = info.row0 + tile::fragment_row(thread / 32, lane);
  const int column = tile::fragment_column(lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + 8 * i < info.rows) {
      float* const to = float_row(p, info, first + 8 * i) + column;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (8 * j + column < p.head_dim_v) {
          *reinterpret_cast<float2*>(to + 8 * j) =
              make_float2(O[4 * j + 2 * i] * inverse[i], O[4 * j + 2 * i + 1] * inverse[i]);
        }
      }
    }
  }
}

}  // namespace pantile::hopper
