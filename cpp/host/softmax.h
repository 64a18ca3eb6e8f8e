// The rules and names of softmax options, and what kernels do that have one softmax only.
#pragma once

#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::host {

// The rules that the options must keep, whatever kernel runs; their messages name the argument, its
// value and what is allowed.
Status softmax_options_rule(const ForwardProblem& problem);

// Ok, or why a row other than the ampere ones, which choose themselves, cannot do what is asked.
Status softmax_rule(const KernelInfo& row, const ForwardProblem& problem);

// What such a row does.
SoftmaxOptions only_softmax(const ForwardProblem& problem);

}  // namespace pantile::host
