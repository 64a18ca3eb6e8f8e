// pantile._C: the C++ API for Python. It checks what only the tensors can show, makes the problem,
// plans, lends workspace and runs without the GIL. It makes no CUDA call when it is imported.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "call.h"
#include "expression.h"
#include "fp8.h"
#include "jit.h"
#include "kv.h"
#include "outputs.h"
#include "pantile/pantile.h"
#include "plain_calls.h"
#include "planner.h"
#include "request.h"
#include "runs.h"
#include "sequences.h"
#include "tensor_view.h"
#include "tuning.h"
#include "variant.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pantile::python {
namespace {

// ---- calls -----------------------------------------------------------------------------------

unsigned forward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
                 nb::handle o_low, nb::handle max_logit, const Call& call, nb::handle variant) {
  Request request = read_request(q, k, v, call);
  read_variant(variant, true, &request);
  ForwardProblem& problem = request.problem;
  take_output(read_tensor(o, "out"), &request);
  problem.wants_lse = !lse.is_none();
  if (problem.wants_lse) {
    const TensorView rows = read_tensor(lse, "lse");
    require_lse(rows, request);
    require_contiguous(rows);
    request.tensors.lse = static_cast<float*>(rows.data);
  }
  problem.wants_o_low = !o_low.is_none();
  if (problem.wants_o_low) {
    request.tensors.o_low = read_o_low(o_low, request);
  }
  problem.wants_max_logit = !max_logit.is_none();
  if (problem.wants_max_logit) {
    const TensorView largest = read_tensor(max_logit, "max_logit");
    require_max_logit(largest, request);
    require_contiguous(largest);
    request.tensors.max_logit = static_cast<float*>(largest.data);
  }
  return run_forward_request(&request);
}

unsigned backward(nb::handle grad_o, nb::handle grad_lse, nb::handle q, nb::handle k, nb::handle v,
                  nb::handle o, nb::handle o_low, nb::handle lse, nb::handle grad_q,
                  nb::handle grad_k, nb::handle grad_v, const Call& call, bool deterministic,
                  nb::handle variant, nb::handle grad_alibi, nb::handle grad_sinks,
                  nb::handle grad_bias, nb::handle grad_captured, nb::handle key_statistics) {
  Request request = read_request(q, k, v, call);
  read_variant(variant, true, &request);
  const TensorView output = read_tensor(o, "o");
  const TensorView grad_output = read_tensor(grad_o, "grad_o");
  const TensorView rows = read_tensor(lse, "lse");
  unsigned copies = rows.contiguous() ? 0u : kCopyLse;

  BackwardProblem problem;
  BackwardTensors tensors;
  take_saved(output, grad_output, rows, request, &problem, &tensors);
  problem.deterministic = deterministic;
  problem.has_grad_lse = !grad_lse.is_none();
  problem.has_o_low = !o_low.is_none();
  if (problem.has_o_low) {
    tensors.o_low = read_o_low(o_low, request);
  }
  if (problem.has_grad_lse) {
    const TensorView grad_rows = read_tensor(grad_lse, "grad_lse");
    require_lse(grad_rows, request);
    copies |= grad_rows.contiguous() ? 0u : kCopyGradLse;
    tensors.grad_lse = static_cast<const float*>(grad_rows.data);
  }

  take_gradients(read_tensor(grad_q, "grad_q"), read_tensor(grad_k, "grad_k"),
                 read_tensor(grad_v, "grad_v"), request, &problem, &tensors);
  take_variant_gradients(grad_alibi, grad_sinks, grad_bias, request, &problem, &tensors);
  std::array<float*, kMaxCaptured> captured{};
  take_captured_gradients(grad_captured, request, &captured, &problem, &tensors);
  if (!key_statistics.is_none()) {
    take_key_statistics(read_tensor(key_statistics, "key_statistics"), KeyStatistics::given,
                        request, &problem, &tensors);
  }
  const std::initializer_list<Operand> operands = {
      {&request.q, &problem.forward.q, kCopyQ}, {&request.k, &problem.forward.k, kCopyK},
      {&request.v, &problem.forward.v, kCopyV}, {&grad_output, &problem.grad_o, kCopyGradO},
      {&output, &problem.forward.o, kCopyO},
  };
  if (copies != 0) {
    return copies | inexpressible(operands);
  }
  return plan_and_run<BackwardPlan>(request, &problem, tensors, Pass::backward, operands);
}

