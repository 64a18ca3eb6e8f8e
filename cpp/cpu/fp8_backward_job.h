// What one run of the FP8 backward works on, and a thread's memory for it.
#pragma once

#include <cstdint>

#include "core/blocked.h"
#include "core/fp8_steps.h"
#include "cpu/kernels.h"

namespace pantile::cpu {

// q, k and v hold codes, in the forms of pantile/quantize.h. `dtype` is that of O and of the
// gradients. `scale` is what dQ is multiplied by, row and key tiles are those of a step.
struct Fp8BackwardJob : BackwardJob {
  Fp8Tensors fp8;
  float softmax_scale = 0.0f;
  float scale_k = 0.0f;                     // what dK is multiplied by
  std::int64_t blocks_q = 0, blocks_k = 0;  // of 128 rows, of one head
  // In the workspace, by the rows of the operands, [heads_q][128 * blocks_q].
  std::uint8_t* grad_codes = nullptr;  // dO: [...][head_dim_v rounded up to 16]
  float* grad_scales = nullptr;        // [heads_q][blocks_q]
  // LSE of Q (K - mean) in log2 units. +inf for a row without keys, whose P is 0; NaN for one whose
  // dO is not finite.
  float* row_lse2 = nullptr;
  float* row_delta = nullptr;  // rowsum(dO * O) - dLSE, of the codes of dO
};

struct Fp8BackwardScratch {
  float* keys;            // K^T, B operand [dim][kFp8StepKeys]
  float* keys_summed;     // K, B operand [kFp8StepKeys][dim]
  float* values;          // V^T, B operand [dim_v][kFp8StepKeys]
  float* queries;         // Q, A operand [rows][dim]
  float* queries_summed;  // Q, B operand [rows][dim]
  float* grads;           // dO, both operands [rows][dim_v]
  float* scores;          // S, then P, then its codes [rows][kFp8StepKeys]
  float* grad_scores;     // dP, then dS, then its codes [rows][kFp8StepKeys]
  float* part;            // of dV, dK or dQ, of one step
  float* grad_keys;       // dK [kFp8StepKeys][dim]
  float* grad_values;     // dV [kFp8StepKeys][dim_v]
  float* grad_queries;    // dQ of the row tile [rows][dim]
  std::size_t bytes;
};

PANTILE_HD Fp8BackwardScratch fp8_backward_scratch(const Fp8BackwardJob& job, void* base) {
  const std::int64_t dim = padded(job.dim);
  const std::int64_t dim_v = padded(job.dim_v);
  constexpr std::int64_t kKeys = core::kFp8StepKeys + kRegisterRows;
  constexpr std::int64_t kRows = core::kFp8StepRows + kRegisterRows;
  Carver carver(base);
  Fp8BackwardScratch scratch{};
  scratch.keys = carver.take<float>(core::kFp8StepKeys * dim);
  scratch.keys_summed = carver.take<float>(core::kFp8StepKeys * dim);
  scratch.values = carver.take<float>(core::kFp8StepKeys * dim_v);
  scratch.queries = carver.take<float>(kRows * dim);
  scratch.queries_summed = carver.take<float>(kRows * dim);
  scratch.grads = carver.take<float>(kRows * dim_v);
  scratch.scores = carver.take<float>(kRows * core::kFp8StepKeys + kRegisterRows);
  scratch.grad_scores = carver.take<float>(kRows * core::kFp8StepKeys + kRegisterRows);
  scratch.part = carver.take<float>(kKeys * core::max_of(dim, dim_v));
  scratch.grad_keys = carver.take<float>(kKeys * dim);
  scratch.grad_values = carver.take<float>(kKeys * dim_v);
  scratch.grad_queries = carver.take<float>(kRows * dim);
  scratch.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return scratch;
}

// One instruction set's kernels, in a table of their own because they are compiled apart.
struct Fp8KernelTable {
  void (*prepare_backward)(const Fp8BackwardJob& job, int item, void*);  // of row_order
  void (*backward)(const Fp8BackwardJob& job, int item, void* scratch);  // of key_order
};

namespace baseline {
extern const Fp8KernelTable kFp8Kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Fp8KernelTable kFp8Kernels;
}
namespace avx512 {
extern const Fp8KernelTable kFp8Kernels;
}
#endif

}  // namespace pantile::cpu
