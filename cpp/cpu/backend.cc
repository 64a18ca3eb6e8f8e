// The CPU backend's rows of the kernel table: what they accept, how work is cut, and their runs.
// The reference's are in reference_backend.cc.
#include "cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cpu/items.h"
#include "cpu/job.h"
#include "cpu/key_statistics.h"
#include "cpu/kv_support.h"

namespace pantile::cpu {
namespace {

constexpr int kMaxItemRows = 768;
constexpr std::int64_t kItemBytes = 1088 * 1024;    // of Q and O that one item keeps in L2
constexpr std::int64_t kMostPackedRows = 16 << 20;  // elements of Q and dO
constexpr int kItemsPerThread = 3;                  // at least, so that threads finish together

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") is unknown to clang 14.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

CpuIsa hardware_isa() {
#if defined(__x86_64__)
  static const CpuIsa isa = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) {
      return CpuIsa::baseline;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
      return CpuIsa::avx2;
    }
    return CpuIsa::avx512;
  }();
  return isa;
#else
  return CpuIsa::baseline;
#endif
}

Status accept_problem(const ForwardProblem& problem, const DeviceProps& device) {
  if (device.device.type != DeviceType::cpu) {
    return Status::error(StatusCode::unsupported, "it runs on the CPU; the tensors are on a GPU");
  }
  const std::int64_t length = core::max_of(problem.seqlen_q, problem.seqlen_k);
  if (!core::TileOrder::fits(core::ceil_div<std::int64_t>(length, kForwardRows), problem.heads_q,
                             problem.batch)) {
    return Status::error(StatusCode::unsupported,
                         "batch * heads_q * seqlen / %d must stay below 2^31", kForwardRows);
  }
  return Status();
}

// Rows of one forward work item. Each item packs the keys it sees, so more rows pack less often;
// fewer rows give every thread enough items.
int forward_item_rows(const ForwardProblem& problem, const DeviceProps& device) {
  const std::int64_t row_bytes = 4 * (problem.head_dim + problem.head_dim_v);
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t wanted = std::int64_t{kItemsPerThread} * device.threads;
  std::int64_t rows = core::min_of<std::int64_t>(kMaxItemRows, kItemBytes / row_bytes);
  if (heads < wanted) {
    rows = core::min_of(rows, problem.seqlen_q * heads / wanted);
  }
  rows = core::max_of<std::int64_t>(rows, kForwardRows);
  const std::int64_t items = core::max_of<std::int64_t>(core::ceil_div(problem.seqlen_q, rows), 1);
  return static_cast<int>(core::round_up<std::int64_t>(
      core::max_of<std::int64_t>(core::ceil_div(problem.seqlen_q, items), 1), kForwardRows));
}

// The backward's workspace: what all threads share, then each thread's scratch memory.
struct BackwardWorkspace {
  float* delta;
  float* sum_q;
  float* packed_q;  // this and the next two are null when rows are packed again by every item
  float* packed_grad_o;
  std::uint8_t* finite;
  std::int32_t* turns;
  double* slope_sums;  // null unless wanted, and so the next
  double* sink_sums;
  std::int64_t slope_count, sink_count;
  double* captured_sums;  // empty unless wanted
  float* shared_grad_k;   // null unless ranges of keys may overlap
  float* shared_grad_v;
  std::int64_t shared_k_count, shared_v_count;
  void* scratch;
  std::size_t scratch_bytes;  // of one worker
  int workers;
  std::size_t bytes;
};

// Packing Q and dO once, in place of once for every tile of keys, makes the backward 4 % faster
// (f32, d128), for two more arrays like the one that dQ is summed in.
bool keeps_packed_rows(const BackwardPlan& plan) {
  const ForwardProblem& problem = plan.problem.forward;
  return problem.total_q * problem.heads_q * (problem.head_dim + problem.head_dim_v) <=
         kMostPackedRows;
}

