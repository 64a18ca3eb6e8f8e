#include "hopper/variant.h"

#include <cinttypes>

#include "common/expressions.h"
#include "core/dropout.h"
#include "core/softmax_state.h"
#include "expression/print.h"
#include "hopper/forward/config.h"
#include "hopper/mask.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

// Cells of the dropout mask (core/dropout.h) have 16 rows and 16 keys; so have tiles, whose first
// row and key are multiples of 16.
constexpr std::int64_t kCell = 16;

}  // namespace

VariantHooks variant_hooks(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  VariantHooks hooks;
  hooks.softcap = variant.softcap > 0.0f;
  hooks.alibi = variant.has_alibi;
  hooks.bias = common::bias_form(problem);
  hooks.dropout = variant.dropout > 0;
  hooks.mask_forms = mask_forms(variant);
  hooks.mask_clauses = has_clauses(variant);
  hooks.score = variant.score;
  hooks.mask = variant.mask_expression;
  hooks.keys = problem.page_size > 0 ? KeyPlace::pages
               : problem.has_k_begin ? KeyPlace::ranges
                                     : KeyPlace::rows;
  hooks.shift = problem.has_mask_shift;
  return hooks;
}

VariantHooks variant_hooks(const BackwardProblem& problem) {
  VariantHooks hooks = variant_hooks(problem.forward);
  hooks.grad_alibi = problem.wants_grad_alibi;
  hooks.grad_bias = problem.wants_grad_bias;
  hooks.bias_alone = common::is_bias_alone(problem);
  hooks.grad_captured = problem.wants_grad_captured;
  return hooks;
}

namespace {

Status captured_rule(const BackwardProblem& problem) {
  if (problem.deterministic) {
    return Status::error(kUnsupported,
                         "deterministic is true; this kernel adds gradients of captured tensors in "
                         "any order");
  }
  if (!expression::programs_of(problem.forward.variant.score).facts.is_affine) {
    return Status::error(kUnsupported,
                         "this kernel has gradients of captured tensors where the score is s plus "
                         "something without s");
  }
  return Status();
}

}  // namespace

Status variant_rule(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  if (variant.dropout > 0 &&
      (variant.query_offset % kCell != 0 || variant.key_offset % kCell != 0)) {
    return Status::error(kUnsupported,
                         "dropout's query_offset is %" PRId64 " and its key_offset %" PRId64
                         "; this kernel needs multiples of 16",
                         variant.query_offset, variant.key_offset);
  }
  return common::score_rule(variant);
}

bool needs_other_shape(const VariantHooks& hooks, int kernel_head_dim) {
  const bool large =
      hooks.mask != Expression::none || hooks.mask_forms != 0 ||
      (hooks.score != Expression::none && expression::programs_of(hooks.score).facts.is_large);
  return kernel_head_dim <= 64 && (hooks.dropout || hooks.bias != BiasForm::none || large);
}

ForwardConfig forward_config(const ForwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const ForwardShapes shapes = forward_shapes(row.head_dim, row.head_dim_v, row.mask);
  const bool main = plan.tile_q == shapes.main.tile_q() && plan.tile_k == shapes.main.tile_k;
  const ForwardConfig& config = main ? shapes.main : shapes.other;
  return variant_hooks(plan.problem).bias == BiasForm::tile16 && has_bias_tile(config)
             ? with_bias_tile(config)
             : config;
}

bool takes_raw_scores(const Variant& variant) {
  return variant.softcap > 0.0f || common::has_raw_score(variant);
}

Status variant_rule(const BackwardProblem& problem) {
  const Variant& variant = problem.forward.variant;
  const Status forward = common::score_rule(variant);
  if (!forward.ok()) {
    return forward;
  }
  const char* const gradient = problem.wants_grad_alibi  ? "ALiBi slopes"
                               : problem.wants_grad_bias ? "bias"
                                                         : nullptr;
  if (gradient != nullptr && variant.softcap > 0.0f) {
    return Status::error(kUnsupported,
                         "softcap is %g; this kernel has the gradient of the %s without it only",
                         static_cast<double>(variant.softcap), gradient);
  }
  if (problem.deterministic && mask_forms(variant) != 0) {
    return Status::error(kUnsupported,
                         "deterministic is true; this kernel has that without a mask only");
  }
  // Sums in integers rest on a bound of dS: a weight times dP - delta, and no slope above 1.
  if (problem.deterministic && variant.score != Expression::none &&
      !expression::programs_of(variant.score).facts.is_affine) {
    return Status::error(kUnsupported,
                         "deterministic is true; with a score this kernel needs one that is s plus "
                         "something without s for it");
  }
  if (problem.wants_grad_captured != 0) {
    const Status status = captured_rule(problem);
    if (!status.ok()) {
      return status;
    }
  }
  return common::bias_gradient_rule(problem);
}

attn::VariantParams variant_params(const ForwardProblem& problem, const VariantTensors& tensors) {
  const Variant& variant = problem.variant;
  attn::VariantParams params{};
  params.unit = problem.scale * core::kLog2E;
  params.logit_scale = variant.has_alibi ? core::kLn2 : problem.scale;
  if (variant.softcap > 0.0f) {
    const float inner = problem.scale / variant.softcap;
    params.cap_inner = needs_exact_softcap(problem.dtype) ? 2.0f * core::kLog2E * inner : inner;
    params.cap_log2 = variant.softcap * core::kLog2E;
    params.unit = params.cap_log2;
    params.logit_scale = variant.has_alibi ? core::kLn2 : variant.softcap;
  }
  params.alibi_slopes = tensors.alibi_slopes;
  params.alibi_batch = variant.alibi_by_batch ? problem.heads_q : 0;
  common::add_bias(variant, tensors, &params);
  params.dropout_seed = tensors.dropout_seed;
  params.dropout_add = static_cast<std::uint32_t>(256 - variant.dropout) * 0x01010101u;
  params.keep_scale = core::dropout_scale(variant.dropout);
  params.batch_offset = static_cast<std::uint32_t>(variant.batch_offset);
  params.head_offset = static_cast<std::uint32_t>(variant.head_offset);
  params.row_offset = static_cast<std::uint32_t>(variant.query_offset);
  params.key_offset = static_cast<std::uint32_t>(variant.key_offset);
  params.mask = mask_params(problem, tensors);
  if (variant.score != Expression::none || variant.mask_expression != Expression::none) {
    common::add_expressions(variant, problem.scale, tensors, &params);
  }
  return params;
}

}  // namespace pantile::hopper
