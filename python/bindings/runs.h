// Running and explaining a plan for the tensors of a Python call.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "changes.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "request.h"
#include "scratch.h"
#include "unlocked.h"

namespace pantile::python {

inline void* stream_of(Device device) {
  void* stream = nullptr;  // without a framework: the default stream
  if (device.type == DeviceType::cuda && hooks().exchange != nullptr) {
    if (hooks().exchange->current_work_stream(dlpack::kCuda, device.index, &stream) != 0) {
      throw nb::python_error();
    }
  } else if (device.type == DeviceType::cuda && hooks().current_stream != nullptr) {
    const nb::object answer = call_python(hooks().current_stream, device.index);
    stream = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(answer));
  }
  return stream;
}

// Workspace of one run. `owner` keeps CUDA memory alive until the launch is in the stream.
struct Lent {
  nb::object owner;
  void* pointer = nullptr;
};

// The CUDA block that this thread was lent last for a device, stream and pass. Python owns it, for
// as long as the thread lives, and gives another one only when it is asked for another size.
struct LentBefore {
  int device;
  void* stream;
  Pass pass;
  Workspace size;
  void* pointer;
};

inline LentBefore& lent_before(Device device, void* stream, Pass pass) {
  thread_local std::vector<LentBefore> blocks;
  for (LentBefore& block : blocks) {
    if (block.device == device.index && block.stream == stream && block.pass == pass) {
      return block;
    }
  }
  blocks.push_back(LentBefore{device.index, stream, pass, Workspace{}, nullptr});
  return blocks.back();
}

// Checked mode, CPU: throws when the first bytes of the scratch are not zero.
inline void require_zero_scratch(const Workspace& workspace, Pass pass, const char* when) {
  const std::size_t wrong = cpu_scratch().nonzero_bytes(workspace.zeroed_bytes);
  if (wrong == 0) {
    return;
  }
  cpu_scratch().forget();
  throw std::runtime_error("workspace of the " + std::string(pass_name(pass)) +
                           " pass: " + std::to_string(wrong) + " of the first " +
                           std::to_string(workspace.zeroed_bytes) + " bytes are not zero " + when +
                           " the run; every run must leave them zero");
}

inline Lent lend(const Workspace& needed, Device device, void* stream, Pass pass) {
  Lent lent;
  if (needed.bytes == 0) {
    return lent;
  }
  if (device.type == DeviceType::cpu) {
    lent.pointer = cpu_scratch().lend(needed);
    if (checks_workspaces()) {
      require_zero_scratch(needed, pass, "before");
    }
    return lent;
  }
  if (hooks().lend_workspace == nullptr) {
    throw std::runtime_error("workspace on a CUDA device needs torch, which is not loaded");
  }
  // A captured run must not share a block with runs outside of its graph.
  const bool capturing = nb::cast<bool>(call_python(hooks().is_capturing));
  LentBefore& before = lent_before(device, stream, pass);
  if (!capturing && !checks_workspaces() && before.pointer != nullptr &&
      before.size.bytes == needed.bytes && before.size.zeroed_bytes == needed.zeroed_bytes) {
    lent.pointer = before.pointer;
    return lent;
  }
  before.pointer = nullptr;  // Python may free it, and then fail
  lent.owner =
      call_python(hooks().lend_workspace, device.index, reinterpret_cast<std::uintptr_t>(stream),
                  pass_name(pass), needed.bytes, needed.zeroed_bytes, capturing);
  lent.pointer = read_tensor(lent.owner, "workspace").data;
  if (!capturing) {
    before.size = needed;
    before.pointer = lent.pointer;
  }
  return lent;
}

