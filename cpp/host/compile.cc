// Kernels that are compiled at run time, by plan: now (compile) or for another machine
// (compile_to_folder).
#include <vector>

#include "ampere/plan.h"
#include "hopper/plan.h"
#include "host/split.h"
#include "jit/kernel.h"
#include "jit/load.h"
#include "pantile/jit.h"

namespace pantile {
namespace {

template <class Plan>
Status list_kernels(const Plan& plan, std::vector<jit::Request>* requests) {
  if (plan.kernel == nullptr) {
    return Status::error(StatusCode::invalid_argument,
                         "plan.kernel is null; make the plan with plan_forward or plan_backward");
  }
  switch (plan.kernel->backend) {
    case Backend::hopper: return hopper::list_kernels(plan, requests);
    case Backend::ampere: return ampere::list_kernels(plan, requests);
    case Backend::automatic:
    case Backend::cpu:
    case Backend::reference: break;
  }
  return Status();
}

// Those of a plan whose keys are cut are its launches'.
Status list_kernels(const ForwardPlan& plan, std::vector<jit::Request>* requests) {
  ForwardPlan launches[2];
  const int count = plan.num_splits > 1 ? host::split_launches(plan, launches) : 0;
  Status status = count == 0 ? list_kernels<ForwardPlan>(plan, requests) : Status();
  for (int i = 0; i < count && status.ok(); ++i) {
    status = list_kernels<ForwardPlan>(launches[i], requests);
  }
  return status;
}

template <class Plan>
Status compile_plan(const Plan& plan) {
  std::vector<jit::Request> requests;
  const Status status = list_kernels(plan, &requests);
  if (!status.ok() || requests.empty()) {
    return status;
  }
  return jit::on_device(plan.device.device.index, [&requests] {
    Status found;
    for (std::size_t i = 0; i < requests.size() && found.ok(); ++i) {
      const jit::Kernel* unused = nullptr;
      found = jit::find_kernel(requests[i], nullptr, &unused);
    }
    return found;
  });
}

template <class Plan>
Status describe_plan(const Plan& plan, jit::KernelState* states, int capacity, int* count) {
  std::vector<jit::Request> requests;
  Status status = list_kernels(plan, &requests);
  *count = static_cast<int>(requests.size());
  for (int i = 0; i < *count && i < capacity && status.ok(); ++i) {
    status = jit::look_up(requests[static_cast<std::size_t>(i)], &states[i]);
  }
  return status;
}

template <class Plan>
Status write_plan(const Plan& plan, const char* folder, jit::KernelFacts* facts, int capacity,
                  int* count) {
  if (folder == nullptr || *folder == '\0') {
    return Status::error(StatusCode::invalid_argument, "folder is %s; it must be a path",
                         folder == nullptr ? "null" : "empty");
  }
  std::vector<jit::Request> requests;
  Status status = list_kernels(plan, &requests);
  for (std::size_t i = 0; i < requests.size() && status.ok(); ++i) {
    jit::KernelFacts unused;
    jit::KernelFacts* const to = static_cast<int>(i) < capacity ? &facts[i] : &unused;
    status = jit::compile_to_folder(requests[i], folder, to);
  }
  *count = static_cast<int>(requests.size());
  return status;
}

}  // namespace

Status compile(const ForwardPlan& plan) {
  return compile_plan(plan);
}

Status compile(const BackwardPlan& plan) {
  return compile_plan(plan);
}

namespace jit {

Status describe(const ForwardPlan& plan, KernelState* states, int capacity, int* count) {
  return describe_plan(plan, states, capacity, count);
}

Status describe(const BackwardPlan& plan, KernelState* states, int capacity, int* count) {
  return describe_plan(plan, states, capacity, count);
}

Status compile_to_folder(const ForwardPlan& plan, const char* folder, KernelFacts* facts,
                         int capacity, int* count) {
  return write_plan(plan, folder, facts, capacity, count);
}

Status compile_to_folder(const BackwardPlan& plan, const char* folder, KernelFacts* facts,
                         int capacity, int* count) {
  return write_plan(plan, folder, facts, capacity, count);
}

}  // namespace jit
}  // namespace pantile
