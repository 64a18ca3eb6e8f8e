// Which backward problems the ampere kernels serve, and what a plan for one looks like. No CUDA
// headers.
#include <cinttypes>

#include "ampere/backward/workspace.h"
#include "ampere/config.h"
#include "ampere/f32/config.h"
#include "ampere/order.h"
#include "ampere/plan.h"
#include "ampere/rules.h"
#include "ampere/variant.h"

namespace pantile::ampere {
namespace {

Status layout_rules(const BackwardProblem& problem) {
  const ForwardProblem& p = problem.forward;
  const struct {
    const char* name;
    const Layout& layout;
  } tensors[] = {
      {"q", p.q},
      {"k", p.k},
      {"v", p.v},
      {"o", p.o},
      {"grad_o", problem.grad_o},
      {"grad_q", problem.grad_q},
      {"grad_k", problem.grad_k},
      {"grad_v", problem.grad_v},
  };
  for (const auto& tensor : tensors) {
    const Status status = layout_rule(tensor.name, tensor.layout, p.dtype);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

struct TileSize {
  int q, k;
};

// In fp32 either side is cut into tiles by the launch that owns its gradients.
TileSize tile_of(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device) {
  if (row.dtype == DType::f32) {
    const SharedClass shared = shared_class(device.smem_optin_bytes);
    const int own = backward_tile_f32(row.head_dim, p.float32_precision, shared).own;
    return TileSize{own, own};
  }
  const BackwardTile tile = backward_tile(row.head_dim, compiled_class(device.smem_optin_bytes));
  return TileSize{tile.tile_q, tile.tile_k};
}

// Not of fp32.
BackwardWorkspace workspace_of(const KernelInfo& row, const BackwardProblem& problem,
                               const DeviceProps& device) {
  return backward_workspace(problem, row.head_dim,
                            backward_tile(row.head_dim, compiled_class(device.smem_optin_bytes)));
}

std::int64_t row_tile_count(const KernelInfo& row, const BackwardProblem& problem,
                            const DeviceProps& device, int tile_q) {
  const ForwardProblem& p = problem.forward;
  return row.dtype == DType::f32 ? core::ceil_div<std::int64_t>(p.seqlen_q, tile_q) * p.batch
                                 : workspace_of(row, problem, device).row_tiles;
}

std::size_t workspace_bytes(const KernelInfo& row, const BackwardProblem& problem,
                            const DeviceProps& device) {
  return row.dtype == DType::f32 ? backward_workspace_bytes_f32(problem.forward)
                                 : workspace_of(row, problem, device).bytes;
}

// Blocks are numbered with 31 bits, and so are the row tiles of all heads.
Status count_rule(const KernelInfo& row, const BackwardProblem& problem,
                  const DeviceProps& device) {
  const ForwardProblem& p = problem.forward;
  const TileSize tile = tile_of(row, p, device);
  const std::int64_t key_tiles = core::ceil_div<std::int64_t>(p.seqlen_k, tile.k);
  const std::int64_t row_tiles = row_tile_count(row, problem, device, tile.q);
  if (!core::TileOrder::fits(key_tiles, p.heads_k, p.batch) ||
      !core::TileOrder::fits(row_tiles, p.heads_q, 1)) {
    return Status::error(StatusCode::unsupported,
                         "has 31-bit tile numbers: batch %" PRId64 " x heads_k %" PRId64
                         " x %" PRId64 " tiles of keys or heads_q %" PRId64 " x %" PRId64
                         " tiles of rows are too many",
                         p.batch, p.heads_k, key_tiles, p.heads_q, row_tiles);
  }
  return Status();
}

}  // namespace

Status accept_backward(const KernelInfo& row, const BackwardProblem& problem,
                       const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = dim_rule(row, problem.forward);
  }
  if (status.ok()) {
    status = layout_rules(problem);
  }
  if (status.ok()) {
    status = count_rule(row, problem, device);
  }
  if (status.ok()) {
    status = variant_rule(problem, device);
  }
  return status.ok() ? build_rule(row, device) : status;
}

void configure_backward(BackwardPlan* plan) {
  const TileSize tile = tile_of(*plan->kernel, plan->problem.forward, plan->device);
  plan->tile_q = tile.q;
  plan->tile_k = tile.k;
  plan->blocks = backward_order(plan->problem.forward, plan->device, tile.k).count();
  plan->workspace = Workspace{workspace_bytes(*plan->kernel, plan->problem, plan->device), 0};
}

}  // namespace pantile::ampere
