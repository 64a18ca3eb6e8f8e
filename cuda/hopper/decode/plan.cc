// Which decode and append problems the hopper kernels serve. No CUDA headers.
#include "decode/plan.h"

#include "hopper/device_rule.h"
#include "hopper/plan.h"

namespace pantile::hopper {

Status accept_decode(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device) {
  Status status = device_rule(device);
  return status.ok() ? decode::accept(row, problem, decode::SharedClass::large) : status;
}

void configure_decode(DecodePlan* plan) {
  decode::configure(plan, decode::SharedClass::large);
}

Status schedule_decode(const DecodePlan&, const KvTensors&, std::int32_t*, void*) {
  return Status();  // every block finds its work by itself
}

Status accept_append(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device) {
  static_cast<void>(row);
  const Status status = device_rule(device);
  return status.ok() ? decode::accept_append(problem) : status;
}

void configure_append(AppendPlan* plan) {
  decode::configure_append(plan);
}

}  // namespace pantile::hopper
