// Plan, then run. Nothing here allocates memory the caller can see, throws, or waits for the GPU.
//
//   pantile::DeviceProps device;       pantile::query_device({}, &device);
//   pantile::ForwardPlan plan;         pantile::plan_forward(problem, device, {}, &plan);
//   /* lend plan.workspace.bytes */    pantile::run_forward(plan, tensors, workspace, stream);
#pragma once

#include <cstddef>

#include "pantile/export.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile {

// Validates the problem and picks the first kernel that accepts it. On failure `plan` is untouched
// and the status says which argument is wrong, or why each candidate refused.
PANTILE_API Status plan_forward(const ForwardProblem& problem, const DeviceProps& device,
                                const PlanOptions& options, ForwardPlan* plan);
PANTILE_API Status plan_backward(const BackwardProblem& problem, const DeviceProps& device,
                                 const PlanOptions& options, BackwardPlan* plan);

// Launches on `stream` (a cudaStream_t; ignored by the CPU backend, which returns when done).
// All pointers live on plan.device. `workspace` may be null when plan.workspace.bytes is 0.
PANTILE_API Status run_forward(const ForwardPlan& plan, const ForwardTensors& tensors,
                               void* workspace, void* stream);
PANTILE_API Status run_backward(const BackwardPlan& plan, const BackwardTensors& tensors,
                                void* workspace, void* stream);

// Checks the contents of CPU-resident cu_seqlens / seqused arrays: start at 0, never decrease, end
// at the totals, no sequence longer than the stated maximum. Optional: it reads the arrays.
PANTILE_API Status check_sequences(const ForwardProblem& problem, const ForwardTensors& tensors);

// One entry a row of the kernel table for the problem's pass: taken, or refused and why. Writes at
// most `capacity` entries in table order and returns how many rows there are.
struct Verdict {
  const KernelInfo* kernel = nullptr;
  bool chosen = false;
  bool closest = false;  // of its backend the row that is most like the problem
  Status reason;         // ok for the chosen row and for rows that would also have served
};
PANTILE_API int explain_forward(const ForwardProblem& problem, const DeviceProps& device,
                                const PlanOptions& options, Verdict* verdicts, int capacity);
PANTILE_API int explain_backward(const BackwardProblem& problem, const DeviceProps& device,
                                 const PlanOptions& options, Verdict* verdicts, int capacity);

// CPU threads. The backend owns a pool; a framework may lend its own instead, so that both never
// compete for cores. `loop(begin, end, grain, body, context)` must call `body(b, e, context)` over
// disjoint pieces of [begin, end) and return 0 when all are done. Null gives the own pool back.
using ParallelBody = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     ParallelBody body, void* context);
PANTILE_API void set_parallel_for(ParallelFor loop);
// Threads for later query_device() calls on the CPU; 0 means the number of usable cores.
PANTILE_API void set_cpu_threads(int threads);

// What this build contains: {"version": ..., "cuda": bool, "cuda_reason": ..., "nvcc": ...,
// "architectures": ..., "experiments": bool, "ampere_on_hopper": bool, ...} as a JSON object in
// static storage.
PANTILE_API const char* build_info();

}  // namespace pantile
