// Host half of expressions (cpp/expression) on both GPU families: the structs that the text of a
// kernel needs for them, and what the kernel is told. No CUDA headers.
#pragma once

#include <cstdint>
#include <string>

#include "attn/variant_params.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::common {

// What of the scores before an expression no kernel computes.
Status score_rule(const Variant& variant);

// Whether a backward starts from scores without the row's LSE: the score is not s plus something.
bool has_raw_score(const Variant& variant);

// Units of scores, and what the expressions capture. `scale`: natural logits in a unit of the raw
// scores.
void add_expressions(const Variant& variant, float scale, const VariantTensors& tensors,
                     attn::VariantParams* params);

// The structs of the expressions in namespace attn, or nothing without any. `exact`: of functions
// that have a fast form. `gradients`: of what the score captures, as
// BackwardProblem::wants_grad_captured.
std::string forward_expressions(Expression score, Expression mask, bool exact);
std::string backward_expressions(Expression score, Expression mask, bool exact,
                                 std::uint32_t gradients);

}  // namespace pantile::common
