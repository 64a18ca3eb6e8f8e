// Softmax options of kernels that have one softmax only, and the names of the options.
#pragma once

#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::host {

// Ok, or why a row other than the ampere ones, which choose themselves, cannot do what is asked.
Status softmax_rule(const KernelInfo& row, const ForwardProblem& problem);

// What such a row does.
SoftmaxOptions only_softmax(const ForwardProblem& problem);

}  // namespace pantile::host
