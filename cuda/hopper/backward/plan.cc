// Which problems the backward kernels serve, and what a plan for one looks like.
#include <cinttypes>
#include <cmath>

#include "hopper/backward/workspace.h"
#include "hopper/device_rule.h"
#include "hopper/mask.h"
#include "hopper/plan.h"
#include "hopper/variant.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

Status shape_rule(const ForwardProblem& problem) {
  const std::int64_t dims[] = {problem.head_dim, problem.head_dim_v};
  const char* const names[] = {"head_dim", "head_dim_v"};
  for (int i = 0; i < 2; ++i) {
    if (dims[i] % 8 != 0) {
      return Status::error(kUnsupported, "%s is %" PRId64 "; it must be a multiple of 8", names[i],
                           dims[i]);
    }
  }
  // -lse / scale must be finite, and a row whose LSE is -inf must stay far below all others.
  const float magnitude = std::fabs(problem.scale);
  if (!(magnitude >= 0x1p-40f && magnitude <= 0x1p40f)) {
    return Status::error(kUnsupported, "scale is %g; its magnitude must be from 2^-40 to 2^40",
                         static_cast<double>(problem.scale));
  }
  return Status();
}

// Grids and map coordinates are 32-bit.
Status count_rule(const BackwardProblem& problem, int kernel_head_dim) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1024;
  const ForwardProblem& forward = problem.forward;
  const std::int64_t rows = counted_rows(forward);
  const std::int64_t keys = counted_keys(forward);
  if (rows > kMost || keys > kMost) {
    return Status::error(kUnsupported,
                         "total_q is %" PRId64 " and total_k %" PRId64
                         "; each must be at most 2^31 - 1024",
                         rows, keys);
  }
  const std::int64_t row_tiles = backward_workspace(problem, kernel_head_dim).row_tile_count;
  const std::int64_t slots = row_tiles * backward_tile_q(kernel_head_dim) * forward.heads_q;
  if (problem.deterministic && slots > core::kMostRowSlots) {
    return Status::error(kUnsupported,
                         "the heads have %" PRId64 " x %" PRId64
                         " rows, in whole tiles; at most 2^30 are numbered in deterministic mode",
                         forward.heads_q, row_tiles * backward_tile_q(kernel_head_dim));
  }
  const std::int64_t key_tiles =
      common::tile_numbers(forward.packed_k, keys, forward.batch, backward_tile_k(kernel_head_dim));
  const std::int64_t most_heads_q = kMost / (4 * (row_tiles > 0 ? row_tiles : 1));
  const std::int64_t most_heads_k = kMost / (key_tiles > 0 ? key_tiles : 1);
  if (forward.heads_q > most_heads_q || forward.heads_k > most_heads_k) {
    return Status::error(kUnsupported,
                         "the heads have %" PRId64 " x %" PRId64 " tiles of rows and %" PRId64
                         " x %" PRId64 " tiles of keys; at most 2^29 and 2^31 can be launched",
                         forward.heads_q, row_tiles, forward.heads_k, key_tiles);
  }
  return Status();
}

// What TMA maps and 16-byte accesses need. Axes of one element have canonical strides.
Status layout_rule(const char* name, const Layout& layout, std::int64_t batch, std::int64_t seq,
                   std::int64_t heads) {
  if (layout.base_align_bytes < 16) {
    return Status::error(kUnsupported, "%s is aligned to %d bytes; this kernel needs 16", name,
                         layout.base_align_bytes);
  }
  const char* const axes[] = {"batch", "seq", "head"};
  const std::int64_t sizes[] = {batch, seq, heads};
  const std::int64_t strides[] = {layout.batch, layout.seq, layout.head};
  for (int axis = 0; axis < 3; ++axis) {
    if (sizes[axis] <= 1) {
      continue;
    }
    if (strides[axis] <= 0 || strides[axis] % 8 != 0 || strides[axis] >= std::int64_t{1} << 39) {
      return Status::error(kUnsupported,
                           "%s: stride along %s is %" PRId64
                           "; this kernel needs a positive multiple of 8 below 2^39",
                           name, axes[axis], strides[axis]);
    }
  }
  return Status();
}

Status layout_rules(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  struct Entry {
    const char* name;
    const Layout& layout;
    bool keys;
  };
  const Entry entries[] = {
      {"q", forward.q, false},
      {"k", forward.k, true},
      {"v", forward.v, true},
      {"o", forward.o, false},
      {"grad_o", problem.grad_o, false},
      {"grad_q", problem.grad_q, false},
      {"grad_k", problem.grad_k, true},
      {"grad_v", problem.grad_v, true},
  };
  for (const Entry& entry : entries) {
    const bool packed = entry.keys ? forward.packed_k : forward.packed_q;
    const Status status = layout_rule(entry.name, entry.layout, packed ? 1 : forward.batch,
                                      entry.keys ? counted_keys(forward) : counted_rows(forward),
                                      entry.keys ? forward.heads_k : forward.heads_q);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

}  // namespace

Status accept_backward(const KernelInfo& row, const BackwardProblem& problem,
                       const DeviceProps& device) {
  if (row.dtype == DType::e4m3) {
    return accept_backward_fp8(row, problem, device);
  }
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(problem.forward);
  }
  if (status.ok()) {
    status = count_rule(problem, row.head_dim);
  }
  if (status.ok()) {
    status = variant_rule(problem);
  }
  return status.ok() ? layout_rules(problem) : status;
}

void configure_backward(BackwardPlan* plan) {
  if (plan->kernel->dtype == DType::e4m3) {
    configure_backward_fp8(plan);
    return;
  }
  const ForwardProblem& forward = plan->problem.forward;
  const int head_dim = plan->kernel->head_dim;
  plan->tile_q = backward_tile_q(head_dim);
  plan->tile_k = backward_tile_k(head_dim);
  const std::int64_t work = key_work(forward, plan->tile_k);
  plan->blocks = static_cast<int>(
      core::min_of<std::int64_t>(work, core::max_of(plan->device.multiprocessors, 1)));
  plan->workspace.bytes = backward_workspace(plan->problem, head_dim).bytes;
  plan->workspace.zeroed_bytes = 0;
  if (variant_hooks(plan->problem).mask_forms != 0) {
    plan->workspace.bytes = backward_lists(*plan).end;
  }
}

}  // namespace pantile::hopper