// Writes the statistics of the keys of each sequence and head, of which `call` has the lengths
// twice and no window. As `backward`, it answers with copy bits.
unsigned key_statistics(nb::handle k, nb::handle v, nb::handle statistics, const Call& call) {
  Request request = read_request(k, k, v, call);
  BackwardProblem problem;
  BackwardTensors tensors;
  problem.forward = request.problem;
  problem.forward.wants_lse = true;
  tensors.forward = request.tensors;
  problem.grad_o = request.problem.o;
  problem.grad_q = problem.grad_k = fresh_layout(request.k);
  problem.grad_v = fresh_layout(request.v);
  problem.deterministic = true;
  problem.has_o_low = request.problem.dtype != DType::f32;
  take_key_statistics(read_tensor(statistics, "statistics"), KeyStatistics::written, request,
                      &problem, &tensors);
  return plan_and_run<BackwardPlan>(
      request, &problem, tensors, Pass::backward,
      {{&request.k, &problem.forward.k, kCopyK}, {&request.v, &problem.forward.v, kCopyV}});
}

// ---- explanations ----------------------------------------------------------------------------

// Whether the gradients of alibi, sinks and bias are wanted, and a bit for each tensor that the
// score captures.
using WantedGradients = std::tuple<bool, bool, bool, std::uint32_t>;

// What a call is planned with beside its tensors.
struct PassOptions {
  bool deterministic = false, max_logit = false, output_f32 = false, o_low = false;
  WantedGradients gradients;
};

template <class Plan>
struct Planned {
  using type = Plan;
};

// Calls visit(Planned<Plan>, problem, operands) for the forward, and for the backward with
// gradients as autograd makes them, contiguous.
template <class Visit>
void for_each_pass(Request* request, const PassOptions& options, const Visit& visit) {
  ForwardProblem& forward = request->problem;
  BackwardProblem backward;
  backward.forward = forward;
  backward.deterministic = options.deterministic;
  backward.grad_o = forward.o;
  backward.grad_q = fresh_layout(request->q);
  backward.grad_k = fresh_layout(request->k);
  backward.grad_v = fresh_layout(request->v);
  backward.has_o_low = options.o_low;
  std::tie(backward.wants_grad_alibi, backward.wants_grad_sinks, backward.wants_grad_bias,
           backward.wants_grad_captured) = options.gradients;
  backward.grad_captured_elements = wanted_elements(*request, backward.wants_grad_captured);
  forward.wants_max_logit = options.max_logit;
  forward.output_f32 = options.output_f32;
  forward.wants_o_low = options.o_low;
  if (request->paged) {
    visit(Planned<ForwardPlan>(), &forward,
          std::initializer_list<Operand>{{&request->q, &forward.q, kCopyQ}});
    visit(Planned<BackwardPlan>(), &backward,
          std::initializer_list<Operand>{{&request->q, &backward.forward.q, kCopyQ}});
    return;
  }
  visit(Planned<ForwardPlan>(), &forward,
        std::initializer_list<Operand>{{&request->q, &forward.q, kCopyQ},
                                       {&request->k, &forward.k, kCopyK},
                                       {&request->v, &forward.v, kCopyV}});
  visit(Planned<BackwardPlan>(), &backward,
        std::initializer_list<Operand>{{&request->q, &backward.forward.q, kCopyQ},
                                       {&request->k, &backward.forward.k, kCopyK},
                                       {&request->v, &backward.forward.v, kCopyV}});
}

// Both passes.
nb::tuple explain(nb::handle q, nb::handle k, nb::handle v, const Call& call, bool deterministic,
                  bool max_logit, bool output_f32, bool o_low, nb::handle variant,
                  const WantedGradients& gradients) {
  Request request = read_request(q, k, v, call);
  read_variant(variant, false, &request);
  nb::list answers;
  for_each_pass(&request, {deterministic, max_logit, output_f32, o_low, gradients},
                [&](auto planned, auto* problem, std::initializer_list<Operand> operands) {
                  using Plan = typename decltype(planned)::type;
                  answers.append(explain_pass<Plan>(request, problem, operands));
                });
  return nb::tuple(answers);
}

// The kernels that are compiled at run time, of the forward and, if asked for, of the backward.
void compile_call(nb::handle q, nb::handle k, nb::handle v, const Call& call, bool deterministic,
                  bool max_logit, bool output_f32, nb::handle variant,
                  const WantedGradients& gradients, bool backward) {
  Request request = read_request(q, k, v, call);
  read_variant(variant, false, &request);
  for_each_pass(&request, {deterministic, max_logit, output_f32, false, gradients},
                [&](auto planned, auto* problem, std::initializer_list<Operand> operands) {
                  using Plan = typename decltype(planned)::type;
                  if (backward || std::is_same_v<Plan, ForwardPlan>) {
                    compile_pass<Plan>(request, problem, operands);
                  }
                });
}

