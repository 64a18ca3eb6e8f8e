// Which FP8 problems the ampere kernels serve: the forward on quantised operands and the quantiser.
// No CUDA headers.
#include <cinttypes>

#include "ampere/fp8/config.h"
#include "ampere/order.h"
#include "ampere/plan.h"
#include "ampere/rules.h"
#include "attn/fp8_exp.h"
#include "common/fp8_rules.h"
#include "pantile/quantize.h"

namespace pantile::ampere {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

Status fp8_device_rule(const DeviceProps& device) {
  const Status status = device_rule(device);
  if (status.ok() && (device.compute_major < kFp8Major ||
                      (device.compute_major == kFp8Major && device.compute_minor < kFp8Minor))) {
    return Status::error(
        kUnsupported, "FP8 needs compute capability %d.%d or later, device %d has %d.%d", kFp8Major,
        kFp8Minor, device.device.index, device.compute_major, device.compute_minor);
  }
  return status;
}

Status count_rule(const ForwardProblem& p, int tile_q) {
  const std::int64_t tiles = core::ceil_div<std::int64_t>(p.seqlen_q, tile_q);
  if (!core::TileOrder::fits(tiles, p.heads_q, p.batch)) {
    return Status::error(kUnsupported,
                         "has 31-bit tile numbers: batch %" PRId64 " x heads_q %" PRId64
                         " x %" PRId64 " tiles of rows are too many",
                         p.batch, p.heads_q, tiles);
  }
  return Status();
}

Status exp_rule(const ForwardProblem& p) {
  if (attn::is_trial(p.fp8.exp)) {
    return Status::error(kUnsupported, "has fp8_exp code and exp2, it is %s",
                         fp8_exp_name(p.fp8.exp));
  }
  return Status();
}

}  // namespace

Status accept_forward_fp8(const KernelInfo& row, const ForwardProblem& p,
                          const DeviceProps& device) {
  Status status = fp8_device_rule(device);
  if (status.ok()) {
    status = common::fp8_shape_rule(p);
  }
  if (status.ok()) {
    status = layout_rule("o", p.o, p.fp8.output);
  }
  if (status.ok()) {
    status = count_rule(p, fp8_tile(row.head_dim).tile_q);
  }
  if (status.ok()) {
    status = exp_rule(p);
  }
  return status.ok() ? build_rule(row, device) : status;
}

void configure_forward_fp8(ForwardPlan* plan) {
  const Fp8Tile tile = fp8_tile(plan->kernel->head_dim);
  plan->tile_q = tile.tile_q;
  plan->tile_k = Fp8Tile::kTileK;
  plan->blocks = forward_order(plan->problem, plan->device, tile.tile_q).count();
  plan->workspace = Workspace{};
}

Status accept_quantize(const KernelInfo& row, const QuantizeProblem& problem,
                       const DeviceProps& device) {
  Status status = fp8_device_rule(device);
  if (status.ok()) {
    status = common::quantize_rule(problem);
  }
  return status.ok() ? build_rule(row, device) : status;
}

void configure_quantize(QuantizePlan* plan) {
  common::configure_quantize(plan);
}

}  // namespace pantile::ampere
