// Which backward problems the ampere kernels serve, and what a plan for one looks like. No CUDA
// headers.
#include <cinttypes>

#include "ampere/backward_workspace.h"
#include "ampere/config.h"
#include "ampere/order.h"
#include "ampere/plan.h"
#include "ampere/rules.h"

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
    const Status status = layout_rule(tensor.name, tensor.layout);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

BackwardTile tile_of(const KernelInfo& row, const DeviceProps& device) {
  return backward_tile(row.head_dim, shared_class(device.smem_optin_bytes));
}

// Blocks are numbered with 31 bits, and so are the row tiles of all heads.
Status count_rule(const KernelInfo& row, const BackwardProblem& problem,
                  const DeviceProps& device) {
  const ForwardProblem& p = problem.forward;
  const BackwardTile tile = tile_of(row, device);
  const std::int64_t key_tiles = core::ceil_div<std::int64_t>(p.seqlen_k, tile.tile_k);
  const std::int64_t row_tiles = backward_workspace(problem, row.head_dim, tile.tile_q).row_tiles;
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
    status = row_rule(row, problem.forward);
  }
  if (status.ok()) {
    status = layout_rules(problem);
  }
  return status.ok() ? count_rule(row, problem, device) : status;
}

void configure_backward(BackwardPlan* plan) {
  const BackwardTile tile = tile_of(*plan->kernel, plan->device);
  plan->tile_q = tile.tile_q;
  plan->tile_k = tile.tile_k;
  plan->blocks = backward_order(plan->problem.forward, plan->device, tile.tile_k).count();
  plan->workspace =
      Workspace{backward_workspace(plan->problem, plan->kernel->head_dim, tile.tile_q).bytes, 0};
}

}  // namespace pantile::ampere