// Checked mode: throws when a run did not leave zero what its plan says it does. A run that is
// being captured has not happened yet.
inline void check_after_run(const Workspace& needed, const Lent& lent, Device device, void* stream,
                            Pass pass) {
  if (!checks_workspaces() || needed.zeroed_bytes == 0) {
    return;
  }
  if (device.type == DeviceType::cpu) {
    require_zero_scratch(needed, pass, "after");
    return;
  }
  if (!lent.owner.is_valid() || nb::cast<bool>(call_python(hooks().is_capturing))) {
    return;
  }
  LentBefore& before = lent_before(device, stream, pass);
  const LentBefore kept = before;
  before.pointer = nullptr;  // not lent again if what follows throws
  nb::module_::import_("pantile._runtime")
      .attr("check_after_run")(lent.owner, pass_name(pass), needed.zeroed_bytes);
  before = kept;
}

inline Status run_plan(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                       void* stream) {
  return run_forward(plan, tensors, workspace, stream);
}
inline Status run_plan(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                       void* stream) {
  return run_backward(plan, tensors, workspace, stream);
}
inline Status run_plan(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                       void* stream) {
  return run_quantize(plan, tensors, workspace, stream);
}

// cu_seqlens and seqused that lie in host memory are checked on every call: that costs no
// synchronization, and a wrong entry would make a kernel read outside its tensors.
inline void check_host_sequences(const Request& request) {
  const ForwardProblem& problem = request.problem;
  const bool any =
      request.packed || problem.has_seqused_q || problem.has_seqused_k || problem.has_mask_shift;
  if (any && request.device.type == DeviceType::cpu) {
    raise_unless_ok(check_sequences(problem, request.tensors));
  }
}

// Copy bits and change bits (changes.h) that make some kernel accept a problem that all refuse, or
// 0. The problem is then what it will be after those copies. Without operands nothing can be
// copied.
template <class Plan, class Problem>
unsigned what_helps(Problem* problem, const DeviceProps& device, const PlanOptions& options,
                    std::initializer_list<Operand> operands) {
  const auto accepts = [&] {
    Plan plan;
    return make_plan(*problem, device, options, &plan).ok();
  };
  if (operands.size() == 0) {
    return 0;
  }
  const unsigned copies = copies_that_help(operands, accepts);
  return copies != 0 ? copies : changes_that_help(problem, accepts);
}

// The request whose backend has given way.
inline Request of_any_backend(const Request& request) {
  Request other = request;
  other.options.backend = Backend::automatic;
  other.backend_preferred = false;
  return other;
}

// Plans and runs. The answer is 0 when that was done, or the bits of the inputs that must be copied
// or changed before any kernel accepts; nothing has been launched then.
template <class Plan, class Problem, class Tensors>
unsigned plan_and_run(const Request& request, Problem* problem, const Tensors& tensors, Pass pass,
                      std::initializer_list<Operand> operands) {
  if (const unsigned copies = inexpressible(operands); copies != 0) {
    return copies;
  }
  check_host_sequences(request);
  const DeviceProps device = properties_of(request.device);
  Status status;
  const Plan* found = plan_cache<Problem, Plan>().find(*problem, device, request.options, &status);
  if (found == nullptr && status.code() == StatusCode::unsupported) {
    const unsigned bits = what_helps<Plan>(problem, device, request.options, operands);
    if (bits != 0) {
      return bits;
    }
    if (request.softmax_preferred && forget_softmax(problem)) {
      return plan_and_run<Plan>(request, problem, tensors, pass, operands);
    }
    if (request.backend_preferred) {
      return plan_and_run<Plan>(of_any_backend(request), problem, tensors, pass, operands);
    }
  }
  raise_unless_ok(status);
  const Plan plan = *found;  // the cache may change while the GIL is released
  void* stream = stream_of(request.device);
  const Lent workspace = lend(plan.workspace, request.device, stream, pass);
  {
    const Unlocked unlocked;
    status = run_plan(plan, tensors, workspace.pointer, stream);
  }
  if (status.ok()) {
    check_after_run(plan.workspace, workspace, request.device, stream, pass);
  }
  if (request.device.type == DeviceType::cpu) {
    cpu_scratch().trim();
  }
  raise_unless_ok(status);
  return 0;
}

