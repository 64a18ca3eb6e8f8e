// What the launches of the forward and the backward have in common.
#pragma once

#include <cuda_runtime.h>

#include "core/sequence.h"
#include "driver.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::ampere {

inline core::SequenceSide query_side(const ForwardProblem& p, const ForwardTensors& tensors) {
  core::SequenceSide side;
  side.max_length = static_cast<int>(p.seqlen_q);
  side.cu_seqlens = p.packed_q ? tensors.cu_seqlens_q : nullptr;
  side.seqused = p.has_seqused_q ? tensors.seqused_q : nullptr;
  return side;
}

inline core::SequenceSide key_side(const ForwardProblem& p, const ForwardTensors& tensors) {
  core::SequenceSide side;
  side.max_length = static_cast<int>(p.seqlen_k);
  side.cu_seqlens = p.packed_k ? tensors.cu_seqlens_k : nullptr;
  side.seqused = p.has_seqused_k ? tensors.seqused_k : nullptr;
  return side;
}

// `name` is for the error. The kernel's own limit on shared memory is raised where needed.
template <class Params>
Status launch(const char* name, void (*kernel)(Params), int blocks, int threads, int shared_bytes,
              cudaStream_t stream, const Params& params) {
  if (shared_bytes > 48 * 1024) {
    const Status status = cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        name);
    if (!status.ok()) {
      return status;
    }
  }
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
           static_cast<std::size_t>(shared_bytes), stream>>>(params);
  return cuda::check(cudaGetLastError(), name);
}

}  // namespace pantile::ampere
