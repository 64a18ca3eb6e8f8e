// Which FP8 problems the Hopper kernels serve: the forward on quantised operands and the quantiser.
// No CUDA headers.
#include <algorithm>
#include <cinttypes>

#include "core/blocked.h"
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
constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - (std::int64_t{1} << 20);

// What both kernels ask of the shape.
Status shape_rule(const ForwardProblem& p) {
  if (p.head_dim != p.head_dim_v) {
    return Status::error(kUnsupported,
                         "needs equal head dims of K and V, they are %" PRId64 " and %" PRId64,
                         p.head_dim, p.head_dim_v);
  }
  if (p.head_dim % tile::kChunkColumns != 0) {
    return Status::error(kUnsupported, "needs head dims that are multiples of %d, it is %" PRId64,
                         tile::kChunkColumns, p.head_dim);
  }
  if (p.fp8.block_k != Fp8Config::kTileK) {
    return Status::error(kUnsupported, "needs fp8.block_k %d, it is %d", Fp8Config::kTileK,
                         p.fp8.block_k);
  }
  const QuantizedSizes sizes = quantized_sizes(p);
  if (p.heads_q * sizes.blocks_q * Fp8Config::kTileK > kMostRows ||
      p.heads_k * sizes.blocks_k * Fp8Config::kTileK > kMostRows) {
    return Status::error(kUnsupported,
                         "has 32-bit row numbers, and batch * heads * seqlen is too large");
  }
  return Status();
}

}  // namespace

Status accept_forward_fp8(const KernelInfo&, const ForwardProblem& p, const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(p);
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
  const ForwardProblem& p = problem.forward;
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(p);
  }
  const struct {
    const char* name;
    const Layout& layout;
    std::int64_t rows, heads;
  } inputs[] = {
      {"q", problem.q, p.packed_q ? p.total_q : p.seqlen_q, p.heads_q},
      {"k", problem.k, p.packed_k ? p.total_k : p.seqlen_k, p.heads_k},
      {"v", problem.v, p.packed_k ? p.total_k : p.seqlen_k, p.heads_k},
  };
  // Eight elements are loaded at a time.
  const int align = std::min(16, tile::kChunkColumns * dtype_bytes(problem.dtype));
  for (const auto& input : inputs) {
    const std::int64_t strides[] = {p.batch > 1 ? input.layout.batch : 0,
                                    input.rows > 1 ? input.layout.seq : 0,
                                    input.heads > 1 ? input.layout.head : 0};
    for (const std::int64_t stride : strides) {
      if (status.ok() && stride % tile::kChunkColumns != 0) {
        status = Status::error(kUnsupported,
                               "%s: a stride is %" PRId64 " elements; it must be a multiple of %d",
                               input.name, stride, tile::kChunkColumns);
      }
    }
    if (status.ok() && input.layout.base_align_bytes < align) {
      status = Status::error(kUnsupported, "%s must be aligned to %d bytes, it is to %d",
                             input.name, align, input.layout.base_align_bytes);
    }
  }
  return status;
}

void configure_quantize(QuantizePlan* plan) {
  const ForwardProblem& p = plan->problem.forward;
  const QuantizedSizes sizes = quantized_sizes(p);
  plan->tile_q = plan->tile_k = core::kBlockedRows;
  plan->blocks = static_cast<int>(p.heads_q * sizes.blocks_q + 2 * p.heads_k * sizes.blocks_k);
  // Sums of K over blocks, then its mean with the signs of the rotation.
  const std::int64_t sums =
      p.fp8.smooth_k ? p.heads_k * (sizes.blocks_k + p.batch) * p.head_dim : 0;
  plan->workspace = Workspace{static_cast<std::size_t>(sums) * sizeof(float), 0};
}

}  // namespace pantile::hopper
