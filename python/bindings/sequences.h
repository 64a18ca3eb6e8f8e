// Contents of the arrays that say where sequences and their keys lie.
#pragma once

#include <cstdint>

#include "call.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "request.h"
#include "tensor_view.h"

namespace pantile::python {

// Contents of cu_seqlens, seqused and the others, given as host arrays. The totals stand for q and
// k, or total_k for the pages; heads and head dims do not matter here.
inline void check_sequence_contents(const Call& call, std::int64_t total_q, std::int64_t total_k,
                                    std::int64_t page_size) {
  TensorView host;
  ForwardProblem problem;
  ForwardTensors tensors;
  std::int64_t bounds = 0;
  std::int64_t count = 0;
  problem.packed_q = true;
  problem.packed_k = !call.paged();
  problem.heads_q = problem.heads_k = problem.head_dim = problem.head_dim_v = 1;
  problem.q = problem.k = problem.v = problem.o = Layout{0, 1, 1, 16};
  problem.scale = 1.0f;
  tensors.cu_seqlens_q = read_lengths(call.cu_seqlens_q, "cu_seqlens_q", host, &bounds);
  if (!call.paged() && !call.has_k_begin()) {
    tensors.cu_seqlens_k = read_lengths(call.cu_seqlens_k, "cu_seqlens_k", host, &count);
  }
  problem.batch = bounds - 1;
  problem.seqlen_q = call.max_seqlen_q;
  problem.seqlen_k = call.max_seqlen_k;
  problem.total_q = total_q;
  problem.total_k = call.paged() ? total_k * page_size : total_k;
  problem.has_seqused_q = !call.seqused_q.is_none();
  problem.has_seqused_k = !call.seqused_k.is_none();
  if (problem.has_seqused_q) {
    tensors.seqused_q = read_lengths(call.seqused_q, "seqused_q", host, &count);
  }
  if (problem.has_seqused_k) {
    tensors.seqused_k = read_lengths(call.seqused_k, "seqused_k", host, &count);
  }
  problem.has_k_begin = call.has_k_begin();
  if (problem.has_k_begin) {
    tensors.k_begin = read_lengths(call.k_begin, "k_begin", host, &count);
  }
  problem.has_mask_shift = !call.mask_shift.is_none();
  if (problem.has_mask_shift) {
    tensors.mask_shift = read_lengths(call.mask_shift, "mask_shift", host, &count);
  }
  if (call.paged()) {
    const TensorView table = read_tensor(call.block_table, "block_table");
    problem.page_size = page_size;
    problem.pages = total_k;
    problem.max_pages = table.shape[1];
    problem.table_stride = table.shape[0] > 1 ? table.stride[0] : table.shape[1];
    tensors.block_table = static_cast<const std::int32_t*>(table.data);
  }
  raise_unless_ok(check_sequences(problem, tensors));
}

}  // namespace pantile::python
