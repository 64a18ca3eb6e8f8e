// Loads of the FP8 quantiser: eight neighbouring channels of a row at a time, whatever their type,
// and which rows a block of operands holds.
#pragma once

#include <cstdint>

#include "core/blocked.h"
#include "pantile/dtype.h"
#include "prim/e4m3.cuh"
#include "prim/half2.cuh"

namespace pantile::common {

// Eight elements as loaded.
template <DType kDType>
struct Chunk {
  static constexpr int kWords = 2 * dtype_bytes(kDType);
  std::uint32_t words[kWords];

  // Zeros unless `exists`.
  PANTILE_DEVICE void load(const void* tensor, std::int64_t element, bool exists) {
    const auto* from = static_cast<const unsigned char*>(tensor) + element * dtype_bytes(kDType);
    if constexpr (kWords == 2) {
      const uint2 w = exists ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
      words[0] = w.x;
      words[1] = w.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 w =
            exists ? __ldg(reinterpret_cast<const uint4*>(from) + i) : uint4{0, 0, 0, 0};
        words[4 * i] = w.x;
        words[4 * i + 1] = w.y;
        words[4 * i + 2] = w.z;
        words[4 * i + 3] = w.w;
      }
    }
  }

  // Exact.
  PANTILE_DEVICE float element(int i) const {
    if constexpr (kDType == DType::f32) {
      return __uint_as_float(words[i]);
    } else if constexpr (kDType == DType::bf16) {
      const std::uint32_t w = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? w << 16 : w & 0xffff0000u);
    } else {
      const std::uint32_t pair =
          kDType == DType::f16 ? words[i / 2] : prim::unpack_e4m3(words[i / 4] >> (i / 2 % 2 * 16));
      return i % 2 == 0 ? prim::low_float(pair) : prim::high_float(pair);
    }
  }
};

// One of Q, K and V.
struct QuantizeSide {
  const void* data;
  core::SequenceSide sequences;  // strides in elements
  std::int64_t head_stride;
  int heads, dim;
  int blocks;           // of a head
  int sequence_blocks;  // of a sequence; dense tensors only
};

// 128 rows of one head of an operand, of which `rows` exist.
struct RowBlock {
  int batch, head;
  int rows;              // 0: the block holds no row of a sequence
  std::int64_t index;    // among all blocks of all heads
  std::int64_t element;  // of the first row, in the input
};

PANTILE_DEVICE RowBlock locate_block(const QuantizeSide& side, int batches, int work) {
  RowBlock block;
  block.index = work;
  block.head = work / side.blocks;
  int tile = work % side.blocks;  // within its sequence, once that is known
  if (side.sequences.cu_seqlens == nullptr) {
    block.batch = tile / side.sequence_blocks;
    tile -= block.batch * side.sequence_blocks;
  } else {
    block.batch = 0;
    for (int above = batches; above - block.batch > 1;) {
      const int middle = (block.batch + above) / 2;
      if (core::first_block(side.sequences, middle) <= tile) {
        block.batch = middle;
      } else {
        above = middle;
      }
    }
    tile -= static_cast<int>(core::first_block(side.sequences, block.batch));
  }
  const int begin = tile * core::kBlockedRows;
  const core::Sequence sequence = core::locate_sequence(side.sequences, block.batch);
  block.rows = core::clamp(sequence.length - begin, 0, core::kBlockedRows);
  block.element =
      sequence.offset + begin * side.sequences.seq_stride + block.head * side.head_stride;
  return block;
}

}  // namespace pantile::common
