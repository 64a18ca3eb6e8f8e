// What the consumer warpgroups of both backward kernels do to their accumulators. S and dP are held
// transposed: rows of the 64 x N fragment are keys, columns are queries. layout: prim/wgmma.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/quad_transpose.cuh"
#include "hopper/backward/params.cuh"
#include "prim/convert.cuh"
#include "prim/exp2_polynomial.cuh"
#include "prim/math.cuh"

namespace pantile::hopper {

// The thread's index in its warpgroup, read afresh. Values derived from it live only where they are
// used: kept across the loop they would cost registers that the accumulators need.
PANTILE_DEVICE int fresh_thread() {
  std::uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread & 127);
}

// Hides what the mask hides and keys past the end, in a fragment whose first key is `key` and first
// query `row` (both within the attended part).
template <MaskKind kMask, int kCount>
PANTILE_DEVICE void mask_scores(float (&S)[kCount], const core::Mask& mask, int key, int row,
                                float masked_score) {
  const int thread = fresh_thread();
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int my_key = key + thread / 32 * 16 + lane / 4 + 8 * i;
    const int first_column = row + 2 * (lane & 3);
    // Visible columns are [low, high), counted from the thread's first.
    int low = 0;
    int high = kCount;
    if constexpr (kMask != MaskKind::full) {
      low = my_key - mask.shift() - (kMask == MaskKind::window ? mask.right : 0) - first_column;
    }
    if constexpr (kMask == MaskKind::window) {
      high = my_key - mask.shift() + mask.left + 1 - first_column;
    }
    if (my_key >= mask.keys) {
      low = 2 * kCount;
    }
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * j + c;
        if (column < low || (kMask == MaskKind::window && column >= high)) {
          S[4 * j + 2 * i + c] = masked_score;
        }
      }
    }
  }
}

template <DType kDType, int kCount>
PANTILE_DEVICE void pack_fragment(std::uint32_t (&packed)[kCount / 8][4],
                                  const float (&values)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      packed[k][r] = prim::pack<kDType>(values[8 * k + 2 * r], values[8 * k + 2 * r + 1]);
    }
  }
}

// Writes 64 keys x (2 * kCount) columns of dK or dV. `out` points to key 0 of the tensor's attended
// part, `stride` is the distance of keys in elements, `key` the fragment's first.
template <DType kDType, int kCount>
PANTILE_DEVICE void store_fragment(std::uint16_t* out, std::int64_t stride,
                                   const float (&values)[kCount], float scale, int key, int keys,
                                   int columns) {
  const int lane = prim::lane_index();
  const int first_key = key + static_cast<int>(threadIdx.x & 127) / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int my_key = first_key + 8 * i;
    std::uint16_t* to = out + my_key * stride + (lane & 3) * 8;
#pragma unroll
    for (int g = 0; g < kCount / 16; ++g) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * g + 4 * j + 2 * i;
        words[j] = prim::pack<kDType>(values[at] * scale, values[at + 1] * scale);
      }
      common::quad_transpose(words);
      if (my_key < keys && g * 32 + (lane & 3) * 8 < columns) {
        *reinterpret_cast<uint4*>(to + g * 32) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Where the attended keys of this block's head begin in a gradient tensor.
PANTILE_DEVICE std::uint16_t* gradient_rows(void* gradient, const Layout& layout,
                                            const KeyTile& key_tile, bool packed, int first_key) {
  const std::int64_t sequence =
      packed ? key_tile.key_offset * layout.seq : key_tile.batch * layout.batch;
  return static_cast<std::uint16_t*>(gradient) + sequence + first_key * layout.seq +
         key_tile.key_head * layout.head;
}

// Keys that no query sees get zeros: those cut off at the front, and unused ones at the back. Every
// block looks after its own slice of the sequence. Called by kThreads threads.
template <int kTileK, int kThreads>
PANTILE_DEVICE void zero_unattended_keys(void* gradient, const Layout& layout, int columns,
                                         const KeyTile& key_tile, bool packed, int thread) {
  const int begin = key_tile.tile * kTileK;
  const int end = core::min_of(begin + kTileK, key_tile.key_capacity);
  const int attended_end = key_tile.first_key + key_tile.mask.keys;
  if (begin >= key_tile.first_key && end <= attended_end) {
    return;
  }
  std::uint16_t* rows = gradient_rows(gradient, layout, key_tile, packed, 0);
  const int vectors = columns / 8;
  for (int i = thread; i < (end - begin) * vectors; i += kThreads) {
    const int key = begin + i / vectors;
    if (key < key_tile.first_key || key >= attended_end) {
      *reinterpret_cast<uint4*>(rows + key * layout.seq + i % vectors * 8) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace pantile::hopper
