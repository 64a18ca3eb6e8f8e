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

// The rows of one side that belong to one sequence.
struct SequenceRows {
  int batch;
  int first;      // of a packed tensor; 0 when dense
  int length;     // rows that exist
  int allocated;  // rows of the tensor, more than `length` if seqused cuts the sequence short
};

// `side` carries no strides.
PANTILE_DEVICE SequenceRows sequence_rows(const core::SequenceSide& side, int batch) {
  const core::Sequence used = core::locate_sequence(side, batch);
  core::SequenceSide whole = side;
  whole.seqused = nullptr;
  return SequenceRows{batch, side.cu_seqlens == nullptr ? 0 : static_cast<int>(used.row),
                      used.length, core::locate_sequence(whole, batch).length};
}

PANTILE_DEVICE tile::HeadRows head_rows(const Operand& x, const SequenceRows& sequence, int head) {
  return tile::HeadRows{static_cast<std::uint16_t*>(x.data) + sequence.batch * x.batch +
                            sequence.first * x.seq + head * x.head,
                        x.seq};
}

}  // namespace pantile::ampere