BackwardWorkspace backward_workspace(const BackwardPlan& plan, const BackwardJob& job, void* base) {
  const ForwardProblem& problem = plan.problem.forward;
  const std::int64_t rows = problem.total_q * problem.heads_q;
  const std::int64_t tiles = problem.batch * problem.heads_q * job.row_tiles;
  Carver carver(base);
  BackwardWorkspace parts{};
  parts.delta = carver.take<float>(rows);
  parts.sum_q = carver.take<float>(rows * padded(job.dim));
  if (keeps_packed_rows(plan)) {
    // Register blocks read past the last row.
    parts.packed_q = carver.take<float>((rows + kBackwardRows) * padded(job.dim));
    parts.packed_grad_o = carver.take<float>((rows + kBackwardRows) * padded(job.dim_v));
    parts.finite = carver.take<std::uint8_t>(tiles);
  }
  parts.turns = carver.take<std::int32_t>(tiles);
  if (plan.problem.wants_grad_alibi) {
    parts.slope_count = problem.batch * problem.heads_q * job.key_tiles;
    parts.slope_sums = carver.take<double>(parts.slope_count);
  }
  if (plan.problem.wants_grad_sinks) {
    parts.sink_count = tiles;
    parts.sink_sums = carver.take<double>(parts.sink_count);
  }
  if (problem.has_k_begin) {
    parts.shared_k_count = problem.total_k * problem.heads_k * job.dim;
    parts.shared_v_count = problem.total_k * problem.heads_k * job.dim_v;
    parts.shared_grad_k = carver.take<float>(parts.shared_k_count);
    parts.shared_grad_v = carver.take<float>(parts.shared_v_count);
  }
  parts.captured_sums = carver.take<double>(job.captured_parts * job.captured_elements);
  parts.workers = workers_for(problem, plan.device, job.key_order.count());
  parts.scratch_bytes = aligned(backward_scratch(job, nullptr).bytes);
  parts.scratch = carver.take<char>(static_cast<std::int64_t>(parts.scratch_bytes) * parts.workers);
  parts.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return parts;
}

// [heads_q][rows][columns], packed closely, whatever the strides of `like`: working on rows that
// are pages apart was measured 5 % slower in all (f32, d128).
Operand packed_operand(const ForwardProblem& problem, const Operand& like, float* data,
                       std::int64_t columns) {
  Operand operand = like;
  operand.data = data;
  operand.head_stride = problem.total_q * columns;
  operand.side.batch_stride = problem.seqlen_q * columns;
  operand.side.seq_stride = columns;
  return operand;
}

void place_shared(const ForwardProblem& problem, const BackwardWorkspace& parts, BackwardJob* job) {
  job->delta = job->lse;
  job->delta.data = parts.delta;
  job->turns = parts.turns;
  job->finite = parts.finite;
  job->slope_sums = parts.slope_sums;
  job->sink_sums = parts.sink_sums;
  job->captured_sums = parts.captured_sums;
  std::fill_n(parts.slope_sums, parts.slope_count, 0.0);
  std::fill_n(parts.sink_sums, parts.sink_count, 0.0);
  job->shared_grad_k = parts.shared_grad_k;
  job->shared_grad_v = parts.shared_grad_v;
  std::fill_n(parts.shared_grad_k, parts.shared_k_count, 0.0f);
  std::fill_n(parts.shared_grad_v, parts.shared_v_count, 0.0f);
  job->sum_q = packed_operand(problem, job->q, parts.sum_q, padded(job->dim));
  job->packed_q = packed_operand(problem, job->q, parts.packed_q, padded(job->dim));
  job->packed_grad_o = packed_operand(problem, job->q, parts.packed_grad_o, padded(job->dim_v));
}

// The gradients of the slopes and of the sinks, from their parts in ascending order.
void write_sums(const BackwardProblem& problem, const BackwardJob& job) {
  const int heads = job.heads.heads_q;
  const auto sum = [](const double* parts, int count) {
    double total = 0.0;
    for (int i = 0; i < count; ++i) {
      total += parts[i];
    }
    return total;
  };
  if (float* slopes = job.variant_gradients.alibi_slopes; slopes != nullptr) {
    const int planes = problem.forward.variant.alibi_by_batch ? job.batch : 1;
    const int shared = planes == job.batch ? 1 : job.batch;
    for (int head = 0; head < heads; ++head) {
      for (int plane = 0; plane < planes; ++plane) {
        double total = 0.0;
        for (int batch = plane; batch < plane + shared; ++batch) {
          const std::int64_t first = std::int64_t{batch} * heads + head;
          total += sum(job.slope_sums + first * job.key_tiles, job.key_tiles);
        }
        slopes[plane * std::int64_t{heads} + head] = static_cast<float>(total);
      }
    }
  }
  if (float* sinks = job.variant_gradients.sinks; sinks != nullptr) {
    for (int head = 0; head < heads; ++head) {
      double total = 0.0;
      for (int batch = 0; batch < job.batch; ++batch) {
        const std::int64_t first = std::int64_t{batch} * heads + head;
        total += sum(job.sink_sums + first * job.row_tiles, job.row_tiles);
      }
      sinks[head] = static_cast<float>(total);
    }
  }
}

