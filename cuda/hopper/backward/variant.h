// What the launcher of the backward does for the gradients of the variant's tensors, before and
// with the main kernel. `slope_parts`: that part of the workspace.
#pragma once

#include <cuda_runtime.h>

#include "driver.h"
#include "hopper/backward/workspace.h"
#include "hopper/variant.h"

namespace pantile::hopper {

inline attn::VariantParams backward_variant_params(const BackwardProblem& problem,
                                                   const BackwardTensors& tensors,
                                                   float* slope_parts,
                                                   const BackwardWorkspace& workspace) {
  attn::VariantParams params = variant_params(problem.forward, tensors.forward.variant);
  if (problem.wants_grad_alibi) {
    params.grad_alibi_parts = slope_parts;
    params.key_tile_count = workspace.key_tile_count;
  }
  if (problem.wants_grad_bias) {
    const BiasLayout layout = grad_bias_layout(problem.forward);
    params.grad_bias = tensors.variant.bias;
    params.grad_bias_batch = layout.batch;
    params.grad_bias_head = layout.head;
    params.grad_bias_query = layout.query;
  }
  for (int i = 0; i < kMaxCaptured && problem.wants_grad_captured != 0; ++i) {
    params.grad_captured[i] = tensors.variant.captured[i];
  }
  return params;
}

// Zeros where the main kernel adds, or leaves out what has no rows.
inline Status clear_variant_gradients(const BackwardProblem& problem,
                                      const BackwardTensors& tensors, float* slope_parts,
                                      const BackwardWorkspace& workspace, cudaStream_t stream) {
  const auto clear = [stream](void* memory, std::size_t bytes) {
    return bytes == 0 ? Status()
                      : cuda::check(cudaMemsetAsync(memory, 0, bytes, stream), "cudaMemsetAsync");
  };
  Status status;
  if (problem.wants_grad_alibi) {
    const auto tiles = static_cast<std::size_t>(problem.forward.heads_q * workspace.key_tile_count);
    status = clear(slope_parts, tiles * kSlopeParts * sizeof(float));
  }
  if (status.ok() && problem.wants_grad_bias) {
    status = clear(tensors.variant.bias, grad_bias_bytes(problem.forward));
  }
  const CapturedTensor* captured = tensors.forward.variant.score_captured;
  for (int i = 0; i < kMaxCaptured && status.ok(); ++i) {
    if ((problem.wants_grad_captured >> i & 1u) != 0) {
      status = clear(tensors.variant.captured[i],
                     static_cast<std::size_t>(captured_elements(captured[i])) * sizeof(float));
    }
  }
  return status;
}

}  // namespace pantile::hopper
