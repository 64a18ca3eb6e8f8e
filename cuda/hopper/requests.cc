// Which kernels of a plan are compiled at run time: those with hooks of a variant.
#include "hopper/plan.h"
#include "hopper/variant.h"

namespace pantile::hopper {
namespace {

template <class Plan>
Status list_hooked(const Plan& plan, std::vector<jit::Request>* requests) {
  if (variant_hooks(plan.problem).any() && plan.blocks > 0) {
    requests->push_back(variant_request(plan));
  }
  return Status();
}

}  // namespace

Status list_kernels(const ForwardPlan& plan, std::vector<jit::Request>* requests) {
  return list_hooked(plan, requests);
}

Status list_kernels(const BackwardPlan& plan, std::vector<jit::Request>* requests) {
  return list_hooked(plan, requests);
}

}  // namespace pantile::hopper
