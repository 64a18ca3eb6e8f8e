// Whole calls of the bindings, outputs included, because making these in Python takes longer than
// planning and launching: plain ones (plain.h), the passes of plain ones that autograd records, and
// those of torch's own attention, whose tensors are [batch, heads, seqlen, head_dim]. Each answers
// None for a call that needs more than that, and nothing has been launched then; the way through
// Python serves it or says what is wrong.
#pragma once

#include <optional>
#include <utility>

#include "outputs.h"
#include "plain.h"
#include "request.h"
#include "runs.h"

namespace pantile::python {

enum class AxisOrder { rows_first, heads_first };

// A view of [batch, seqlen, heads, head_dim].
inline TensorView read_rows(nb::handle object, const char* name, AxisOrder order) {
  TensorView view = read_tensor(object, name);
  if (order == AxisOrder::heads_first && view.rank == 4) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
    view.normalize_strides();
  }
  return view;
}

// The request of a call without outputs; nothing when its tensors cannot be read or do not fit
// together, or when the answer hangs on torch's float32 precision.
inline std::optional<Request> read_dense_request(nb::handle q, nb::handle k, nb::handle v,
                                                 const Call& call, AxisOrder order) {
  std::optional<Request> request;
  try {
    request = make_request(read_rows(q, "q", order), read_rows(k, "k", order),
                           read_rows(v, "v", order), call, false);
  } catch (const nb::python_error&) {
    return std::nullopt;
  }
  const ForwardProblem& problem = request->problem;
  const bool asks_precision =
      problem.dtype == DType::f32 && request->device.type == DeviceType::cuda;
  if (asks_precision || problem.head_dim != problem.head_dim_v) {
    return std::nullopt;
  }
  return request;
}

inline nb::object new_like(nb::handle x) {
  return nb::handle(hooks().plain.empty_like)(x);
}

