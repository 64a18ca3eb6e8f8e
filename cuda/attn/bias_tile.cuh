// The hook of a bias of 16 bits whose rows begin at multiples of 16 bytes (attn/variant.cuh has the
// hooks, and a bias of any layout). A warp copies its 16 rows of a step into shared memory while
// the step before is at work, and reads them as fragments: 8 copies and 8 reads a lane and step of
// 128 keys, where loads of pairs are 32 and touch 8 lines each.
#pragma once

#include <cstdint>

#include "attn/variant.cuh"
#include "core/integer.h"
#include "prim/cp_async.cuh"
#include "prim/matrix.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::attn {

inline constexpr int kBiasTileRows = 16;  // that a warp has of a tile of scores

constexpr int bias_tile_bytes(int tile_k) {  // of a warp
  return kBiasTileRows * tile_k * 2;
}

template <DType kDType, int kTileK>
struct BiasTile : SomeVariant {
  static constexpr int kSharedBytes = bias_tile_bytes(kTileK);
  static constexpr int kChunks = kTileK / 8;                    // of 16 bytes, a row
  static constexpr int kCopies = kBiasTileRows * kChunks / 32;  // a lane and step
  static constexpr int kRowStep = kBiasTileRows / kCopies;      // rows between a lane's copies
  static_assert(32 % kChunks == 0 && kChunks >= 8);

  std::uint32_t to, from;  // of the lane's first copy, and of its row of blocks
  const unsigned char* first;
  std::int32_t stride;       // bytes between rows
  int rows_left, keys_left;  // below and right of the lane's first copy, from key 0
  float factor;

  PANTILE_DEVICE void begin(const VariantParams& p, const FragmentPlace& at) {
    const int lane = prim::lane_index();
    to = at.shared + place_of(lane / kChunks, lane % kChunks);
    from = at.shared + place_of(lane % 16, lane / 16);
    const int row = at.row - lane / 4 + lane / kChunks;
    stride = static_cast<std::int32_t>(p.bias_query) * 2;
    rows_left = core::max_of(at.rows - 1 - row, 0);
    keys_left = at.keys - lane % kChunks * 8;
    factor = p.bias_factor;
    const std::int64_t head = at.batch * p.bias_batch + at.head * p.bias_head;
    const int bounded = core::min_of(row, at.rows - 1);  // rows past the end are not stored
    first = static_cast<const unsigned char*>(p.bias) +
            2 * (head + bounded * p.bias_query + lane % kChunks * 8);
  }
  PANTILE_DEVICE void load_ahead(int key) const {
    __syncwarp();  // all lanes have read what lies there
    const int bytes = core::clamp(2 * (keys_left - key), 0, 16);
    const unsigned char* const row = first + 2 * std::int64_t{key};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const std::int64_t below = core::min_of(i * kRowStep, rows_left);
      prim::copy_async_16_of(row_place(i), bytes > 0 ? row + below * stride : first, bytes);
    }
    prim::commit_copies();
  }
  PANTILE_DEVICE void fetch(const VariantParams&, int) const {
    prim::wait_copies<0>();
    __syncwarp();
  }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
    static_assert(kCount == kTileK / 2);
#pragma unroll
    for (int e = 0; e < kCount; e += 8) {  // 16 rows, 16 columns
      std::uint32_t blocks[4];
      prim::load_matrix_x4(blocks, from ^ static_cast<std::uint32_t>(4 * e));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = prim::unpack<kDType>(blocks[i]);
        S[e + 2 * i] = fmaf(values.x, factor, S[e + 2 * i]);
        S[e + 2 * i + 1] = fmaf(values.y, factor, S[e + 2 * i + 1]);
      }
    }
  }

 private:
  // Chunks of a row are exchanged so that 8 rows of a column of chunks lie in all banks.
  static PANTILE_DEVICE std::uint32_t place_of(int row, int chunk) {
    return static_cast<std::uint32_t>((row * kChunks + (chunk ^ row % 8)) * 16);
  }
  // Of the lane's copy i. Its rows differ in bits of `row % 8` above those of the first one.
  PANTILE_DEVICE std::uint32_t row_place(int i) const {
    const int row = i * kRowStep;
    return (to ^ static_cast<std::uint32_t>(row % 8 * 16)) +
           static_cast<std::uint32_t>(row * kChunks * 16);
  }
};

}  // namespace pantile::attn
