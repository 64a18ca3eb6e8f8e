// Tiles, budgets and memory of the FP8 backward on Hopper, checked by the C++ compiler too.
//
// A step is 64 queries x 128 keys (core/fp8_steps.h); a block of threads has two math warpgroups of
// 64 keys each. Head dims 64, 96 and 128; smaller ones are padded with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fp8_steps.h"
#include "core/integer.h"
#include "hopper/limits.h"
#include "pantile/quantize.h"

namespace pantile::hopper {

struct Fp8BackwardConfig {
  static constexpr int kRows = core::kFp8StepRows;
  static constexpr int kKeys = core::kFp8StepKeys;
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kThreads = (1 + kMathWarpgroups) * kWarpgroupThreads;
  static constexpr int kStages = 3;   // of what belongs to 64 queries
  static constexpr int kBuffers = 2;  // of dS
  static constexpr int kProducerRegisters = 24;
  static constexpr int kMathRegisters = 240;
};

// Head dim of the kernel that serves `head_dim`.
constexpr int fp8_backward_dim(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : 128;
}

// Bytes of a row of Q, dO, K or V in shared memory: the width of a swizzle.
constexpr int fp8_row_bytes(int kernel_dim) {
  return kernel_dim == 64 ? 64 : 128;
}

// What belongs to 64 queries, and to 128 keys, as the kernel wants it in shared memory: one bulk
// copy brings it there. A multiple of what the swizzles ask for.
constexpr int fp8_row_image_bytes(int kernel_dim) {
  constexpr int kTerms = 1024;  // -LSE, -delta, two scales, and room
  return Fp8BackwardConfig::kRows * 2 * (fp8_row_bytes(kernel_dim) + kernel_dim) + kTerms;
}
constexpr int fp8_key_image_bytes(int kernel_dim) {
  return Fp8BackwardConfig::kKeys * (2 * fp8_row_bytes(kernel_dim) + kernel_dim);
}

// Byte offsets in the workspace.
struct Fp8BackwardWorkspace {
  std::size_t row_images;  // [heads_q][2 * blocks_q]
  std::size_t key_images;  // [heads_k][blocks_k]
  std::size_t dq_sum;      // float [heads_q][2 * blocks_q][2][64 * kernel_dim / 2]
  std::size_t turns;       // int32 [heads_q][2 * blocks_q][2], deterministic only
  std::size_t ticket;      // int32, deterministic only
  std::size_t bytes;
};

inline Fp8BackwardWorkspace fp8_backward_workspace(const ForwardProblem& problem, int kernel_dim) {
  const QuantizedSizes sizes = quantized_sizes(problem);
  const auto rows = static_cast<std::size_t>(problem.heads_q * sizes.blocks_q * 2);
  const auto keys = static_cast<std::size_t>(problem.heads_k * sizes.blocks_k);
  Fp8BackwardWorkspace w{};
  w.key_images = rows * static_cast<std::size_t>(fp8_row_image_bytes(kernel_dim));
  w.dq_sum = w.key_images + keys * static_cast<std::size_t>(fp8_key_image_bytes(kernel_dim));
  w.turns = w.dq_sum +
            rows * static_cast<std::size_t>(Fp8BackwardConfig::kRows * kernel_dim) * sizeof(float);
  w.ticket = w.turns + rows * 2 * sizeof(std::int32_t);
  w.bytes = (w.ticket + sizeof(std::int32_t) + 255) / 256 * 256;
  return w;
}

static_assert(fp8_row_image_bytes(64) % 1024 == 0 && fp8_row_image_bytes(96) % 1024 == 0 &&
              fp8_row_image_bytes(128) % 1024 == 0);
static_assert(fp8_key_image_bytes(64) % 1024 == 0 && fp8_key_image_bytes(96) % 1024 == 0 &&
              fp8_key_image_bytes(128) % 1024 == 0);

}  // namespace pantile::hopper