// The gradients of captured tensors, from their parts in ascending order.
void write_captured(const BackwardJob& job, const CapturedTensor* captured) {
  for (int i = 0; i < kMaxCaptured; ++i) {
    if (job.captured_begin[i] < 0) {
      continue;
    }
    const double* from = job.captured_sums + job.captured_begin[i];
    const std::int64_t count = captured_elements(captured[i]);
    for (std::int64_t at = 0; at < count; ++at) {
      double total = 0.0;
      for (int part = 0; part < job.captured_parts; ++part) {
        total += from[part * job.captured_elements + at];
      }
      job.variant_gradients.captured[i][at] = static_cast<float>(total);
    }
  }
}

// Keys of one backward work item. Each item packs the rows that see it and adds to their dQ, so
// more keys do so less often; but there should be some items to share out. The number of threads
// must not matter, because dQ is summed item by item.
int backward_item_keys(const ForwardProblem& problem) {
  constexpr std::int64_t kItems = 16;
  constexpr std::int64_t kBytes = 1088 * 1024;  // of K, K^T, V^T, dK, dV of an item, kept in L2
  const std::int64_t key_bytes = 4 * (3 * problem.head_dim + 2 * problem.head_dim_v);
  const std::int64_t subtiles = core::ceil_div<std::int64_t>(problem.seqlen_k, kBackwardKeys);
  const std::int64_t wanted = core::min_of(problem.batch * problem.heads_k * subtiles / kItems,
                                           kBytes / key_bytes / kBackwardKeys);
  const std::int64_t most = core::max_of<std::int64_t>(wanted, 4);
  const std::int64_t items = core::max_of<std::int64_t>(core::ceil_div(subtiles, most), 1);
  return static_cast<int>(core::max_of<std::int64_t>(core::ceil_div(subtiles, items), 1)) *
         kBackwardKeys;
}

}  // namespace

const KernelTable& kernels_for(CpuIsa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case CpuIsa::avx2: return avx2::kKernels;
    case CpuIsa::avx512: return avx512::kKernels;
#endif
    default: return baseline::kKernels;
  }
}

Status check_isa(const DeviceProps& device) {
  if (device.isa > hardware_isa()) {
    return Status::error(StatusCode::unavailable,
                         "the plan is for a CPU with %s; the best of this one is %s",
                         cpu_isa_name(device.isa), cpu_isa_name(hardware_isa()));
  }
  return Status();
}

CpuIsa detect_isa() {
  const CpuIsa best = hardware_isa();
  if (const char* name = std::getenv("PANTILE_CPU_ISA")) {
    for (int level = 0; level <= static_cast<int>(best); ++level) {
      if (std::strcmp(name, cpu_isa_name(static_cast<CpuIsa>(level))) == 0) {
        return static_cast<CpuIsa>(level);
      }
    }
  }
  return best;
}

Status accept_forward(const KernelInfo&, const ForwardProblem& problem, const DeviceProps& device) {
  return accept_problem(problem, device);
}

void configure_forward(ForwardPlan* plan) {
  plan->tile_q = forward_item_rows(plan->problem, plan->device);
  plan->tile_k = kForwardKeys;
  const ForwardJob job = forward_job(*plan, ForwardTensors());
  plan->blocks = job.order.count();
  const int workers = workers_for(plan->problem, plan->device, plan->blocks);
  plan->workspace.bytes =
      static_cast<std::size_t>(workers) * aligned(forward_scratch(job, nullptr).bytes);
}

Status run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, void*) {
  const Status status = check_isa(plan.device);
  if (!status.ok()) {
    return status;
  }
  const ForwardJob job = forward_job(plan, tensors);
  clear_outside(job, plan.problem);
  return run_items(job, kernels_for(plan.device.isa).forward, plan.blocks,
                   workers_for(plan.problem, plan.device, plan.blocks), workspace,
                   aligned(forward_scratch(job, nullptr).bytes));
}

