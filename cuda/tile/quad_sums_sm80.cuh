// Sums in global memory to which many blocks add the accumulators of m16n8 tiles.
//
// A tile is 128 words in the order of the accumulators, so that adding them is one 16-byte addition
// a lane where the GPU has it (sm_90 on), and else four additions that each cover 128 bytes:
//   word lane * 4 + element         sm_90 on, fp32
//   word element * 32 + lane        before sm_90, and integers
// Whoever reads the sums must be compiled for the same GPU as whoever adds to them.
#pragma once

#include <cstdint>

#include "prim/address.cuh"
#include "prim/global_add.cuh"

namespace pantile::tile {

inline constexpr int kQuadTileWords = 128;

// Two rows' 8 neighbouring columns, as a reader wants them: of row g (`lane` 0..7) and row g + 8.
struct QuadRows {
  float upper[8], lower[8];
};

PANTILE_DEVICE constexpr bool adds_whole_quads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// `tile`: the 128 words of one m16n8 tile.
PANTILE_DEVICE void add_quad(float* tile, int lane, const float (&x)[4]) {
  if constexpr (adds_whole_quads()) {
    prim::global_add(tile + lane * 4, x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      atomicAdd(tile + c * 32 + lane, x[c]);
    }
  }
}

// The same with integers: `upper` and `lower` scale the two rows before they are rounded.
PANTILE_DEVICE void add_quad_integers(float* tile, int lane, const float (&x)[4], float upper,
                                      float lower) {
  int* const words = reinterpret_cast<int*>(tile) + lane;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    atomicAdd(words + c * 32, __float2int_rn(x[c] * (c < 2 ? upper : lower)));
  }
}

PANTILE_DEVICE QuadRows read_quads(const float* tile, int g, bool integers) {
  QuadRows rows;
  const float4* const words = reinterpret_cast<const float4*>(tile);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (adds_whole_quads() && !integers) {
      const float4 x = words[g * 4 + i];  // lane 4 g + i
      rows.upper[2 * i] = x.x;
      rows.upper[2 * i + 1] = x.y;
      rows.lower[2 * i] = x.z;
      rows.lower[2 * i + 1] = x.w;
    } else {
      const float4 x = words[i * 8 + g];  // element i of lanes 4 g to 4 g + 3
      float* const to = (i < 2 ? rows.upper : rows.lower) + i % 2;
      const float lanes[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[2 * j] = integers ? static_cast<float>(__float_as_int(lanes[j])) : lanes[j];
      }
    }
  }
  return rows;
}

}  // namespace pantile::tile
