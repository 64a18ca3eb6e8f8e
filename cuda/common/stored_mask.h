// Host half of the masks of tensors (attn/tile_mask.cuh) on both GPU families: what the kernels are
// told of them. No CUDA headers.
#pragma once

#include "attn/tile_mask.h"
#include "pantile/problem.h"

namespace pantile::common {

// Whether a mask has more clauses than one.
bool has_clauses(const Variant& variant);

attn::MaskParams mask_params(const ForwardProblem& problem, const VariantTensors& tensors);

}  // namespace pantile::common
