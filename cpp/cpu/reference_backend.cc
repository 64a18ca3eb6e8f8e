// The reference's rows of the kernel table.
#include "cpu/reference.h"

#include <algorithm>

#include "cpu/backend.h"
#include "cpu/items.h"
#include "cpu/job.h"
#include "cpu/key_statistics.h"

namespace pantile::cpu {

void configure_reference_forward(ForwardPlan* plan) {
  plan->tile_q = kReferenceRows;
  plan->tile_k = 1;
  const ForwardJob job = forward_job(*plan, ForwardTensors());
  plan->blocks = job.order.count();
  const std::int64_t doubles = reference_forward_doubles(static_cast<int>(plan->problem.seqlen_k));
  plan->workspace.bytes =
      static_cast<std::size_t>(workers_for(plan->problem, plan->device, plan->blocks)) *
      aligned(static_cast<std::size_t>(doubles) * sizeof(double));
}

// Runs kRows(job, batch, head, rows, scratch) on every tile of a reference forward.
template <class Job, void (*kRows)(const Job&, int, int, core::Span, double*)>
Status run_reference_rows(const Job& job, const ForwardPlan& plan, void* workspace) {
  clear_outside(job, plan.problem);
  const std::int64_t doubles = reference_forward_doubles(static_cast<int>(plan.problem.seqlen_k));
  const auto tile = [](const Job& j, int item, void* scratch) {
    const core::WorkTile work = j.order.tile(item);
    const int begin = work.tile * kReferenceRows;
    kRows(j, work.batch, work.head, core::Span{begin, begin + kReferenceRows},
          static_cast<double*>(scratch));
  };
  return run_items<Job>(job, tile, plan.blocks, workers_for(plan.problem, plan.device, plan.blocks),
                        workspace, aligned(static_cast<std::size_t>(doubles) * sizeof(double)));
}

Status reference_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors,
                             void* workspace, void*) {
  return run_reference_rows<Fp8ForwardJob, reference_fp8_rows>(fp8_forward_job(plan, tensors), plan,
                                                               workspace);
}

Status reference_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                         void*) {
  return run_reference_rows<ForwardJob, reference_forward_rows>(forward_job(plan, tensors), plan,
                                                                workspace);
}

namespace {

// Elements of the gradients of the variant's tensors, 0 unless wanted.
struct VariantSumCount {
  std::int64_t slopes, sinks, bias, captured;
  std::int64_t all() const { return slopes + sinks + bias + captured; }
};

VariantSumCount variant_sum_count(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  const std::int64_t planes = forward.variant.alibi_by_batch ? forward.batch : 1;
  return VariantSumCount{problem.wants_grad_alibi ? planes * forward.heads_q : 0,
                         problem.wants_grad_sinks ? forward.heads_q : 0,
                         problem.wants_grad_bias ? bias_gradient_shape(forward).count() : 0,
                         problem.wants_grad_captured != 0 ? problem.grad_captured_elements : 0};
}

// Elements of the sums of dK and dV where sequences may share keys, else 0.
std::int64_t shared_sum_count(const ForwardProblem& problem) {
  return problem.has_k_begin
             ? problem.heads_k * problem.total_k * (problem.head_dim + problem.head_dim_v)
             : 0;
}

// One where heads or sequences add to the same sums.
int reference_workers(const BackwardPlan& plan) {
  return variant_sum_count(plan.problem).all() > 0 || shared_sum_count(plan.problem.forward) > 0
             ? 1
             : workers_for(plan.problem.forward, plan.device, plan.blocks);
}

// A work item of the reference's backward: a key/value head of a sequence.
struct ReferenceJob {
  const BackwardJob* job;
  VariantSums sums;
};

void write_floats(const double* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

}  // namespace

void configure_reference_backward(BackwardPlan* plan) {
  const ForwardProblem& problem = plan->problem.forward;
  plan->tile_q = 1;
  plan->tile_k = kBackwardKeys;
  plan->blocks = static_cast<int>(problem.batch * problem.heads_k);
  const std::int64_t doubles = reference_backward_doubles(static_cast<int>(problem.seqlen_k),
                                                          static_cast<int>(problem.head_dim),
                                                          static_cast<int>(problem.head_dim_v));
  const auto sums =
      static_cast<std::size_t>(variant_sum_count(plan->problem).all() + shared_sum_count(problem));
  plan->workspace.bytes = static_cast<std::size_t>(reference_workers(*plan)) *
                              aligned(static_cast<std::size_t>(doubles) * sizeof(double)) +
                          sums * sizeof(double);
}

Status reference_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                          void*) {
  if (plan.problem.key_statistics == KeyStatistics::written) {
    write_key_statistics(plan.problem.forward, tensors);
    return Status();
  }
  const ForwardProblem& problem = plan.problem.forward;
  BackwardJob job = backward_job(plan, tensors);
  clear_outside(job, problem);
  const std::int64_t doubles =
      reference_backward_doubles(static_cast<int>(problem.seqlen_k), job.dim, job.dim_v);
  const std::size_t scratch_bytes = aligned(static_cast<std::size_t>(doubles) * sizeof(double));
  const int workers = reference_workers(plan);
  const VariantSumCount count = variant_sum_count(plan.problem);
  auto* sums = reinterpret_cast<double*>(static_cast<char*>(workspace) +
                                         static_cast<std::size_t>(workers) * scratch_bytes);
  const std::int64_t shared_count = shared_sum_count(problem);
  std::fill_n(sums, count.all() + shared_count, 0.0);
  job.shared_sums = shared_count > 0 ? sums + count.all() : nullptr;
  double* captured_sums[kMaxCaptured] = {};
  for (int i = 0; i < kMaxCaptured; ++i) {
    if (job.captured_begin[i] >= 0) {
      captured_sums[i] = sums + count.slopes + count.sinks + count.bias + job.captured_begin[i];
    }
  }
  const ReferenceJob shared{
      &job,
      {count.slopes > 0 ? sums : nullptr, count.sinks > 0 ? sums + count.slopes : nullptr,
       count.bias > 0 ? sums + count.slopes + count.sinks : nullptr,
       count.captured > 0 ? captured_sums : nullptr}};
  const auto head = [](const ReferenceJob& j, int item, void* scratch) {
    const core::Heads& heads = j.job->heads;
    reference_backward_head(*j.job, item / heads.heads_k, item % heads.heads_k,
                            static_cast<double*>(scratch), j.sums);
  };
  const Status status =
      run_items<ReferenceJob>(shared, head, plan.blocks, workers, workspace, scratch_bytes);
  for (int i = 0; status.ok() && job.shared_sums != nullptr && i < job.heads.heads_k; ++i) {
    reference_write_shared(job, i);
  }
  if (status.ok()) {
    write_floats(sums, count.slopes, tensors.variant.alibi_slopes);
    write_floats(sums + count.slopes, count.sinks, tensors.variant.sinks);
    write_floats(sums + count.slopes + count.sinks, count.bias, tensors.variant.bias);
    for (int i = 0; i < kMaxCaptured; ++i) {
      if (captured_sums[i] != nullptr) {
        write_floats(captured_sums[i], captured_elements(tensors.forward.variant.score_captured[i]),
                     tensors.variant.captured[i]);
      }
    }
  }
  return status;
}

}  // namespace pantile::cpu
