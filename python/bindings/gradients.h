// Where the gradients of q, k and v go.
#pragma once

#include "pantile/pantile.h"
#include "request.h"

namespace pantile::python {

inline void take_gradients(nb::handle grad_q, nb::handle grad_k, nb::handle grad_v,
                           const Request& request, BackwardProblem* problem,
                           BackwardTensors* tensors) {
  const TensorView view_q = read_tensor(grad_q, "grad_q");
  const TensorView view_k = read_tensor(grad_k, "grad_k");
  const TensorView view_v = read_tensor(grad_v, "grad_v");
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

}  // namespace pantile::python
