// Sequences, heads and masks of a job, as the kernels of both passes look at them.
#pragma once

#include "cpu/isa/pack.h"
#include "cpu/kernels.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

using core::Span;

constexpr float kHidden = -__builtin_huge_valf();  // score of a pair that the mask hides

// First element of a head of a sequence.
template <class Element>
PANTILE_INLINE typename Element::Raw* head_address(const Operand& operand, int batch, int head) {
  return static_cast<typename Element::Raw*>(operand.data) + locate(operand.side, batch).offset +
         head * operand.head_stride;
}

PANTILE_INLINE Rows rows_of(DType dtype, const Operand& operand, int batch, int head, Span span,
                            int dim) {
  const std::int64_t offset = locate(operand.side, batch).offset + head * operand.head_stride +
                              span.begin * operand.side.seq_stride;
  return Rows{static_cast<const char*>(operand.data) + offset * dtype_bytes(dtype),
              operand.side.seq_stride, span.size(), dim, dtype};
}

// Rows of K or V. Those of pages are gathered in `to`, where the caller has room for them.
PANTILE_INLINE Rows key_rows(const Job& job, const Operand& operand, int batch, int head, Span span,
                             int dim, void* to) {
  if (job.pages.table == nullptr) {
    return rows_of(job.dtype, operand, batch, head, span, dim);
  }
  const std::int64_t bytes = dtype_bytes(job.dtype);
  for (int key = span.begin; key < span.end; ++key) {
    const std::int64_t offset =
        job.pages.offset(operand.side, batch, key) + head * operand.head_stride;
    __builtin_memcpy(static_cast<char*>(to) + (key - span.begin) * dim * bytes,
                     static_cast<const char*>(operand.data) + offset * bytes,
                     static_cast<std::size_t>(dim * bytes));
  }
  return Rows{to, dim, span.size(), dim, job.dtype};
}

// LSE, dLSE and delta of a head of a sequence. `rows` are the queries.
PANTILE_INLINE float* head_values(const RowValues& values, const Side& rows, int batch, int head) {
  const std::int64_t row = rows.cu_seqlens != nullptr ? locate(rows, batch).row : 0;
  return values.data + batch * values.batch_stride + head * values.head_stride + row;
}

// Keys that some row of `rows` sees.
PANTILE_INLINE Span keys_seen(const core::ShiftedMask& mask, Span rows) {
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
