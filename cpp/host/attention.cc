// Plan: validate, take the first row of the kernel table that accepts, size it. Run: check the
// pointers, launch. Forward and backward share every step; only the types differ.
#include "pantile/attention.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "build_info.h"
#include "host/features.h"
#include "host/kernel_table.h"
#include "host/row_rules.h"
#include "host/shape.h"
#include "host/softmax.h"
#include "host/split.h"
#include "host/validate.h"
#include "pantile/quantize.h"

namespace pantile {
namespace {

using host::BackwardRow;
using host::ForwardRow;
using host::RowList;

constexpr Backend kFamilies[] = {Backend::hopper, Backend::ampere, Backend::cpu,
                                 Backend::reference};

const ForwardProblem& forward_part(const ForwardProblem& problem) {
  return problem;
}
const ForwardProblem& forward_part(const ForwardProblem&&) = delete;  // it would dangle
const ForwardProblem& forward_part(const BackwardProblem& problem) {
  return problem.forward;
}
const ForwardProblem& forward_part(const QuantizeProblem& problem) {
  return problem.forward;
}

DType dtype_of(const ForwardProblem& problem) {
  return problem.dtype;
}
DType dtype_of(const BackwardProblem& problem) {
  return problem.forward.dtype;
}
DType dtype_of(const QuantizeProblem& problem) {
  return problem.dtype;
}

// The softmax options concern the forward only.
Status softmax_rule_of(const KernelInfo& row, const ForwardProblem& problem) {
  return host::softmax_rule(row, problem);
}
template <class Problem>
Status softmax_rule_of(const KernelInfo&, const Problem&) {
  return Status();
}
void set_softmax(ForwardPlan* plan) {
  plan->softmax = host::only_softmax(plan->problem);
}
template <class Plan>
void set_softmax(Plan*) {}

template <class Problem>
Status validate_all(const Problem& problem, const DeviceProps& device, const PlanOptions& options) {
  Status status = host::validate(problem);
  if (status.ok()) {
    status = host::validate(device);
  }
  return status.ok() ? host::validate(options) : status;
}

template <class Row, class Problem>
Status split_rule_of(const Row&, const Problem&, const DeviceProps&) {
  return Status();
}
Status split_rule_of(const ForwardRow& row, const ForwardProblem& problem,
                     const DeviceProps& device) {
  const ForwardRow* unused = nullptr;
  return host::is_split(problem) ? host::find_split(row, problem, device, &unused) : Status();
}

// Ok, or why this row does not serve the problem.
template <class Row, class Problem>
Status consider(const Row& row, const Problem& problem, const DeviceProps& device,
                const PlanOptions& options) {
  const Backend backend = row.info.backend;
  if (options.backend == Backend::automatic && backend == Backend::reference) {
    return Status::error(StatusCode::unsupported,
                         "the reference is only taken when options.backend asks for it");
  }
  if (options.backend != Backend::automatic && options.backend != backend) {
    return Status::error(StatusCode::unsupported, "options.backend asks for %s",
                         backend_name(options.backend));
  }
  // First, because it says more than which rule of the row is broken as well.
  const bool on_gpu = backend == Backend::hopper || backend == Backend::ampere;
  if (on_gpu && device.device.type != DeviceType::cuda) {
    return Status::error(StatusCode::unsupported, "needs a CUDA device");
  }
  Status status =
      host::row_rule(row.info, forward_part(problem), dtype_of(problem), host::required(problem));
  if (status.ok()) {
    status = row.accept(row.info, problem, device);
  }
  if (status.ok()) {
    status = softmax_rule_of(row.info, problem);
  }
  if (status.ok()) {
    status = split_rule_of(row, problem, device);
  }
  if (status.ok() && !row.info.compiled) {
    return Status::error(StatusCode::unavailable, "it would serve, but this build has no CUDA: %s",
                         PANTILE_CUDA_REASON);
  }
  return status;
}

// How much a row has in common with a problem: the best of a family explains its refusal.
int likeness(const KernelInfo& row, const ForwardProblem& problem, DType input) {
  const bool dtype = row.dtype == input;
  const bool dims = row.head_dim >= problem.head_dim && row.head_dim_v >= problem.head_dim_v;
  const bool mask = row.mask == MaskKind::any || row.mask == mask_kind(problem);
  return 4 * dtype + 2 * dims + mask;
}

// Of a family's rows, the one most like the problem; null when the family has none for this pass.
template <class Row>
const Row* closest_row(RowList<Row> list, Backend family, const ForwardProblem& problem,
                       DType input) {
  const Row* closest = nullptr;
  for (int i = 0; i < list.count; ++i) {
    const Row& row = list.rows[i];
    if (row.info.backend == family &&
        (closest == nullptr ||
         likeness(row.info, problem, input) > likeness(closest->info, problem, input))) {
      closest = &row;
    }
  }
  return closest;
}

void cut_plan(const ForwardRow& row, ForwardPlan* plan) {
  host::cut_keys(row, plan);
}
template <class Row, class Plan>
void cut_plan(const Row&, Plan*) {}

// "no forward kernel serves this problem. hopper: ... ampere: ... cpu: ..."
template <class Row, class Problem>
Status refusal(RowList<Row> list, const Problem& problem, const DeviceProps& device,
               const PlanOptions& options) {
  const char* pass = pass_name(list.rows[0].info.pass);
  char reasons[Status::kMessageCapacity] = {0};
  int length = 0;
  StatusCode code = StatusCode::unsupported;
  for (const Backend family : kFamilies) {
    const bool asked = options.backend == Backend::automatic ? family != Backend::reference
                                                             : family == options.backend;
    const Row* row = closest_row(list, family, forward_part(problem), dtype_of(problem));
    const int room = Status::kMessageCapacity - length;
    if (!asked || row == nullptr || room <= 1) {
      continue;
    }
    const Status reason = consider(*row, problem, device, options);
    if (reason.code() == StatusCode::unavailable) {
      code = StatusCode::unavailable;
    }
    length += std::snprintf(reasons + length, static_cast<std::size_t>(room), " %s: %s.",
                            backend_name(family), reason.message());
  }
  if (length == 0) {
    return Status::error(code, "%s has no %s kernels", backend_name(options.backend), pass);
  }
  return Status::error(code, "no %s kernel serves this problem.%s", pass, reasons);
}

template <class Row, class Problem, class Plan>
Status make_plan(RowList<Row> list, const Problem& problem, const DeviceProps& device,
                 const PlanOptions& options, Plan* plan) {
  if (plan == nullptr) {
    return Status::error(StatusCode::invalid_argument, "plan is null");
  }
  Status status = validate_all(problem, device, options);
  if (!status.ok()) {
    return status;
  }
  const Problem canonical = host::canonical(problem);
  for (int i = 0; i < list.count; ++i) {
    const Row& row = list.rows[i];
    if (consider(row, canonical, device, options).ok()) {
      *plan = Plan();
      plan->problem = canonical;
      plan->device = device;
      plan->kernel = &row.info;
      set_softmax(plan);
      if (!host::writes_nothing(canonical)) {
        row.configure(plan);
        cut_plan(row, plan);
      }
      return Status();
    }
  }
  return refusal(list, canonical, device, options);
}

// The row that a plan was made for, whose `info` it points to; null if it points elsewhere.
template <class Row>
const Row* row_of(RowList<Row> list, const KernelInfo* kernel) {
  static_assert(std::is_standard_layout_v<Row> && offsetof(Row, info) == 0);
  const auto offset =
      reinterpret_cast<std::uintptr_t>(kernel) - reinterpret_cast<std::uintptr_t>(list.rows);
  const std::uintptr_t number = offset / sizeof(Row);
  const bool inside = number < static_cast<std::uintptr_t>(list.count) && offset % sizeof(Row) == 0;
  return inside ? list.rows + number : nullptr;
}

template <class Row, class Plan, class Tensors>
Status run_row(RowList<Row>, const Row& row, const Plan& plan, const Tensors& tensors,
               void* workspace, void* stream) {
  return row.run(plan, tensors, workspace, stream);
}
Status run_row(RowList<ForwardRow> list, const ForwardRow& row, const ForwardPlan& plan,
               const ForwardTensors& tensors, void* workspace, void* stream) {
  return plan.num_splits > 1 ? host::run_split(row, row_of(list, plan.prefix_kernel), plan, tensors,
                                               workspace, stream)
                             : row.run(plan, tensors, workspace, stream);
}

template <class Row, class Plan, class Tensors>
Status launch(RowList<Row> list, const Plan& plan, const Tensors& tensors, void* workspace,
              void* stream) {
  const Row* const row = row_of(list, plan.kernel);
  if (row == nullptr) {
    return Status::error(StatusCode::invalid_argument,
                         "plan.kernel is not a row of the %s kernels; make the plan with plan_%s",
                         pass_name(list.rows[0].info.pass), pass_name(list.rows[0].info.pass));
  }
  if (row->run == nullptr) {
    return Status::error(StatusCode::unavailable, "%s: this build has no CUDA: %s", row->info.name,
                         PANTILE_CUDA_REASON);
  }
  Status status = host::validate_tensors(plan.problem, tensors);
  if (status.ok()) {
    status = host::validate_workspace(plan.workspace, workspace);
  }
  if (!status.ok() || host::writes_nothing(plan.problem)) {
    return status;
  }
  return run_row(list, *row, plan, tensors, workspace, stream);
}

template <class Row, class Problem>
int explain(RowList<Row> list, const Problem& problem, const DeviceProps& device,
            const PlanOptions& options, Verdict* verdicts, int capacity) {
  const Status status = validate_all(problem, device, options);
  const Problem canonical = status.ok() ? host::canonical(problem) : problem;
  bool taken = false;
  for (int i = 0; i < list.count && i < capacity; ++i) {
    Verdict& verdict = verdicts[i];
    verdict.kernel = &list.rows[i].info;
    verdict.reason = status.ok() ? consider(list.rows[i], canonical, device, options) : status;
    verdict.chosen = verdict.reason.ok() && !taken;
    taken = taken || verdict.chosen;
    verdict.closest = &list.rows[i] == closest_row(list, verdict.kernel->backend,
                                                   forward_part(canonical), dtype_of(canonical));
  }
  return list.count;
}

}  // namespace

Status plan_forward(const ForwardProblem& problem, const DeviceProps& device,
                    const PlanOptions& options, ForwardPlan* plan) {
  return make_plan(host::forward_rows(), problem, device, options, plan);
}

Status plan_backward(const BackwardProblem& problem, const DeviceProps& device,
                     const PlanOptions& options, BackwardPlan* plan) {
  return make_plan(host::backward_rows(), problem, device, options, plan);
}

Status plan_quantize(const QuantizeProblem& problem, const DeviceProps& device,
                     const PlanOptions& options, QuantizePlan* plan) {
  return make_plan(host::quantize_rows(), problem, device, options, plan);
}

Status run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                   void* stream) {
  return launch(host::forward_rows(), plan, tensors, workspace, stream);
}

Status run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                    void* stream) {
  return launch(host::backward_rows(), plan, tensors, workspace, stream);
}

Status run_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                    void* stream) {
  return launch(host::quantize_rows(), plan, tensors, workspace, stream);
}

int explain_forward(const ForwardProblem& problem, const DeviceProps& device,
                    const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain(host::forward_rows(), problem, device, options, verdicts, capacity);
}

int explain_backward(const BackwardProblem& problem, const DeviceProps& device,
                     const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain(host::backward_rows(), problem, device, options, verdicts, capacity);
}

int explain_quantize(const QuantizeProblem& problem, const DeviceProps& device,
                     const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain(host::quantize_rows(), problem, device, options, verdicts, capacity);
}

}  // namespace pantile