// The same with one argument by name; `name` is a tuple of it.
inline nb::object new_like(nb::handle x, PyObject* name, PyObject* value) {
  PyObject* const arguments[] = {x.ptr(), value};
  PyObject* made = PyObject_Vectorcall(hooks().plain.empty_like, arguments, 1, name);
  if (made == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(made);
}

// Of the shape of x, contiguous; `view`: of x.
inline nb::object new_contiguous(nb::handle x, const TensorView& view) {
  const PlainHooks& torch = hooks().plain;
  return view.contiguous() ? new_like(x) : new_like(x, torch.named_format, torch.contiguous_format);
}

// Whether kernels can write a tensor that torch made like this one.
inline bool has_dense_rows(const TensorView& view) {
  return view.stride[3] == 1 || view.shape[3] <= 1;
}

// [batch, heads, seqlen] in float32 on the device of q.
inline nb::object new_lse(nb::handle q, const ForwardProblem& problem) {
  const PlainHooks& torch = hooks().plain;
  const nb::int_ shape[] = {nb::int_(problem.batch), nb::int_(problem.heads_q),
                            nb::int_(problem.seqlen_q)};
  PyObject* const arguments[] = {q.ptr(), shape[0].ptr(), shape[1].ptr(), shape[2].ptr(),
                                 torch.float32};
  PyObject* made = PyObject_VectorcallMethod(torch.new_empty, arguments, 4, torch.named_dtype);
  if (made == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(made);
}

// The output of a plain call; True for one that autograd must record.
inline nb::object attend(nb::handle q, nb::handle k, nb::handle v, const Call& call) {
  const Around around = what_is_around({q, k, v});
  if (around != Around::nothing) {
    return around == Around::autograd ? nb::object(nb::bool_(true)) : nb::none();
  }
  std::optional<Request> request = read_dense_request(q, k, v, call, AxisOrder::rows_first);
  if (!request) {
    return nb::none();
  }
  request->problem.wants_lse = false;
  nb::object o = new_contiguous(q, request->q);
  take_output(read_tensor(o, "out"), &*request);
  return run_forward_request(&*request) == 0 ? o : nb::none();
}

// (o, o_low or None, LSE) of a plain call that is recorded: what its backward reads. The caller
// has asked what is around it.
inline nb::object attend_recorded(nb::handle q, nb::handle k, nb::handle v, const Call& call) {
  std::optional<Request> request = read_dense_request(q, k, v, call, AxisOrder::rows_first);
  if (!request) {
    return nb::none();
  }
  ForwardProblem& problem = request->problem;
  const nb::object o = new_contiguous(q, request->q);
  const nb::object lse = new_lse(q, problem);
  nb::object o_low = nb::none();
  take_output(read_tensor(o, "out"), &*request);
  problem.wants_lse = true;
  request->tensors.lse = static_cast<float*>(read_tensor(lse, "lse").data);
  if (problem.dtype != DType::f32) {
    o_low = new_like(o, hooks().plain.named_dtype, hooks().plain.int8);
    problem.wants_o_low = true;
    request->tensors.o_low = static_cast<std::int8_t*>(read_tensor(o_low, "o_low").data);
  }
  return run_forward_request(&*request) == 0 ? nb::object(nb::make_tuple(o, o_low, lse))
                                             : nb::none();
}

// What must be copied first, or 0: the gradients are written.
inline unsigned run_gradients(const Request& request, const TensorView& output,
                              const TensorView& grad_output, const BackwardTensors& tensors,
                              BackwardProblem* problem) {
  return plan_and_run<BackwardPlan>(request, problem, tensors, Pass::backward,
                                    {{&request.q, &problem->forward.q, kCopyQ},
                                     {&request.k, &problem->forward.k, kCopyK},
                                     {&request.v, &problem->forward.v, kCopyV},
                                     {&grad_output, &problem->grad_o, kCopyGradO},
                                     {&output, &problem->forward.o, kCopyO}});
}

// The gradients of such a call: (dq, dk, dv, None), as autograd takes them for (q, k, v, call). The
// saved tensors come through anybody's hooks.
inline nb::object gradients(nb::handle grad_o, nb::handle q, nb::handle k, nb::handle v,
                            nb::handle o, nb::handle o_low, nb::handle lse, const Call& call,
                            bool deterministic) {
  const bool has_low = !o_low.is_none();
  if (what_is_around({grad_o, q, k, v, o, lse, has_low ? o_low : lse}) != Around::nothing) {
    return nb::none();
  }
  std::optional<Request> request = read_dense_request(q, k, v, call, AxisOrder::rows_first);
  if (!request) {
    return nb::none();
  }
  const TensorView rows = read_tensor(lse, "lse");
  const TensorView grad_output = read_tensor(grad_o, "grad_o");
  const TensorView output = read_tensor(o, "o");
  if (!rows.contiguous() || grad_output.rank != 4 || !has_dense_rows(grad_output)) {
    return nb::none();
  }
  BackwardProblem problem;
  BackwardTensors tensors;
  take_saved(output, grad_output, rows, *request, &problem, &tensors);
  problem.deterministic = deterministic;
  problem.has_o_low = has_low;
  if (has_low) {
    if (!read_tensor(o_low, "o_low").canonical()) {
      return nb::none();
    }
    tensors.o_low = read_o_low(o_low, *request);
  }
  const nb::object grads[] = {new_contiguous(q, request->q), new_contiguous(k, request->k),
                              new_contiguous(v, request->v)};
  take_gradients(read_tensor(grads[0], "grad_q"), read_tensor(grads[1], "grad_k"),
                 read_tensor(grads[2], "grad_v"), *request, &problem, &tensors);
  const unsigned copies = run_gradients(*request, output, grad_output, tensors, &problem);
  return copies == 0 ? nb::object(nb::make_tuple(grads[0], grads[1], grads[2], nb::none()))
                     : nb::none();
}

// Gives a request its output, like the query; false where kernels could not write it.
inline bool add_output(nb::handle query, Request* request, nb::object* out) {
  if (!has_dense_rows(request->q)) {
    return false;
  }
  *out = new_like(query);
  const TensorView place = read_rows(*out, "out", AxisOrder::heads_first);
  if (!has_dense_rows(place)) {
    return false;
  }
  take_output(place, request);
  return true;
}

inline constexpr int kFlashHeadDim = 256;  // the most that torch gives to flash attention

// The output of a plain call of scaled_dot_product_attention. Grouped heads, and a causal mask of
// other lengths than torch aligns to the top left, are left to torch.
inline nb::object sdpa(nb::handle query, nb::handle key, nb::handle value, const Call& call) {
  if (what_is_around({query, key, value}) != Around::nothing) {
    return nb::none();
  }
  std::optional<Request> request =
      read_dense_request(query, key, value, call, AxisOrder::heads_first);
  if (!request) {
    return nb::none();
  }
  ForwardProblem& problem = request->problem;
  const bool top_left = call.window_right == 0 && problem.seqlen_q != problem.seqlen_k;
  const bool empty = request->q.empty() || request->k.empty();
  if (problem.heads_q != problem.heads_k || problem.head_dim > kFlashHeadDim || top_left || empty) {
    return nb::none();
  }
  nb::object out;
  if (!add_output(query, &*request, &out)) {
    return nb::none();
  }
  problem.wants_lse = false;
  return run_forward_request(&*request) == 0 ? out : nb::none();
}

// (output, LSE) of torch's operator.
inline nb::object sdpa_forward(nb::handle query, nb::handle key, nb::handle value,
                               const Call& call) {
  std::optional<Request> request =
      read_dense_request(query, key, value, call, AxisOrder::heads_first);
  nb::object out;
  if (!request || !add_output(query, &*request, &out)) {
    return nb::none();
  }
  nb::object lse = new_lse(query, request->problem);
  request->problem.wants_lse = true;
  request->tensors.lse = static_cast<float*>(read_tensor(lse, "lse").data);
  return run_forward_request(&*request) == 0 ? nb::object(nb::make_tuple(out, lse)) : nb::none();
}

// The gradients of torch's operator, in the strides of what they are the gradients of.
inline nb::object sdpa_backward(nb::handle grad_out, nb::handle query, nb::handle key,
                                nb::handle value, nb::handle out, nb::handle lse, const Call& call,
                                bool deterministic) {
  constexpr AxisOrder order = AxisOrder::heads_first;
  std::optional<Request> request = read_dense_request(query, key, value, call, order);
  const TensorView rows = read_tensor(lse, "lse");
  if (!request || !rows.contiguous()) {
    return nb::none();
  }
  const TensorView output = read_rows(out, "out", order);
  const TensorView grad_output = read_rows(grad_out, "grad_out", order);
  BackwardProblem problem;
  BackwardTensors tensors;
  take_saved(output, grad_output, rows, *request, &problem, &tensors);
  problem.deterministic = deterministic;
  const nb::object grads[] = {new_like(query), new_like(key), new_like(value)};
  const TensorView places[] = {read_rows(grads[0], "grad_query", order),
                               read_rows(grads[1], "grad_key", order),
                               read_rows(grads[2], "grad_value", order)};
  if (!std::all_of(std::begin(places), std::end(places), has_dense_rows)) {
    return nb::none();
  }
  take_gradients(places[0], places[1], places[2], *request, &problem, &tensors);
  const unsigned copies = run_gradients(*request, output, grad_output, tensors, &problem);
  return copies == 0 ? nb::object(nb::make_tuple(grads[0], grads[1], grads[2])) : nb::none();
}

}  // namespace pantile::python
