// Which FP8 problems the Hopper kernels serve: the forward on quantised operands and the quantiser.
// No CUDA headers.
#include <algorithm>
#include <cinttypes>

#include "common/fp8_rules.h"
#include "core/scaling.h"
#include "hopper/device_rule.h"
#include "hopper/forward/order.h"
#include "hopper/fp8/config.h"
#include "hopper/plan.h"
#include "hopper/tensor_rules.h"
#include "pantile/quantize.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

}  // namespace

Status accept_forward_fp8(const KernelInfo&, const ForwardProblem& p, const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = common::fp8_shape_rule(p);
  }
  if (status.ok()) {
    status = tensor_rule("o", p.o, p.fp8.output, p.packed_q ? 1 : p.batch,
                         p.packed_q ? p.total_q : p.seqlen_q, p.heads_q, true);
  }
  if (status.ok() && !forward_tiles_fit(p, kRowsPerWarpgroup)) {
    status = Status::error(kUnsupported,
                           "has 32-bit tile numbers, and batch * heads_q * seqlen_q is too large");
  }
  if (status.ok() && !fp8_exp_is_built(p.fp8.exp)) {
    status = Status::error(kUnsupported,
                           "kernel not built for fp8_exp = %s; configure with "
                           "PANTILE_EXPERIMENTS=ON",
                           fp8_exp_name(p.fp8.exp));
  }
  return status;
}

void configure_forward_fp8(ForwardPlan* plan) {
  constexpr std::size_t kCounters = 2 * sizeof(std::int32_t);
  const Fp8Config config = fp8_config(plan->kernel->head_dim);
  plan->tile_q = config.tile_q();
  plan->tile_k = Fp8Config::kTileK;
  plan->blocks =
      std::min(plan->device.multiprocessors,
               forward_order(plan->problem, plan->kernel->mask, config.tile_q()).count());
  plan->workspace = Workspace{kCounters, kCounters};
}

Status accept_quantize(const KernelInfo&, const QuantizeProblem& problem,
                       const DeviceProps& device) {
  const Status status = device_rule(device);
  return status.ok() ? common::quantize_rule(problem) : status;
}

void configure_quantize(QuantizePlan* plan) {
  common::configure_quantize(plan);
}

}  // namespace pantile::hopper
