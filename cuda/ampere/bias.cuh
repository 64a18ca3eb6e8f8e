// A bias of 16 bits whose rows begin at multiples of 16 bytes: each warp copies its piece of a tile
// into shared memory by cp.async, a step ahead, and reads it as fragments (core/bias_piece.h). A
// row is read in runs of 64 or 128 bytes, where loads of pairs touch 8 lines of 16 bytes each.
#pragma once

#include <cstdint>

#include "attn/variant.cuh"
#include "attn/variant_params.h"
#include "core/bias_piece.h"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "prim/cp_async.cuh"
#include "prim/matrix.cuh"
#include "prim/special_registers.cuh"
#include "prim/unpack.cuh"

namespace pantile::ampere {

// Of the bias of one head of one sequence: where a piece begins, and the sequence's lengths.
struct BiasPlace {
  int batch, head;
  int row, key;
  int rows, keys;
};

// Starts the copies of a piece to `to`. All lanes have read what lay there. `at.key` is a multiple
// of 8. Zeros for rows and keys that do not exist.
template <class Piece>
PANTILE_DEVICE void copy_bias(const attn::VariantParams& p, const BiasPlace& at, std::uint32_t to) {
  const int lane = prim::fresh_thread_index() % 32;
  const int chunk = Piece::copy_chunk(lane);
  const int first = Piece::copy_row(lane);
  const int key = at.key + chunk * 8;
  const int bytes = core::bias_chunk_bytes(key, at.keys);
  const std::int64_t element =
      at.batch * p.bias_batch + at.head * p.bias_head + (at.row + first) * p.bias_query + key;
  const char* const from = static_cast<const char*>(p.bias) + 2 * element;
  const std::int64_t step = 2 * Piece::kCopyRows * p.bias_query;
#pragma unroll
  for (int i = 0; i < Piece::kCopies; ++i) {
    const int row = first + i * Piece::kCopyRows;
    prim::copy_async_16_of(to + Piece::place(row, chunk), from + i * step,
                           at.row + row < at.rows ? bytes : 0);
  }
}

// The same for keys that do not begin at a multiple of 8, which the attended part of a sequence may
// not (common/attended.h): element by element, by way of registers.
template <class Piece>
PANTILE_DEVICE void copy_bias_elements(const attn::VariantParams& p, const BiasPlace& at,
                                       unsigned char* to) {
  const int lane = prim::fresh_thread_index() % 32;
  const int chunk = Piece::copy_chunk(lane);
  const int key = at.key + chunk * 8;
#pragma unroll 1
  for (int i = 0; i < Piece::kCopies; ++i) {
    const int row = Piece::copy_row(lane) + i * Piece::kCopyRows;
    const std::int64_t element =
        at.batch * p.bias_batch + at.head * p.bias_head + (at.row + row) * p.bias_query + key;
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(p.bias) + element;
    std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (at.row + row < at.rows && key + c < at.keys) {
        words[c / 2] |= static_cast<std::uint32_t>(__ldg(from + c)) << (c % 2 * 16);
      }
    }
    *reinterpret_cast<uint4*>(to + Piece::place(row, chunk)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The hook of the forward (attn/variant.cuh), of 16 rows. The kernel copies; nothing waits here.
template <DType kDType, int kTileK>
struct CopiedBias : attn::SomeVariant {
  using Piece = core::BiasPiece<16, kTileK>;
  static constexpr int kSharedBytes = Piece::kBytes;

  std::uint32_t piece;
  float factor;

  PANTILE_DEVICE void begin(const attn::VariantParams& p, const attn::FragmentPlace& at) {
    piece = at.shared;
    factor = p.bias_factor;
  }
  template <int kCount>
  PANTILE_DEVICE void score(float (&S)[kCount]) const {
    static_assert(kCount == kTileK / 2);
    const int lane = prim::fresh_thread_index() % 32;
#pragma unroll
    for (int e = 0; e < kCount; e += 8) {
      std::uint32_t blocks[4];
      prim::load_matrix_x4(blocks, piece + Piece::query_major(lane, 0, e / 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = prim::unpack<kDType>(blocks[i]);
        S[e + 2 * i] = fmaf(values.x, factor, S[e + 2 * i]);
        S[e + 2 * i + 1] = fmaf(values.y, factor, S[e + 2 * i + 1]);
      }
    }
  }
};

// The backward: adds 16 keys `key16` of a piece to base-2 logits whose rows are keys.
template <DType kDType, class Piece>
PANTILE_DEVICE void add_transposed_bias(float (&logits)[Piece::kRows / 2], std::uint32_t piece,
                                        int key16) {
  const int lane = prim::fresh_thread_index() % 32;
#pragma unroll
  for (int e = 0; e < Piece::kRows / 2; e += 8) {
    std::uint32_t blocks[4];
    prim::load_matrix_x4_transposed(blocks, piece + Piece::key_major(lane, e / 8, key16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 values = prim::unpack<kDType>(blocks[i]);
      logits[e + 2 * i] = fmaf(values.x, core::kLog2E, logits[e + 2 * i]);
      logits[e + 2 * i + 1] = fmaf(values.y, core::kLog2E, logits[e + 2 * i + 1]);
    }
  }
}

}  // namespace pantile::ampere
