// The tensors of a problem as sizes and strides, and questions about a whole problem.
#pragma once

#include <cstdint>

#include "pantile/kv.h"
#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/registry.h"

namespace pantile::host {

inline constexpr int kAxes = 3;  // batch, seq, head; the dim axis always has stride 1

// One of q, k, v, o and their gradients. A packed tensor has one "batch" that holds all its rows.
struct TensorShape {
  std::int64_t sizes[kAxes];
  std::int64_t dim;
  bool empty() const { return sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0; }
};

// q, or o when `dim` is head_dim_v.
inline TensorShape query_shape(const ForwardProblem& p, std::int64_t dim) {
  return p.packed_q ? TensorShape{{1, p.total_q, p.heads_q}, dim}
                    : TensorShape{{p.batch, p.seqlen_q, p.heads_q}, dim};
}

// k, or v when `dim` is head_dim_v.
inline TensorShape key_shape(const ForwardProblem& p, std::int64_t dim) {
  if (p.page_size > 0) {
    return TensorShape{{p.pages, p.page_size, p.heads_k}, dim};
  }
  return p.packed_k ? TensorShape{{1, p.total_k, p.heads_k}, dim}
                    : TensorShape{{p.batch, p.seqlen_k, p.heads_k}, dim};
}

// The variant of canonical(problem).
Variant canonical_variant(const ForwardProblem& problem);

// The same problem with what cannot matter written one way, so that kernels need not look for it:
// window sides that hide nothing become unbounded, strides along axes of at most one element become
// those of a contiguous tensor, totals of dense tensors are filled in. `problem` is valid.
ForwardProblem canonical(const ForwardProblem& problem);
BackwardProblem canonical(const BackwardProblem& problem);
QuantizeProblem canonical(const QuantizeProblem& problem);

// What decode and append read of a cache problem: the rest at its default.
KvProblem canonical_decode(const KvProblem& problem);
KvProblem canonical_append(const KvProblem& problem);
inline TensorShape kv_query_shape(const KvProblem& p, std::int64_t dim) {
  return p.packed_q ? TensorShape{{1, p.total_q, p.heads_q}, dim}
                    : TensorShape{{p.batch, p.seqlen_q, p.heads_q}, dim};
}
inline TensorShape kv_new_shape(const KvProblem& p, std::int64_t dim) {
  return p.packed_new ? TensorShape{{1, p.total_new, p.heads_k}, dim}
                      : TensorShape{{p.batch, p.seqlen_new, p.heads_k}, dim};
}
inline TensorShape cache_shape(const KvProblem& p, std::int64_t dim) {
  return TensorShape{{p.blocks, p.page_size > 0 ? p.page_size : p.block_slots, p.heads_k}, dim};
}

// Whether a run has nothing to write.
bool writes_nothing(const ForwardProblem& problem);
bool writes_nothing(const BackwardProblem& problem);
bool writes_nothing(const QuantizeProblem& problem);

// The problem's attention with what quantising does not read written one way.
ForwardProblem operands_only(const QuantizeProblem& problem);

}  // namespace pantile::host