// ---- what there is ---------------------------------------------------------------------------

nb::list kernels() {
  nb::list rows;
  for (int index = 0; index < kernel_count(); ++index) {
    const KernelInfo& info = kernel_info(index);
    nb::dict row;
    row["name"] = info.name;
    row["backend"] = backend_name(info.backend);
    row["pass"] = pass_name(info.pass);
    row["dtype"] = dtype_name(info.dtype);
    row["head_dim"] = info.head_dim;
    row["head_dim_v"] = info.head_dim_v;
    row["mask"] = mask_kind_name(info.mask);
    row["compiled"] = info.compiled;
    rows.append(row);
  }
  return rows;
}

nb::dict device_dict(const DeviceProps& props) {
  const bool cuda = props.device.type == DeviceType::cuda;
  nb::dict device;
  device["type"] = cuda ? "cuda" : "cpu";
  device["index"] = props.device.index;
  device["name"] = props.name;
  if (cuda) {
    device["compute_capability"] = nb::make_tuple(props.compute_major, props.compute_minor);
    device["multiprocessors"] = props.multiprocessors;
    device["shared_memory_bytes"] = props.smem_optin_bytes;
    device["l2_bytes"] = props.l2_bytes;
  } else {
    device["isa"] = cpu_isa_name(props.isa);
    device["threads"] = props.threads;
  }
  return device;
}

// The CPU and every CUDA device, and why there is none if so.
nb::tuple devices() {
  nb::list found;
  found.append(device_dict(cpu_properties().get()));
  Status status;
  const int count = cuda_device_count(&status);
  for (int index = 0; index < count; ++index) {
    found.append(device_dict(properties_of(Device{DeviceType::cuda, index})));
  }
  return nb::make_tuple(found, status.message());
}

// ---- ties to torch ---------------------------------------------------------------------------

PyObject* keep(nb::handle object) {
  return object.is_none() ? nullptr : object.inc_ref().ptr();
}

// `exchange` is torch.Tensor.__dlpack_c_exchange_api__, or None before torch 2.11; then `describe`
// and `current_stream` answer instead. `thread_count` is the address of torch_get_num_threads or 0.
void set_torch(nb::handle tensor_type, nb::handle exchange, nb::handle describe,
               nb::handle current_stream, nb::handle lend_workspace, nb::handle is_capturing,
               std::uintptr_t thread_count) {
  const dlpack::ExchangeTable* table = nullptr;
  if (!exchange.is_none()) {
    table = dlpack::usable_table(nb::cast<nb::capsule>(exchange).data(dlpack::kCapsuleName));
    if (table == nullptr) {
      throw std::runtime_error("torch's DLPack exchange table is not of major version 1");
    }
  }
  Hooks& torch = hooks();
  torch.tensor_type = reinterpret_cast<PyTypeObject*>(keep(tensor_type));
  torch.exchange = table;
  torch.describe = keep(describe);
  torch.current_stream = keep(current_stream);
  torch.lend_workspace = keep(lend_workspace);
  torch.is_capturing = keep(is_capturing);
  torch.thread_count = reinterpret_cast<ThreadCount>(thread_count);
}

// `autograd_keys`: a pair of dispatch keys, for the CPU and for CUDA.
void set_plain(nb::handle parameter_type, nb::handle grad_enabled, nb::handle is_excluded,
               const nb::tuple& autograd_keys, nb::handle watchers, nb::handle empty_like,
               nb::handle float32, nb::handle int8, nb::handle contiguous_format) {
  PlainHooks& plain = hooks().plain;
  plain.parameter_type = reinterpret_cast<PyTypeObject*>(keep(parameter_type));
  plain.grad_enabled = keep(grad_enabled);
  plain.is_excluded = keep(is_excluded);
  plain.autograd_cpu = keep(autograd_keys[0]);
  plain.autograd_cuda = keep(autograd_keys[1]);
  plain.watchers = keep(watchers);
  plain.watcher_count = static_cast<Py_ssize_t>(nb::len(watchers));
  plain.empty_like = keep(empty_like);
  plain.float32 = keep(float32);
  plain.int8 = keep(int8);
  plain.contiguous_format = keep(contiguous_format);
  plain.named_dtype = keep(nb::make_tuple("dtype"));
  plain.named_format = keep(nb::make_tuple("memory_format"));
  plain.requires_grad = PyUnicode_InternFromString("requires_grad");
  plain.is_neg = PyUnicode_InternFromString("is_neg");
  plain.is_zerotensor = PyUnicode_InternFromString("_is_zerotensor");
  plain.is_cuda = PyUnicode_InternFromString("is_cuda");
  plain.new_empty = PyUnicode_InternFromString("new_empty");
}

}  // namespace
}  // namespace pantile::python