// Raises what plan_and_run() would raise of a problem that no kernel serves, and does nothing else.
template <class Plan, class Problem>
void raise_unless_served(const Request& request, const Problem& problem) {
  Status status;
  const DeviceProps device = properties_of(request.device);
  if (plan_cache<Problem, Plan>().find(problem, device, request.options, &status) != nullptr) {
    return;
  }
  if (status.code() == StatusCode::unsupported && request.backend_preferred) {
    raise_unless_served<Plan>(of_any_backend(request), problem);
    return;
  }
  raise_unless_ok(status);
}

// No call copies a cache of keys.
inline unsigned run_forward_request(Request* request) {
  ForwardProblem& problem = request->problem;
  if (request->paged) {
    require_readable_pages(*request);
    return plan_and_run<ForwardPlan>(*request, &problem, request->tensors, Pass::forward,
                                     {{&request->q, &problem.q, kCopyQ}});
  }
  return plan_and_run<ForwardPlan>(*request, &problem, request->tensors, Pass::forward,
                                   {{&request->q, &problem.q, kCopyQ},
                                    {&request->k, &problem.k, kCopyK},
                                    {&request->v, &problem.v, kCopyV}});
}

// ---- explanations -------

inline int explain_problem(const ForwardProblem& problem, const DeviceProps& device,
                           const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain_forward(problem, device, options, verdicts, capacity);
}
inline int explain_problem(const BackwardProblem& problem, const DeviceProps& device,
                           const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain_backward(problem, device, options, verdicts, capacity);
}
inline int explain_problem(const QuantizeProblem& problem, const DeviceProps& device,
                           const PlanOptions& options, Verdict* verdicts, int capacity) {
  return explain_quantize(problem, device, options, verdicts, capacity);
}

// Where the softmax runs; other passes have no choice.
inline std::string softmax_text(const ForwardPlan& plan) {
  const SoftmaxOptions& softmax = plan.softmax;
  char text[160];
  std::snprintf(text, sizeof text, "%s, mode %s, tensor share %g%s, rescale threshold %g%s",
                softmax_unit_name(softmax.unit), softmax_mode_name(softmax.mode),
                softmax.tensor_quarters / 4.0, softmax.split_rows ? " by rows" : "",
                static_cast<double>(softmax.rescale_threshold),
                softmax.unit == SoftmaxUnit::tensor && plan.problem.wants_lse
                    ? ", LSE of the rounded weights"
                    : "");
  const std::string source = plan.softmax_source;
  return source.empty() ? text : std::string(text) + "; chosen: " + source;
}
template <class Plan>
std::string softmax_text(const Plan&) {
  return "";
}

// The parts that the keys are cut into; nothing where they are whole.
inline std::string splits_text(const ForwardPlan& plan) {
  if (plan.num_splits <= 1) {
    return "";
  }
  char text[192];
  const char* const chosen =
      plan.automatic_splits ? ", chosen by the model of the time" : ", as asked for";
  if (plan.prefix_kernel == nullptr) {
    std::snprintf(text, sizeof text, "%d, at multiples of %d keys%s", plan.num_splits,
                  plan.split_tile, chosen);
  } else {
    std::snprintf(text, sizeof text,
                  "%d, at multiples of %d keys, of them %d before the diagonal: %s, %d blocks%s",
                  plan.num_splits, plan.split_tile, plan.num_splits - 1, plan.prefix_kernel->name,
                  plan.prefix_blocks, chosen);
  }
  return text;
}
template <class Plan>
std::string splits_text(const Plan&) {
  return "";
}

inline nb::list verdict_list(const std::vector<Verdict>& verdicts) {
  nb::list rows;
  for (const Verdict& verdict : verdicts) {
    nb::dict row;
    row["kernel"] = verdict.kernel->name;
    row["backend"] = backend_name(verdict.kernel->backend);
    row["chosen"] = verdict.chosen;
    row["closest"] = verdict.closest;
    row["reason"] = verdict.reason.message();  // empty: the row would serve
    rows.append(row);
  }
  return rows;
}

