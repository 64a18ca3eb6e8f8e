// Which kernels of a plan are compiled at run time. No entry of this family lists a feature that
// asks for one, so that every plan is served by what is in the library.
#include "ampere/plan.h"

namespace pantile::ampere {

Status list_kernels(const ForwardPlan&, std::vector<jit::Request>*) {
  return Status();
}

Status list_kernels(const BackwardPlan&, std::vector<jit::Request>*) {
  return Status();
}

}  // namespace pantile::ampere