NB_MODULE(_C, module) {
  namespace py = pantile::python;
  // A graph of autograd that lives as long as the process holds a Call: no leak.
  nb::set_leak_warnings(false);
  nb::exception<py::UnsupportedError>(module, "UnsupportedError", PyExc_NotImplementedError);
  const auto number = [](int part) { return std::to_string(part); };
  module.attr("__version__") = number(PANTILE_VERSION_MAJOR) + "." + number(PANTILE_VERSION_MINOR) +
                               "." + number(PANTILE_VERSION_PATCH);
  py::bind_call(module);
  py::bind_jit(module);
  py::bind_kv(module);
  module.def("forward", &py::forward, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a.none(), "o_low"_a.none(),
             "max_logit"_a.none(), "call"_a, "variant"_a = nb::none());
  module.def("attend", &py::attend, "q"_a.none(), "k"_a.none(), "v"_a.none(), "call"_a);
  module.def("attend_recorded", &py::attend_recorded, "q"_a, "k"_a, "v"_a, "call"_a);
  module.def("gradients", &py::gradients, "grad_o"_a, "q"_a, "k"_a, "v"_a, "o"_a, "o_low"_a.none(),
             "lse"_a, "call"_a, "deterministic"_a);
  module.def("sdpa", &py::sdpa, "query"_a.none(), "key"_a.none(), "value"_a.none(), "call"_a);
  module.def("sdpa_forward", &py::sdpa_forward, "query"_a, "key"_a, "value"_a, "call"_a);
  module.def("sdpa_backward", &py::sdpa_backward, "grad_out"_a, "query"_a, "key"_a, "value"_a,
             "out"_a, "lse"_a, "call"_a, "deterministic"_a);
  module.def("backward", &py::backward, "grad_o"_a, "grad_lse"_a.none(), "q"_a, "k"_a, "v"_a, "o"_a,
             "o_low"_a.none(), "lse"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a, "call"_a,
             "deterministic"_a, "variant"_a = nb::none(), "grad_alibi"_a = nb::none(),
             "grad_sinks"_a = nb::none(), "grad_bias"_a = nb::none(),
             "grad_captured"_a = nb::none(), "key_statistics"_a = nb::none());
  module.def("key_statistics", &py::key_statistics, "k"_a, "v"_a, "statistics"_a, "call"_a);
  module.def("explain", &py::explain, "q"_a, "k"_a, "v"_a, "call"_a, "deterministic"_a,
             "max_logit"_a = false, "output_f32"_a = false, "o_low"_a = false,
             "variant"_a = nb::none(), "gradients"_a = py::WantedGradients{});
  module.def("compile_call", &py::compile_call, "q"_a, "k"_a, "v"_a, "call"_a, "deterministic"_a,
             "max_logit"_a, "output_f32"_a, "variant"_a.none(), "gradients"_a, "backward"_a);
  module.attr("VARIANT_FIELDS") = py::variant_field_names();
  module.def("check_expression", &py::check_expression, "kind"_a, "text"_a, "captured"_a);
  py::bind_fp8(module);
  module.def("check_sequences", &py::check_sequence_contents, "call"_a, "total_q"_a, "total_k"_a,
             "page_size"_a = 0);
  module.def("kernels", &py::kernels);
  module.def("devices", &py::devices);
  module.def("build_info", &pantile::build_info);
  module.def("set_tuned_softmax", &py::set_tuned_softmax, "rows"_a);
  module.def("set_torch", &py::set_torch, "tensor_type"_a, "exchange"_a.none(), "describe"_a,
             "current_stream"_a, "lend_workspace"_a, "is_capturing"_a, "thread_count"_a);
  module.def("set_plain", &py::set_plain, "parameter_type"_a, "grad_enabled"_a, "is_excluded"_a,
             "autograd_keys"_a, "watchers"_a, "empty_like"_a, "float32"_a, "int8"_a,
             "contiguous_format"_a);
  module.def("set_cpu_threads", [](int threads) { py::cpu_properties().set_threads(threads); });
  module.def("set_parallel_for", [](std::uintptr_t address) {
    pantile::set_parallel_for(reinterpret_cast<pantile::ParallelFor>(address));
  });
  module.def("checks_workspaces", [] { return py::checks_workspaces().load(); });
  module.def("check_workspaces", [](bool on) { py::checks_workspaces() = on; }, "on"_a);
  module.def(
      "set_plan_log", [](nb::handle log) { py::hooks().plan_log = py::keep(log); }, "log"_a.none());
}
