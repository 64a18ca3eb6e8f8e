// Which forward problems the Hopper kernels serve, and with which tiles. No CUDA headers.
#include <algorithm>
#include <cinttypes>

#include "core/tile_order.h"
#include "hopper/device_rule.h"
#include "hopper/forward/config.h"
#include "hopper/forward/order.h"
#include "hopper/mask.h"
#include "hopper/plan.h"
#include "hopper/tensor_rules.h"
#include "hopper/variant.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

Status shape_rule(const ForwardProblem& p) {
  if (p.head_dim % tile::kChunkColumns != 0 || p.head_dim_v % tile::kChunkColumns != 0) {
    return Status::error(
        kUnsupported, "needs head dims that are multiples of %d, they are %" PRId64 " and %" PRId64,
        tile::kChunkColumns, p.head_dim, p.head_dim_v);
  }
  if (!(p.scale > 0.0f)) {
    return Status::error(kUnsupported, "needs scale > 0, it is %g", static_cast<double>(p.scale));
  }
  return Status();
}

Status tensor_rules(const ForwardProblem& p) {
  const std::int64_t batch_q = p.packed_q ? 1 : p.batch;
  const bool paged = p.page_size > 0;
  const std::int64_t batch_k = paged ? p.pages : p.packed_k ? 1 : p.batch;
  const std::int64_t rows_q = p.packed_q ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = paged ? p.page_size : p.packed_k ? p.total_k : p.seqlen_k;
  const Status rules[] = {
      tensor_rule("q", p.q, p.dtype, batch_q, rows_q, p.heads_q, false),
      tensor_rule("k", p.k, p.dtype, batch_k, rows_k, p.heads_k, false),
      tensor_rule("v", p.v, p.dtype, batch_k, rows_k, p.heads_k, false),
      tensor_rule("o", p.o, output_dtype(p), batch_q, rows_q, p.heads_q, true),
  };
  for (const Status& rule : rules) {
    if (!rule.ok()) {
      return rule;
    }
  }
  // One pair of coordinates serves K and V, and an expanded axis has only coordinate 0.
  if ((p.heads_k > 1 && (p.k.head == 0) != (p.v.head == 0)) ||
      (batch_k > 1 && (p.k.batch == 0) != (p.v.batch == 0))) {
    return Status::error(kUnsupported, "needs k and v expanded along the same axes or not at all");
  }
  return Status();
}

// A copy moves keys of one page, and swizzled tiles are made of 8 rows.
Status pages_rule(const ForwardProblem& p) {
  if (p.page_size % kPageMultiple != 0) {
    return Status::error(kUnsupported, "needs page_size to be a multiple of %d, it is %" PRId64,
                         kPageMultiple, p.page_size);
  }
  if (p.page_size > 0 && p.pages > 1 && (p.k.batch == 0 || p.v.batch == 0)) {
    return Status::error(kUnsupported, "needs pages that are not expanded");
  }
  return Status();
}

}  // namespace

Status accept_forward(const KernelInfo& row, const ForwardProblem& problem,
                      const DeviceProps& device) {
  if (row.dtype == DType::e4m3) {
    return accept_forward_fp8(row, problem, device);
  }
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(problem);
  }
  if (status.ok()) {
    status = tensor_rules(problem);
  }
  if (status.ok()) {
    status = pages_rule(problem);
  }
  if (status.ok()) {
    status = variant_rule(problem);
  }
  if (status.ok() && !forward_tiles_fit(problem, kRowsPerWarpgroup)) {
    status = Status::error(kUnsupported,
                           "has 32-bit tile numbers, and batch * heads_q * seqlen_q is too large");
  }
  return status;
}

void configure_forward(ForwardPlan* plan) {
  if (plan->kernel->dtype == DType::e4m3) {
    configure_forward_fp8(plan);
    return;
  }
  const KernelInfo& row = *plan->kernel;
  const ForwardProblem& p = plan->problem;
  const ForwardShapes shapes = forward_shapes(row.head_dim, row.head_dim_v, row.mask);
  const VariantHooks hooks = variant_hooks(p);
  // At head dims 80 and 96 the second shape has no registers for hooks.
  const bool has_other = shapes.has_other && !(hooks.any() && row.head_dim > 64);
  const bool other = needs_other_shape(hooks, row.head_dim) ||
                     (has_other && prefers_other_shape(row.head_dim, p.seqlen_q, p.seqlen_k));
  const ForwardConfig& config = other ? shapes.other : shapes.main;
  plan->tile_q = config.tile_q();
  plan->tile_k = config.tile_k;
  plan->blocks =
      std::min(plan->device.multiprocessors, forward_order(p, row.mask, config.tile_q()).count());
  // With one tile a block there is nothing to claim, and nothing to lend for it.
  const bool claims = claims_dynamically(p, row.mask) &&
                      forward_order(p, row.mask, config.tile_q()).count() > plan->blocks;
  const std::size_t counters = claims ? 2 * sizeof(std::int32_t) : 0;
  plan->workspace = Workspace{counters, counters};
  if (hooks.mask_forms != 0) {
    plan->workspace.bytes = forward_lists(*plan).end;
  }
}

}  // namespace pantile::hopper
