// Sequences, heads and masks of a job, as the kernels of both passes look at them.
#pragma once

#include "cpu/isa/pack.h"
#include "cpu/kernels.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

using core::Span;

constexpr float kHidden = -__builtin_huge_valf();  // score of a pair that the mask hides

// Rows of a sequence: the first `length` take part, `room` are there to be written.
struct Extent {
  int length;
  int room;
};

PANTILE_INLINE Extent extent_of(const core::SequenceSide& side, int batch) {
  core::SequenceSide whole = side;
  whole.seqused = nullptr;
  const int room = core::max_of(core::locate_sequence(whole, batch).length, 0);
  return Extent{core::clamp(core::locate_sequence(side, batch).length, 0, room), room};
}

// First element of a head of a sequence.
template <class Element>
PANTILE_INLINE typename Element::Raw* head_address(const Operand& operand, int batch, int head) {
  return static_cast<typename Element::Raw*>(operand.data) +
         core::locate_sequence(operand.side, batch).offset + head * operand.head_stride;
}

PANTILE_INLINE Rows rows_of(DType dtype, const Operand& operand, int batch, int head, Span span,
                            int dim) {
  const std::int64_t offset = core::locate_sequence(operand.side, batch).offset +
                              head * operand.head_stride + span.begin * operand.side.seq_stride;
  return Rows{static_cast<const char*>(operand.data) + offset * dtype_bytes(dtype),
              operand.side.seq_stride, span.size(), dim, dtype};
}

// LSE, dLSE and delta of a head of a sequence. `rows` are the queries.
PANTILE_INLINE float* head_values(const RowValues& values, const core::SequenceSide& rows,
                                  int batch, int head) {
  const std::int64_t row = rows.cu_seqlens != nullptr ? core::locate_sequence(rows, batch).row : 0;
  return values.data + batch * values.batch_stride + head * values.head_stride + row;
}

PANTILE_INLINE core::Mask mask_of(const Job& job, int rows, int keys) {
  return core::make_mask(rows, keys, job.window_left, job.window_right);
}

// Keys that some row of `rows` sees.
PANTILE_INLINE Span keys_seen(const core::Mask& mask, Span rows) {
  return Span{core::visible_keys(mask, rows.begin).begin,
              core::visible_keys(mask, rows.end - 1).end};
}

// Writes rows of zeros, in the tensor's own strides.
inline void clear_rows(DType dtype, const Operand& operand, int batch, int head, Span span,
                       int dim) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    typename Element::Raw* base = head_address<Element>(operand, batch, head);
    for (int row = span.begin; row < span.end; ++row) {
      for (int d = 0; d < dim; d += kLanes) {
        write_row<Element>(base + row * operand.side.seq_stride, d, dim, Floats{});
      }
    }
  });
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
