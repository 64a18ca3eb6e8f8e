// Where o and the gradients of q, k and v go.
#pragma once

#include "pantile/pantile.h"
#include "request.h"

namespace pantile::python {

// Where o goes: `output`, in its own strides.
inline void take_output(const TensorView& output, Request* request) {
  ForwardProblem& problem = request->problem;
  problem.output_f32 = output.code == dlpack::kFloat && output.bits == 32;
  if (problem.output_f32) {
    require_same_device(output, request->q);
    require_query_shape(output, *request, problem.head_dim_v);
  } else {
    require_query_rows(output, *request, problem.head_dim_v);
  }
  require_writable_rows(output);
  for (const TensorView* input : {&request->q, &request->k, &request->v}) {
    if (output.data == input->data && !output.empty() && !input->empty()) {
      raise_value_error("out begins where %s does; it must share no element with it", input->name);
    }
  }
  problem.o = layout_of(output);
  request->tensors.o = output.data;
}

// The low bits of O (core/low_bits.h): int8, of the shape of o and contiguous, so that no layout
// describes it.
inline std::int8_t* read_o_low(nb::handle object, const Request& request) {
  const TensorView view = read_tensor(object, "o_low");
  if (view.code != dlpack::kInt || view.bits != 8) {
    raise_type_error("o_low has dtype %s; it must be int8",
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request.q);
  require_query_shape(view, request, request.problem.head_dim_v);
  if (!view.contiguous()) {
    raise_value_error("o_low has strides %s; it must be contiguous",
                      shape_text(view.stride, view.rank).c_str());
  }
  return static_cast<std::int8_t*>(view.data);
}

// What a backward reads beside q, k and v: o, its gradient and the LSE.
inline void take_saved(const TensorView& output, const TensorView& grad_output,
                       const TensorView& rows, const Request& request, BackwardProblem* problem,
                       BackwardTensors* tensors) {
  require_query_rows(output, request, request.problem.head_dim_v);
  require_query_rows(grad_output, request, request.problem.head_dim_v);
  require_lse(rows, request);
  problem->forward = request.problem;
  problem->forward.wants_lse = true;
  problem->forward.o = layout_of(output);
  problem->grad_o = layout_of(grad_output);
  tensors->forward = request.tensors;
  tensors->forward.o = output.data;
  tensors->forward.lse = static_cast<float*>(rows.data);
  tensors->grad_o = grad_output.data;
}

inline void take_gradients(const TensorView& view_q, const TensorView& view_k,
                           const TensorView& view_v, const Request& request,
                           BackwardProblem* problem, BackwardTensors* tensors) {
  require_query_rows(view_q, request, request.problem.head_dim);
  require_key_rows(view_k, request, request.problem.head_dim);
  require_key_rows(view_v, request, request.problem.head_dim_v);
  for (const TensorView* view : {&view_q, &view_k, &view_v}) {
    require_writable_rows(*view);
  }
  problem->grad_q = layout_of(view_q);
  problem->grad_k = layout_of(view_k);
  problem->grad_v = layout_of(view_v);
  tensors->grad_q = view_q.data;
  tensors->grad_k = view_k.data;
  tensors->grad_v = view_v.data;
}

// What a deterministic backward reads of the keys, or what it writes (KeyStatistics).
inline void take_key_statistics(const TensorView& view, KeyStatistics use, const Request& request,
                                BackwardProblem* problem, BackwardTensors* tensors) {
  if (view.code != dlpack::kInt || view.bits != 32) {
    raise_type_error("%s has dtype %s; it must be int32", view.name,
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request.k);
  const ForwardProblem& forward = request.problem;
  require_shape(view, {forward.batch, forward.heads_k, key_statistics_ints(forward)});
  if (!view.contiguous()) {
    raise_value_error("%s has strides %s; it must be contiguous", view.name,
                      shape_text(view.stride, view.rank).c_str());
  }
  problem->key_statistics = use;
  tensors->key_statistics = static_cast<std::int32_t*>(view.data);
}

}  // namespace pantile::python
