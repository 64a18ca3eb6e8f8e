// How a kernel of the ampere family finds a head of one sequence in its tensors.
#pragma once

#include <cstdint>

#include "core/sequence.h"
#include "pantile/problem.h"
#include "prim/address.cuh"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

// A tensor of 16-bit elements; strides in elements. `batch` is 0 for packed tensors, where a
// sequence starts at its first row instead.
struct Operand {
  void* data;
  std::int64_t batch, seq, head;
};

inline Operand make_operand(const void* data, const Layout& layout, bool packed) {
  return Operand{const_cast<void*>(data), packed ? 0 : layout.batch, layout.seq, layout.head};
}

// The same for a tensor of floats, each two 16-bit elements, as copies and tiles count them.
inline Operand make_operand_f32(const void* data, const Layout& layout, bool packed) {
  return Operand{const_cast<void*>(data), packed ? 0 : 2 * layout.batch, 2 * layout.seq,
                 2 * layout.head};
}

// The rows of one side that belong to one sequence.
struct SequenceRows {
  int batch;
  int first;      // of a packed tensor; 0 when dense
  int length;     // rows that exist
  int allocated;  // rows of the tensor, more than `length` if seqused cuts the sequence short
};

// What core::locate_sequence says of a side without strides, and the allocated length.
PANTILE_DEVICE SequenceRows sequence_rows(const core::SequenceSide& side, int batch) {
  SequenceRows rows{batch, 0, 0, side.max_length};
  if (side.cu_seqlens != nullptr) {
    rows.first = side.cu_seqlens[batch];
    rows.allocated = side.cu_seqlens[batch + 1] - rows.first;
  }
  rows.length = side.seqused == nullptr ? rows.allocated
                                        : core::clamp(side.seqused[batch], 0, rows.allocated);
  return rows;
}

PANTILE_DEVICE tile::HeadRows head_rows(const Operand& x, const SequenceRows& sequence, int head) {
  return tile::HeadRows{static_cast<std::uint16_t*>(x.data) + sequence.batch * x.batch +
                            sequence.first * x.seq + head * x.head,
                        x.seq};
}

}  // namespace pantile::ampere
