// Which FP8 problems the Hopper kernels serve: the forward on quantised operands and the quantiser.
// No CUDA headers.
#include <algorithm>
#include <cinttypes>

#include "core/blocked.h"
#include "core/scaling.h"
#include "hopper/forward_order.h"
#include "hopper/fp8_config.h"
#include "hopper/plan.h"
#include "hopper/tensor_rules.h"
#include "pantile/quantize.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - (std::int64_t{1} << 20);

Status device_rule(const DeviceProps& device) {
  if (device.device.type != DeviceType::cuda) {
    return Status::error(kUnsupported, "needs a CUDA device");
  }
  if (device.compute_major != 9 || device.compute_minor != 0) {
    return Status::error(kUnsupported, "needs compute capability 9.0, device %d has %d.%d",
                         device.device.index, device.compute_major, device.compute_minor);
  }
  return Status();
}

// What both kernels ask of the shape.
Status shape_rule(const KernelInfo& row, const ForwardProblem& p) {
  if (p.head_dim != p.head_dim_v) {
    return Status::error(kUnsupported,
                         "needs equal head dims of K and V, they are %" PRId64 " and %" PRId64,
                         p.head_dim, p.head_dim_v);
  }
  if (p.head_dim > row.head_dim || p.head_dim % tile::kChunkColumns != 0) {
    return Status::error(kUnsupported,
                         "serves head dims up to %d that are multiples of %d, it is %" PRId64,
                         row.head_dim, tile::kChunkColumns, p.head_dim);
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

Status mask_rule(const KernelInfo& row, const ForwardProblem& p) {
  if (mask_kind(p) != row.mask) {
    return Status::error(kUnsupported,
                         "serves %s masks, window_left is %" PRId64 " and window_right %" PRId64,
                         mask_kind_name(row.mask), p.window_left, p.window_right);
  }
  return Status();
}

}  // namespace

Status accept_forward_fp8(const KernelInfo& row, const ForwardProblem& p,
                          const DeviceProps& device) {
  if (p.dtype != DType::e4m3) {
    return Status::error(kUnsupported, "serves e4m3, dtype is %s", dtype_name(p.dtype));
  }
  Status status = device_rule(device);
  if (status.ok() && device.smem_optin_bytes < kSharedMemoryBytes) {
    status =
        Status::error(kUnsupported, "needs %d bytes of shared memory a block, device %d has %d",
                      kSharedMemoryBytes, device.device.index, device.smem_optin_bytes);
  }
  if (status.ok()) {
    status = shape_rule(row, p);
  }
  if (status.ok()) {
    status = mask_rule(row, p);
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

Status accept_quantize(const KernelInfo& row, const QuantizeProblem& problem,
                       const DeviceProps& device) {
  const ForwardProblem& p = problem.forward;
  if (problem.dtype != row.dtype) {
    return Status::error(kUnsupported, "serves %s, dtype is %s", dtype_name(row.dtype),
                         dtype_name(problem.dtype));
  }
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(row, p);
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
