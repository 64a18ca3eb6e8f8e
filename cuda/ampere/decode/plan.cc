// Which decode and append problems the ampere kernels serve. No CUDA headers.
#include "decode/plan.h"

#include "ampere/plan.h"
#include "ampere/rules.h"

namespace pantile::ampere {

Status accept_decode(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = decode::accept(row, problem, decode::SharedClass::small);
  }
  return status.ok() ? build_rule(row, device) : status;
}

void configure_decode(DecodePlan* plan) {
  decode::configure(plan, decode::SharedClass::small);
}

Status schedule_decode(const DecodePlan&, const KvTensors&, std::int32_t*, void*) {
  return Status();  // every block finds its work by itself
}

Status accept_append(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = decode::accept_append(problem);
  }
  return status.ok() ? build_rule(row, device) : status;
}

void configure_append(AppendPlan* plan) {
  decode::configure_append(plan);
}

}  // namespace pantile::ampere
