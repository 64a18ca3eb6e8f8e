// Where FP8 operands keep the rows of their sequences: in blocks of 128 rows, none of which holds
// rows of two sequences, so that a tile never loads a neighbour's rows and scales belong to one
// sequence. Forms of the tensors: pantile/quantize.h.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"
#include "core/scaling.h"
#include "core/sequence.h"

namespace pantile::core {

inline constexpr int kBlockedRows = 128;
inline constexpr int kCodeAlign = 16;  // bytes; rows of Q and K are padded to it

// First block of a sequence; side.max_length counts for dense tensors only.
PANTILE_HD constexpr std::int64_t first_block(const SequenceSide& side, int batch) {
  return side.cu_seqlens != nullptr
             ? first_packed_block(side.cu_seqlens[batch], batch, kBlockedRows)
             : static_cast<std::int64_t>(batch) * ceil_div(side.max_length, kBlockedRows);
}

// V is kept by channel. Within a group of 16 keys, key u stands in column
// 4 * (u % 8 / 2) + 2 * (u / 8) + u % 2: a thread of the score product's accumulator holds the
// weights of keys 2q, 2q + 1, 2q + 8 and 2q + 9, and these are the four neighbouring bytes that it
// supplies to the product with V.
PANTILE_HD constexpr int value_column(int key) {
  return (key & ~15) + (key % 8 / 2) * 4 + (key / 8 % 2) * 2 + key % 2;
}

PANTILE_HD constexpr int value_key(int column) {
  return (column & ~15) + (column / 4 % 4) * 2 + (column / 2 % 2) * 8 + column % 2;
}

// ---- the mean of K ------------------------------------------------------------------------------

// Float sums in a fixed order, so that every quantiser subtracts the same bits. Within a block,
// partial sum t of 16 adds rows t, t + 16, ..., t + 112; then partial t += partial t + o for o = 8,
// 4, 2, 1. Over blocks, partial j of 32 adds blocks j, j + 32, ...; then o = 16, 8, 4, 2, 1. A
// sequence's mean is its sum divided by its length.
inline constexpr int kMeanRowSums = 16;
inline constexpr int kMeanBlockSums = 32;

// What is added for an element: NaN and Inf count as zero, or one would reach rows that do not
// attend to it.
PANTILE_HD constexpr float mean_term(float x) {
  return is_finite(x) ? x : 0.0f;
}

// Sums of finite numbers may overflow, and a sequence may be empty. Any vector may be subtracted
// from all keys; in these cases it is zero.
PANTILE_HD constexpr float channel_mean(float sum, int length) {
  return mean_term(sum / static_cast<float>(length));
}

PANTILE_HD constexpr float fold_sums(float* sums, int count) {
  for (int o = count / 2; o > 0; o /= 2) {
    for (int t = 0; t < o; ++t) {
      sums[t] += sums[t + o];
    }
  }
  return sums[0];
}

}  // namespace pantile::core
