// Host half of the ampere backend, compiled by the C++ compiler and without CUDA headers, so that
// plans can be made and explained on any machine.
#pragma once

#include "pantile/plan.h"
#include "pantile/status.h"

namespace pantile::ampere {

Status accept_forward(const KernelInfo& row, const ForwardProblem& problem,
                      const DeviceProps& device);
void configure_forward(ForwardPlan* plan);

Status accept_backward(const KernelInfo& row, const BackwardProblem& problem,
                       const DeviceProps& device);
void configure_backward(BackwardPlan* plan);

}  // namespace pantile::ampere
