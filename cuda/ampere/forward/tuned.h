// What set_tuned_softmax() was told. No CUDA headers.
#pragma once

#include "pantile/plan.h"

namespace pantile::ampere {

struct TunedChoice {
  SoftmaxUnit unit = SoftmaxUnit::automatic;
  const char* source = "";  // lives as long as the process
};

// Whether one was measured for calls of this class.
bool find_tuned(const KernelInfo& row, const ForwardProblem& problem, const DeviceProps& device,
                TunedChoice* choice);

}  // namespace pantile::ampere
