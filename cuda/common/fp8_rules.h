// What the FP8 kernels of every family ask of a problem, and the plan of their quantiser.
#pragma once

#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/status.h"

namespace pantile::common {

// Of the shape and the format; the quantiser and the forward alike.
Status fp8_shape_rule(const ForwardProblem& p);

// Of all that the quantiser is given.
Status quantize_rule(const QuantizeProblem& problem);

void configure_quantize(QuantizePlan* plan);

}  // namespace pantile::common
