// Host half of an additive bias and of its gradient (pantile/variant.h) on both GPU families. No
// CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/variant_params.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::common {

// How kernels may read a bias: elements one by one, pairs of neighbouring keys, or tiles of 16 bits
// that are copied in pieces of 16 bytes, where a kernel has a place for them, else pairs.
enum class BiasForm { none, single16, pair16, single32, pair32, tile16 };
inline constexpr int kBiasForms = 6;

constexpr bool is_single(BiasForm form) {
  return form == BiasForm::single16 || form == BiasForm::single32;
}

BiasForm bias_form(const ForwardProblem& problem);

// Whether more than one pair of a query and a key has the same element of the bias.
bool is_shared_bias(const ForwardProblem& problem);

// Whether each head of each sequence has a gradient of the bias of its own at first, in fp32
// [batch][heads_q][seqlen_q][seqlen_k], whose sum is taken in order.
constexpr bool has_bias_parts(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  const BiasLayout& bias = forward.variant.bias;
  return problem.wants_grad_bias && problem.deterministic &&
         ((bias.batch == 0 && forward.batch > 1) || (bias.head == 0 && forward.heads_q > 1));
}

constexpr std::size_t bias_parts_bytes(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  return has_bias_parts(problem) ? static_cast<std::size_t>(forward.batch * forward.heads_q *
                                                            forward.seqlen_q * forward.seqlen_k) *
                                       sizeof(float)
                                 : 0;
}

// Whether no two pairs add to the same element of what the main kernel leaves of the gradient.
bool is_bias_alone(const BackwardProblem& problem);

// Where the main kernel leaves the gradient of the bias: distances, and how many bytes that has. It
// is the gradient itself, contiguous in the bias's shape, or with has_bias_parts() the workspace.
BiasLayout grad_bias_layout(const BackwardProblem& problem);
std::size_t grad_bias_bytes(const BackwardProblem& problem);

// Ok, or why the gradient of the bias is not served.
Status bias_gradient_rule(const BackwardProblem& problem);

// What kernels are told of a bias; params->unit is that of the scores it is added to.
void add_bias(const Variant& variant, const VariantTensors& tensors, attn::VariantParams* params);

// The same of its gradient, which lies at `to`.
void add_bias_gradient(const BackwardProblem& problem, float* to, attn::VariantParams* params);

}  // namespace pantile::common
