// What the launcher of the backward does for the gradients of the variant's tensors. `memory`: the
// workspace that `workspace` describes.
#pragma once

#include <cuda_runtime.h>

#include "driver.h"
#include "hopper/backward/workspace.h"
#include "hopper/row_kernels.h"
#include "hopper/variant.h"

namespace pantile::hopper {

// Where the main kernel leaves the gradient of the bias.
inline float* bias_gradient(const BackwardProblem& problem, const BackwardTensors& tensors,
                            const BackwardWorkspace& workspace, std::uint8_t* memory) {
  return has_bias_parts(problem) ? reinterpret_cast<float*>(memory + workspace.bias_parts)
                                 : tensors.variant.bias;
}

inline attn::VariantParams backward_variant_params(const BackwardProblem& problem,
                                                   const BackwardTensors& tensors,
                                                   const BackwardWorkspace& workspace,
                                                   std::uint8_t* memory) {
  attn::VariantParams params = variant_params(problem.forward, tensors.forward.variant);
  if (problem.wants_grad_alibi) {
    params.grad_alibi_parts = reinterpret_cast<float*>(memory + workspace.slope_parts);
    params.key_tile_count = workspace.key_tile_count;
  }
  if (problem.wants_grad_bias) {
    const BiasLayout layout = grad_bias_layout(problem);
    params.grad_bias = bias_gradient(problem, tensors, workspace, memory);
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
                                      const BackwardTensors& tensors,
                                      const BackwardWorkspace& workspace, std::uint8_t* memory,
                                      cudaStream_t stream) {
  const auto clear = [stream](void* memory, std::size_t bytes) {
    return bytes == 0 ? Status()
                      : cuda::check(cudaMemsetAsync(memory, 0, bytes, stream), "cudaMemsetAsync");
  };
  Status status;
  if (problem.wants_grad_alibi) {
    const auto tiles = static_cast<std::size_t>(problem.forward.heads_q * workspace.key_tile_count);
    status = clear(memory + workspace.slope_parts, tiles * kSlopeParts * sizeof(float));
  }
  if (status.ok() && problem.wants_grad_bias) {
    status = clear(bias_gradient(problem, tensors, workspace, memory), grad_bias_bytes(problem));
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

// After the main kernel: the gradient of a bias from its parts.
inline Status sum_bias_parts(const BackwardProblem& problem, const BackwardTensors& tensors,
                             const BackwardWorkspace& workspace, const std::uint8_t* memory,
                             cudaStream_t stream) {
  if (!has_bias_parts(problem)) {
    return Status();
  }
  const ForwardProblem& forward = problem.forward;
  const BiasLayout& bias = forward.variant.bias;
  common::BiasParams params;
  params.parts = reinterpret_cast<const float*>(memory + workspace.bias_parts);
  params.pairs = forward.seqlen_q * forward.seqlen_k;
  params.heads = forward.heads_q;
  params.batch = forward.batch;
  params.sums_heads = bias.head == 0;
  params.sums_batch = bias.batch == 0;
  params.grad_bias = tensors.variant.bias;
  const std::int64_t blocks = core::ceil_div<std::int64_t>(params.elements(), common::kBiasThreads);
  if (blocks == 0) {
    return Status();
  }
  const auto grid = static_cast<unsigned>(core::min_of<std::int64_t>(blocks, 65535));
  return launch_sum_bias({dim3(grid), dim3(common::kBiasThreads), 0, stream}, params);
}

}  // namespace pantile::hopper
