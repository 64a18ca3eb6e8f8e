// Host half of expressions (cpp/expression) on both GPU families: what a kernel is told of them.
// Their text is in kernel_text.h. No CUDA headers.
#pragma once

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

}  // namespace pantile::common