void configure_forward_fp8(ForwardPlan* plan) {
  plan->tile_q = kFp8Rows;
  plan->tile_k = plan->problem.fp8.block_k;
  const Fp8ForwardJob job = fp8_forward_job(*plan, ForwardTensors());
  plan->blocks = job.order.count();
  plan->workspace.bytes =
      static_cast<std::size_t>(workers_for(plan->problem, plan->device, plan->blocks)) *
      aligned(fp8_scratch(job, nullptr).bytes);
}

Status run_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                       void*) {
  const Status status = check_isa(plan.device);
  if (!status.ok()) {
    return status;
  }
  const Fp8ForwardJob job = fp8_forward_job(plan, tensors);
  clear_outside(job, plan.problem);
  return run_items(job, kernels_for(plan.device.isa).forward_fp8, plan.blocks,
                   workers_for(plan.problem, plan.device, plan.blocks), workspace,
                   aligned(fp8_scratch(job, nullptr).bytes));
}

namespace {

// Sequences that may share keys, one after the other, so that every sum has one order; then their
// dK and dV from the sums.
Status run_shared_keys(const BackwardPlan& plan, const BackwardJob& job,
                       const BackwardWorkspace& parts, const KernelTable& kernels) {
  BackwardJob one = job;
  const int tiles = job.key_tiles;
  one.key_order = core::TileOrder(tiles, job.heads.heads_k, 1, core::max_of(plan.device.threads, 1),
                                  core::TileDirection::ascending);
  Status status;
  for (one.first_batch = 0; status.ok() && one.first_batch < job.batch; ++one.first_batch) {
    status = run_items(one, kernels.backward, one.key_order.count(), parts.workers, parts.scratch,
                       parts.scratch_bytes);
  }
  if (status.ok()) {
    const auto blocks = static_cast<int>(core::ceil_div<std::int64_t>(job.total_k, kSharedRows));
    status = run_items(job, kernels.write_shared_keys, job.heads.heads_k * blocks, parts.workers,
                       nullptr, 0);
  }
  return status;
}

}  // namespace

Status accept_backward(const KernelInfo&, const BackwardProblem& problem,
                       const DeviceProps& device) {
  return accept_problem(problem.forward, device);
}

void configure_backward(BackwardPlan* plan) {
  plan->tile_q = kBackwardRows;
  plan->tile_k = backward_item_keys(plan->problem.forward);
  const BackwardJob job = backward_job(*plan, BackwardTensors());
  plan->blocks = job.key_order.count();
  plan->workspace.bytes = backward_workspace(*plan, job, nullptr).bytes;
}

Status run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                    void*) {
  Status status = check_isa(plan.device);
  if (!status.ok()) {
    return status;
  }
  if (plan.problem.key_statistics == KeyStatistics::written) {
    write_key_statistics(plan.problem.forward, tensors);
    return status;
  }
  BackwardJob job = backward_job(plan, tensors);
  clear_outside(job, plan.problem.forward);
  const BackwardWorkspace parts = backward_workspace(plan, job, workspace);
  place_shared(plan.problem.forward, parts, &job);
  const KernelTable& kernels = kernels_for(plan.device.isa);
  status =
      run_items(job, kernels.prepare_backward, job.row_order.count(), parts.workers, nullptr, 0);
  if (!status.ok()) {
    return status;
  }
  status = plan.problem.forward.has_k_begin
               ? run_shared_keys(plan, job, parts, kernels)
               : run_items(job, kernels.backward, plan.blocks, parts.workers, parts.scratch,
                           parts.scratch_bytes);
  if (status.ok() && job.wants_grad_bias) {
    const int items = job.bias_batches * job.bias_heads * bias_row_tiles(job) * bias_key_tiles(job);
    status = run_items(job, kernels.bias_gradient, items, parts.workers, parts.scratch,
                       parts.scratch_bytes);
  }
  if (status.ok() && job.captured_parts > 0) {
    status = run_items(job, kernels.captured_gradient, job.captured_parts, parts.workers,
                       parts.scratch, parts.scratch_bytes);
  }
  if (status.ok()) {
    write_sums(plan.problem, job);
    write_captured(job, tensors.forward.variant.score_captured);
  }
  return status;
}

}  // namespace pantile::cpu
