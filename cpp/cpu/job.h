// From a plan and its tensors to a job that the kernels and the reference understand.
#pragma once

#include "cpu/kernels.h"
#include "pantile/plan.h"

namespace pantile::cpu {

// `tensors` may be all null: then the job serves to measure scratch memory.
ForwardJob forward_job(const ForwardPlan& plan, const ForwardTensors& tensors);
BackwardJob backward_job(const BackwardPlan& plan, const BackwardTensors& tensors);
Fp8ForwardJob fp8_forward_job(const ForwardPlan& plan, const ForwardTensors& tensors);

// Rows of packed tensors before the first and after the last sequence, which belong to none. They
// are written like rows that see nothing: O and gradients 0, LSE -inf.
void clear_outside(const ForwardJob& job, const ForwardProblem& problem);
void clear_outside(const BackwardJob& job, const ForwardProblem& problem);

}  // namespace pantile::cpu
