// What else may make a problem acceptable when copies of the same shape do not: head dims padded
// with zeros, and a scale whose sign, or zero, goes into Q. Python makes the copies and asks again.
#pragma once

#include <cstdint>

#include "pantile/pantile.h"

namespace pantile::python {

// Bits of the answer, behind the copy bits of planner.h.
inline constexpr unsigned kPadHeadDims = 128, kFoldScale = 256;
inline constexpr std::int64_t kHeadDimStep = 8;  // 16 bytes: what every GPU kernel wants

inline std::int64_t padded_head_dim(std::int64_t dim) {
  return (dim + kHeadDimStep - 1) / kHeadDimStep * kHeadDimStep;
}

// Of a contiguous [.., rows, heads, dim].
inline Layout dense_layout(std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return Layout{rows * heads * dim, heads * dim, dim, 16};
}

inline void pad_head_dims(ForwardProblem* p) {
  p->head_dim = padded_head_dim(p->head_dim);
  p->head_dim_v = padded_head_dim(p->head_dim_v);
  p->q = dense_layout(p->seqlen_q, p->heads_q, p->head_dim);
  p->k = dense_layout(p->seqlen_k, p->heads_k, p->head_dim);
  p->v = dense_layout(p->seqlen_k, p->heads_k, p->head_dim_v);
  p->o = dense_layout(p->seqlen_q, p->heads_q, p->head_dim_v);
}

inline void pad_head_dims(BackwardProblem* p) {
  pad_head_dims(&p->forward);
  p->grad_o = p->forward.o;
  p->grad_q = p->forward.q;
  p->grad_k = p->forward.k;
  p->grad_v = p->forward.v;
}

// Q is multiplied by -1 or 0, and the scale becomes positive.
inline void fold_scale(ForwardProblem* p) {
  p->q = dense_layout(p->seqlen_q, p->heads_q, p->head_dim);
  p->scale = p->scale == 0.0f ? 1.0f : -p->scale;
}

inline ForwardProblem& forward_of(ForwardProblem& problem) {
  return problem;
}
inline ForwardProblem& forward_of(BackwardProblem& problem) {
  return problem.forward;
}
inline ForwardProblem& forward_of(QuantizeProblem& problem) {
  return problem.forward;
}

// Leaves the unit of the softmax to the kernel table; whether that is a change.
template <class Problem>
bool forget_softmax(Problem* problem) {
  SoftmaxOptions& softmax = forward_of(*problem).softmax;
  const SoftmaxUnit before = softmax.unit;
  softmax.unit = SoftmaxUnit::automatic;
  softmax.tensor_quarters = SoftmaxOptions().tensor_quarters;
  return before != SoftmaxUnit::automatic;
}

// The smallest set of changes after which `accepts` says yes, which `problem` then has; 0 when none
// helps.
template <class Problem, class Accepts>
unsigned changes_that_help(Problem* problem, const Accepts& accepts) {
  const Problem original = *problem;
  const ForwardProblem& p = forward_of(*problem);
  const bool odd = p.head_dim % kHeadDimStep != 0 || p.head_dim_v % kHeadDimStep != 0;
  const unsigned possible = (odd ? kPadHeadDims : 0u) | (p.scale <= 0.0f ? kFoldScale : 0u);
  for (const unsigned changes : {kPadHeadDims, kFoldScale, kPadHeadDims | kFoldScale}) {
    if ((changes & ~possible) != 0) {
      continue;
    }
    if ((changes & kPadHeadDims) != 0) {
      pad_head_dims(problem);
    }
    if ((changes & kFoldScale) != 0) {
      fold_scale(&forward_of(*problem));
    }
    if (accepts()) {
      return changes;
    }
    *problem = original;
  }
  return 0;
}

// FP8 operands have one form.
template <class Accepts>
unsigned changes_that_help(QuantizeProblem*, const Accepts&) {
  return 0;
}

}  // namespace pantile::python
