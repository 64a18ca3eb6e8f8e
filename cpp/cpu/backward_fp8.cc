// The CPU's row of the FP8 backward: what it accepts, its workspace and its runs.
#include "core/hadamard.h"
#include "cpu/backend.h"
#include "cpu/fp8_backward_job.h"
#include "cpu/items.h"
#include "cpu/job.h"
#include "cpu/kv_support.h"

namespace pantile::cpu {
namespace {

const Fp8KernelTable& fp8_kernels_for(CpuIsa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case CpuIsa::avx2: return avx2::kFp8Kernels;
    case CpuIsa::avx512: return avx512::kFp8Kernels;
#endif
    default: return baseline::kFp8Kernels;
  }
}

core::TileOrder order_of(const ForwardProblem& problem, std::int64_t length, std::int64_t heads,
                         int section) {
  const auto tiles = static_cast<int>(core::ceil_div<std::int64_t>(length, core::kBlockedRows));
  return core::TileOrder(tiles, static_cast<int>(heads), static_cast<int>(problem.batch), section,
                         core::TileDirection::ascending);
}

Fp8BackwardJob make_job(const BackwardPlan& plan, const BackwardTensors& tensors) {
  const ForwardProblem& problem = plan.problem.forward;
  const QuantizedSizes sizes = quantized_sizes(problem);
  Fp8BackwardJob job;
  static_cast<BackwardJob&>(job) = backward_job(plan, tensors);
  job.dtype = problem.fp8.output;
  job.fp8 = tensors.forward.fp8;
  job.softmax_scale = problem.scale;
  const auto balance = static_cast<float>(core::rotation_balance(core::hadamard_group(job.dim)));
  job.scale = problem.scale * balance;
  job.scale_k = problem.scale / balance;
  job.blocks_q = sizes.blocks_q;
  job.blocks_k = sizes.blocks_k;
  job.row_order = order_of(problem, problem.seqlen_q, problem.heads_q, 1);
  job.key_order =
      order_of(problem, problem.seqlen_k, problem.heads_k, core::max_of(plan.device.threads, 1));
  job.row_tiles =
      static_cast<int>(core::ceil_div<std::int64_t>(problem.seqlen_q, core::kFp8StepRows));
  return job;
}

struct Fp8BackwardWorkspace {
  void* scratch;
  std::size_t scratch_bytes;  // of one worker
  int workers;
  std::size_t bytes;
};

// Places the arrays that all threads share, then each thread's scratch memory.
Fp8BackwardWorkspace place(const BackwardPlan& plan, void* base, Fp8BackwardJob* job) {
  const ForwardProblem& problem = plan.problem.forward;
  const std::int64_t blocks = problem.heads_q * job->blocks_q;
  const std::int64_t rows = blocks * core::kBlockedRows;
  const std::int64_t columns = padded(job->dim);
  Carver carver(base);
  job->grad_codes = carver.take<std::uint8_t>(rows * padded(job->dim_v));
  job->grad_scales = carver.take<float>(blocks);
  job->row_lse2 = carver.take<float>(rows);
  job->row_delta = carver.take<float>(rows);
  job->turns = carver.take<std::int32_t>(problem.batch * problem.heads_q * job->row_tiles);
  job->sum_q = job->q;
  job->sum_q.data = carver.take<float>(problem.total_q * problem.heads_q * columns);
  job->sum_q.head_stride = problem.total_q * columns;
  job->sum_q.side.batch_stride = problem.seqlen_q * columns;
  job->sum_q.side.seq_stride = columns;
  Fp8BackwardWorkspace parts{};
  parts.workers = workers_for(problem, plan.device, job->key_order.count());
  parts.scratch_bytes = aligned(fp8_backward_scratch(*job, nullptr).bytes);
  parts.scratch = carver.take<char>(static_cast<std::int64_t>(parts.scratch_bytes) * parts.workers);
  parts.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return parts;
}

}  // namespace

void configure_backward_fp8(BackwardPlan* plan) {
  plan->tile_q = core::kFp8StepRows;
  plan->tile_k = core::kFp8StepKeys;
  Fp8BackwardJob job = make_job(*plan, BackwardTensors());
  plan->blocks = job.key_order.count();
  plan->workspace.bytes = place(*plan, nullptr, &job).bytes;
}

Status run_backward_fp8(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                        void* /*stream*/) {
  Status status = check_isa(plan.device);
  if (!status.ok()) {
    return status;
  }
  Fp8BackwardJob job = make_job(plan, tensors);
  clear_outside(job, plan.problem.forward);
  const Fp8BackwardWorkspace parts = place(plan, workspace, &job);
  const Fp8KernelTable& kernels = fp8_kernels_for(plan.device.isa);
  status =
      run_items(job, kernels.prepare_backward, job.row_order.count(), parts.workers, nullptr, 0);
  if (status.ok()) {
    status = run_items(job, kernels.backward, plan.blocks, parts.workers, parts.scratch,
                       parts.scratch_bytes);
  }
  return status;
}

}  // namespace pantile::cpu
