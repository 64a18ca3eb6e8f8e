#include "common/expressions.h"

#include "common/kernel_text.h"

#include "core/softmax_state.h"
#include "expression/print.h"

namespace pantile::common {
namespace {

constexpr const char* kOpening = "namespace pantile::attn {\n";
constexpr const char* kClosing = "}  // namespace pantile::attn\n";

}  // namespace

Status score_rule(const Variant& variant) {
  if (variant.score == Expression::none) {
    return Status();
  }
  const bool natural = !expression::programs_of(variant.score).facts.is_affine;
  const char* const other = variant.softcap > 0.0f        ? "softcap"
                            : variant.has_alibi           ? "alibi"
                            : variant.has_bias && natural ? "bias"
                                                          : nullptr;
  if (other != nullptr) {
    return Status::error(
        StatusCode::unsupported,
        "%s and score are given; this kernel computes one of them: write the %s in "
        "the expression",
        other, other);
  }
  return Status();
}

bool has_raw_score(const Variant& variant) {
  return variant.score != Expression::none &&
         !expression::programs_of(variant.score).facts.is_affine;
}

void add_expressions(const Variant& variant, float scale, const VariantTensors& tensors,
                     attn::VariantParams* params) {
  params->score_unit = scale;
  if (variant.score != Expression::none) {
    const expression::Facts& facts = expression::programs_of(variant.score).facts;
    const float unit = facts.form == expression::ScoreForm::natural ? 1.0f : scale;
    params->unit = facts.factor * unit * core::kLog2E;
    params->logit_scale =
        facts.form == expression::ScoreForm::sloped ? core::kLn2 : facts.factor * unit;
    params->cap_log2 = facts.grad_factor * core::kLog2E;
  }
  int place = 0;
  const auto take = [&](const CapturedTensor* from, int count) {
    for (int i = 0; i < count; ++i, ++place) {
      attn::CapturedParams& to = params->captured[place];
      to.data = from[i].data;
      for (int axis = 0; axis < kMaxCapturedAxes; ++axis) {
        to.stride[axis] = from[i].stride[axis];
        to.last[axis] = static_cast<int>(from[i].size[axis] - 1);
      }
    }
  };
  take(tensors.score_captured, captured_count(variant.score));
  take(tensors.mask_captured, captured_count(variant.mask_expression));
}

std::string forward_expressions(Expression score, Expression mask, bool exact) {
  if (score == Expression::none && mask == Expression::none) {
    return std::string();
  }
  std::string text = kOpening;
  if (score != Expression::none) {
    text += expression::print_forward_score(expression::function_of(score), exact);
  }
  if (mask != Expression::none) {
    text += expression::print_forward_mask(expression::function_of(mask), captured_count(score));
  }
  return text + kClosing;
}

std::string backward_expressions(Expression score, Expression mask, bool exact,
                                 std::uint32_t gradients) {
  if (score == Expression::none && mask == Expression::none) {
    return std::string();
  }
  std::string text = kOpening;
  if (score != Expression::none) {
    text += expression::print_backward_score(expression::function_of(score), exact, gradients);
  }
  if (mask != Expression::none) {
    text += expression::print_backward_mask(expression::function_of(mask), captured_count(score));
  }
  text += std::string("template <>\nstruct UserHooks<1> {\n") +
          "  using Score = " + (score != Expression::none ? "UserScore" : "UserHooks<0>::Score") +
          ";\n  using Mask = " + (mask != Expression::none ? "UserMask" : "UserHooks<0>::Mask") +
          ";\n};\n";
  return text + kClosing;
}

}  // namespace pantile::common