// What one pass would do: {"copies": copy and change bits, "backend_gave_way", "kernel": name or
// None, "reason", "tile_q", "tile_k", "blocks", "workspace_bytes", "softmax", "splits", "o_low":
// whether the pass writes or reads the low bits of O, "rows": a verdict for each row of the table}.
// Everything but "copies" describes the problem after those copies. The plan that a call would
// have, with the copies that it would make first. `request` is then without what the environment
// preferred and no kernel has.
template <class Plan, class Problem>
Status plan_with_copies(Request* request, Problem* problem, std::initializer_list<Operand> operands,
                        unsigned* copies, Plan* plan) {
  *copies = inexpressible(operands);
  const DeviceProps device = properties_of(request->device);
  Status status = make_plan(*problem, device, request->options, plan);
  if (status.code() == StatusCode::unsupported) {
    *copies |= what_helps<Plan>(problem, device, request->options, operands);
    status = make_plan(*problem, device, request->options, plan);
  }
  if (status.code() != StatusCode::unsupported) {
    return status;
  }
  if (request->softmax_preferred && forget_softmax(problem)) {
    return plan_with_copies(request, problem, operands, copies, plan);
  }
  if (request->backend_preferred) {
    *request = of_any_backend(*request);
    return plan_with_copies(request, problem, operands, copies, plan);
  }
  return status;
}

// Compiles what a run would compile at its first call.
template <class Plan, class Problem>
void compile_pass(Request request, Problem* problem, std::initializer_list<Operand> operands) {
  unsigned unused = 0;
  Plan plan;
  Status status = plan_with_copies(&request, problem, operands, &unused, &plan);
  if (status.ok()) {
    const Unlocked unlocked;
    status = compile(plan);
  }
  raise_unless_ok(status);
}

// The kernels of a plan that are compiled at run time, as things stand.
template <class Plan>
nb::list run_time_kernels(const Plan& plan) {
  nb::list found;
  if constexpr (std::is_same_v<Plan, ForwardPlan> || std::is_same_v<Plan, BackwardPlan>) {
    std::vector<jit::KernelState> states(4);
    int count = 0;
    raise_unless_ok(jit::describe(plan, states.data(), static_cast<int>(states.size()), &count));
    states.resize(static_cast<std::size_t>(std::min(count, static_cast<int>(states.size()))));
    for (const jit::KernelState& state : states) {
      nb::dict one;
      one["name"] = state.name;
      one["origin"] = state.origin;
      one["in_memory"] = state.in_memory;
      one["registers"] = state.registers;
      one["spill_bytes"] = state.spill_bytes;
      one["advisories"] = state.advisories;
      found.append(one);
    }
  }
  return found;
}

template <class Plan, class Problem>
nb::dict explain_pass(Request request, Problem* problem, std::initializer_list<Operand> operands) {
  const bool preferred = request.backend_preferred;
  unsigned copies = 0;
  Plan plan;
  const Status status = plan_with_copies(&request, problem, operands, &copies, &plan);
  if (status.code() == StatusCode::invalid_argument) {
    raise_unless_ok(status);
  }
  const DeviceProps device = properties_of(request.device);
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int rows = explain_problem(*problem, device, request.options, verdicts.data(),
                                   static_cast<int>(verdicts.size()));
  verdicts.resize(static_cast<std::size_t>(rows));
  nb::dict answer;
  answer["copies"] = copies;
  answer["backend_gave_way"] = preferred && !request.backend_preferred;
  answer["rows"] = verdict_list(verdicts);
  answer["reason"] = status.message();
  answer["kernel"] = status.ok() ? nb::object(nb::str(plan.kernel->name)) : nb::none();
  answer["tile_q"] = plan.tile_q;
  answer["tile_k"] = plan.tile_k;
  answer["blocks"] = plan.blocks;
  answer["workspace_bytes"] = plan.workspace.bytes;
  answer["o_low"] = asks_for(*problem, Feature::o_low);
  answer["softmax"] = status.ok() ? softmax_text(plan) : "";
  answer["splits"] = status.ok() ? splits_text(plan) : "";
  answer["compiled"] = status.ok() ? run_time_kernels(plan) : nb::list();
  return answer;
}

}  // namespace pantile::python
