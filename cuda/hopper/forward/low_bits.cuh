// o_low: eight more bits of every element of O (core/low_bits.h), for the backward's row sums of
// dO * O. Written from registers, where the unrounded O is.
#pragma once

#include <cstdint>

#include "common/quad_transpose.cuh"
#include "hopper/forward/storage.cuh"
#include "prim/convert.cuh"
#include "prim/low_bits.cuh"
#include "tile/fragment.cuh"

namespace pantile::hopper {

// A thread's two rows, 32 columns at a time: the lanes of a quad hold two columns of every eight,
// and trade them so that each writes eight neighbouring bytes of both rows, a quad one sector.
template <DType kDType, int kCount>
PANTILE_DEVICE void store_low_bits(const ForwardParams& p, const TileInfo& info,
                                   const float (&O)[kCount], const float (&inverse)[2]) {
  constexpr int kColumnGroups = kCount / 4;  // of 8 columns
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const int lane = thread & 31;
  const int first = info.row0 + tile::fragment_row(thread / 32, lane);
  const int quarter = (lane & 3) * 8;
  // Distances from the host, 0 for the batch of packed tensors. Where the kernel chose between 0
  // and a product, ptxas 13.0 read the 0 before it was written (docs/decisions.md).
  const Strides& strides = p.low_strides;
  std::int8_t* const to = p.o_low + info.batch * strides.batch +
                          (info.q_row + first) * strides.seq + info.head * strides.head + quarter;
#pragma unroll
  for (int g = 0; g < kColumnGroups; g += 4) {
    std::uint32_t words[4];  // two columns of row 0, then of row 1
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = 0;
      if (g + j < kColumnGroups) {
        const float* const x = O + 4 * (g + j);
        words[j] = prim::low_bits<kDType>(x[2] * inverse[1], x[3] * inverse[1], 0);
        words[j] = prim::low_bits<kDType>(x[0] * inverse[0], x[1] * inverse[0], words[j]);
      }
    }
    common::quad_transpose(words);
    if (g * 8 + quarter < p.head_dim_v) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned pick = i == 0 ? 0x5410 : 0x7632;
        if (first + 8 * i < info.rows) {
          *reinterpret_cast<uint2*>(to + 8 * i * strides.seq + g * 8) = make_uint2(
              __byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick));
        }
      }
    }
  }
}

}  // namespace pantile::hopper
