// Where a sequence lives: dense batches, packed (varlen) tensors, and partly used ones.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

// One side (queries or keys) of a batch. Dense: cu_seqlens is null, every sequence has `max_length`
// rows and starts at batch * batch_stride. Packed: sequence b holds rows cu_seqlens[b] to
// cu_seqlens[b + 1] of one tensor. seqused, if any, cuts a sequence short.
struct SequenceSide {
  std::int64_t batch_stride = 0;  // elements; dense only
  std::int64_t seq_stride = 0;    // elements
  int max_length = 0;             // rows
  const std::int32_t* cu_seqlens = nullptr;
  const std::int32_t* seqused = nullptr;
};

struct Sequence {
  std::int64_t offset;  // elements from the tensor's first element to this sequence's first row
  std::int64_t row;  // rows before this sequence in packed numbering (batch * max_length if dense)
  int length;        // rows that exist
};

// A length is never negative, not even that of a decreasing cu_seqlens: kernels may count on it.
PANTILE_HD constexpr Sequence locate_sequence(const SequenceSide& side, int batch) {
  Sequence sequence{};
  if (side.cu_seqlens != nullptr) {
    const int begin = side.cu_seqlens[batch];
    sequence.offset = begin * side.seq_stride;
    sequence.row = begin;
    sequence.length = max_of(side.cu_seqlens[batch + 1] - begin, 0);
  } else {
    sequence.offset = batch * side.batch_stride;
    sequence.row = static_cast<std::int64_t>(batch) * side.max_length;
    sequence.length = side.max_length;
  }
  if (side.seqused != nullptr) {
    sequence.length = clamp(side.seqused[batch], 0, sequence.length);
  }
  return sequence;
}

// Grouped-query attention: which key/value head serves a query head.
struct Heads {
  int heads_q, heads_k;  // heads_q is a multiple of heads_k; both positive
  PANTILE_HD constexpr int group() const { return heads_q / heads_k; }
  PANTILE_HD constexpr int key_head(int query_head) const { return query_head / group(); }
  PANTILE_HD constexpr int first_query_head(int key_head) const { return key_head * group(); }
};

}  // namespace pantile::core
