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

// A launch on the plan's device, which is the current one.
template <class Plan>
cuda::Launch launch_of(const Plan& plan, int blocks, int threads, cudaStream_t stream) {
  cuda::Launch how;
  how.grid = dim3(static_cast<unsigned>(blocks));
  how.block = dim3(static_cast<unsigned>(threads));
  how.stream = stream;
  how.early = false;
  how.device = plan.device.device.index;
  return how;
}

// The same for a kernel with `bytes` of dynamic shared memory; `prepared` belongs to the kernel.
template <class Plan>
cuda::Launch launch_of(const Plan& plan, int blocks, int threads, int bytes, cudaStream_t stream,
                       cuda::PreparedDevices* prepared) {
  cuda::Launch how = launch_of(plan, blocks, threads, stream);
  how.shared_bytes = bytes;
  how.prepared = prepared;
  return how;
}

}  // namespace pantile::ampere
