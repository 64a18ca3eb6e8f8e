// Which kernels of a plan are compiled at run time: the main kernel of a plan with hooks.
#include "ampere/plan.h"
#include "ampere/variant.h"

namespace pantile::ampere {

Status list_kernels(const ForwardPlan& plan, std::vector<jit::Request>* requests) {
  if (plan.blocks > 0 && variant_hooks(plan.problem).any()) {
    requests->push_back(forward_request(plan));
  }
  return Status();
}

Status list_kernels(const BackwardPlan& plan, std::vector<jit::Request>* requests) {
  if (plan.blocks > 0 && variant_hooks(plan.problem.forward).any()) {
    requests->push_back(backward_request(plan));
  }
  return Status();
}

}  // namespace pantile::ampere
