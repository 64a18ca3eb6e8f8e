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
  return common::has_bias_parts(problem) ? reinterpret_cast<float*>(memory + workspace.bias_parts)
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
    common::add_bias_gradient(problem, bias_gradient(problem, tensors, workspace, memory), &params);
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
    status =
        clear(bias_gradient(problem, tensors, workspace, memory), common::grad_bias_bytes(problem));
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
  if (!common::has_bias_parts(problem)) {
    return Status();
  }
  const common::BiasParams params = common::bias_params(
      problem, reinterpret_cast<const float*>(memory + workspace.bias_parts), tensors.variant.bias);
  const int blocks = params.blocks();
  if (blocks == 0) {
    return Status();
  }
  const auto grid = static_cast<unsigned>(blocks);
  return launch_sum_bias({dim3(grid), dim3(common::kBiasThreads), 0, stream}, params);
}

}  // namespace pantile::hopper
