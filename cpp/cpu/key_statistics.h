#pragma once

#include "pantile/problem.h"

namespace pantile::cpu {

// What a problem with KeyStatistics::written asks for: the bounds. The means, which only kernels of
// GPUs take from dQ, are 0.
void write_key_statistics(const ForwardProblem& problem, const BackwardTensors& tensors);

}  // namespace pantile::cpu
