// What a row of the kernel table says of itself, whatever its family.
#pragma once

#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::host {

// Ok, or why the row's dtype, head dims, mask or features do not fit a canonical problem. `dtype`
// is that of the tensors as they come in; `required` what the problem asks for (host/features.h).
Status row_rule(const KernelInfo& row, const ForwardProblem& problem, DType dtype,
                FeatureSet required);

}  // namespace pantile::host
