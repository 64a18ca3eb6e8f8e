#include "common/bias.h"

#include "core/softmax_state.h"

namespace pantile::common {
namespace {

// Whether the elements 2 k and 2 k + 1 of every row of the bias can be read at once.
bool has_pairs(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return bias.base_align_bytes >= 2 * dtype_bytes(problem.variant.bias_dtype) &&
         bias.batch % 2 == 0 && bias.head % 2 == 0 && bias.query % 2 == 0 &&
         problem.seqlen_k % 2 == 0;
}

// Whether rows of a bias of 16 bits that has pairs can be copied in pieces of 16 bytes.
bool has_chunks(const BiasLayout& bias) {
  constexpr std::int64_t kChunk = 8;
  return bias.base_align_bytes >= 16 && bias.batch % kChunk == 0 && bias.head % kChunk == 0 &&
         bias.query % kChunk == 0 && bias.query < std::int64_t{1} << 30;
}

}  // namespace

BiasForm bias_form(const ForwardProblem& problem) {
  if (!problem.variant.has_bias) {
    return BiasForm::none;
  }
  const bool pairs = has_pairs(problem);
  if (problem.variant.bias_dtype == DType::f32) {
    return pairs ? BiasForm::pair32 : BiasForm::single32;
  }
  return !pairs                             ? BiasForm::single16
         : has_chunks(problem.variant.bias) ? BiasForm::tile16
                                            : BiasForm::pair16;
}

bool is_shared_bias(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return (bias.batch == 0 && problem.batch > 1) || (bias.head == 0 && problem.heads_q > 1) ||
         (bias.query == 0 && problem.seqlen_q > 1);
}

bool is_bias_alone(const BackwardProblem& problem) {
  return problem.wants_grad_bias && (problem.deterministic || !is_shared_bias(problem.forward));
}

BiasLayout grad_bias_layout(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  const BiasLayout& bias = forward.variant.bias;
  const bool parts = has_bias_parts(problem);
  BiasLayout layout;
  std::int64_t elements = forward.seqlen_k;
  const auto axis = [&elements](bool shared, std::int64_t size, std::int64_t* to) {
    *to = shared ? 0 : elements;
    elements *= shared ? 1 : size;
  };
  axis(bias.query == 0, forward.seqlen_q, &layout.query);
  axis(bias.head == 0 && !parts, forward.heads_q, &layout.head);
  axis(bias.batch == 0 && !parts, forward.batch, &layout.batch);
  return layout;
}

std::size_t grad_bias_bytes(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  const BiasLayout& bias = forward.variant.bias;
  const bool parts = has_bias_parts(problem);
  return static_cast<std::size_t>((bias.batch == 0 && !parts ? 1 : forward.batch) *
                                  (bias.head == 0 && !parts ? 1 : forward.heads_q) *
                                  (bias.query == 0 ? 1 : forward.seqlen_q) * forward.seqlen_k) *
         sizeof(float);
}

Status bias_gradient_rule(const BackwardProblem& problem) {
  if (problem.wants_grad_bias && problem.deterministic && problem.forward.variant.bias.query == 0 &&
      problem.forward.seqlen_q > 1) {
    return Status::error(StatusCode::unsupported,
                         "deterministic is true, and the bias is shared by queries: this kernel "
                         "adds its gradient in any order");
  }
  return Status();
}

void add_bias(const Variant& variant, const VariantTensors& tensors, attn::VariantParams* params) {
  params->bias = tensors.bias;
  params->bias_batch = variant.bias.batch;
  params->bias_head = variant.bias.head;
  params->bias_query = variant.bias.query;
  params->bias_factor = core::kLog2E / params->unit;
}

void add_bias_gradient(const BackwardProblem& problem, float* to, attn::VariantParams* params) {
  const BiasLayout layout = grad_bias_layout(problem);
  params->grad_bias = to;
  params->grad_bias_batch = layout.batch;
  params->grad_bias_head = layout.head;
  params->grad_bias_query = layout.query;
}

}  // namespace pantile::common
