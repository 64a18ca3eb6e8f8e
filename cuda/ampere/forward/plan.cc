// Which forward problems the ampere kernels serve, and with which tiles. No CUDA headers.
#include <cinttypes>
#include <cmath>

#include "ampere/config.h"
#include "ampere/f32/config.h"
#include "ampere/forward/softmax_choice.h"
#include "ampere/forward/tuned.h"
#include "ampere/order.h"
#include "ampere/plan.h"
#include "ampere/rules.h"
#include "ampere/variant.h"

namespace pantile::ampere {
namespace {

Status layout_rules(const ForwardProblem& p) {
  const struct {
    const char* name;
    const Layout& layout;
  } tensors[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"o", p.o}};
  for (const auto& tensor : tensors) {
    const Status status = layout_rule(tensor.name, tensor.layout, p.dtype);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

// The caller's, or what was measured here for such calls, or the table's.
SoftmaxOptions softmax_of(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device,
                          const char** source = nullptr) {
  SoftmaxOptions softmax = complete_softmax(row, p, device);
  const char* from = choice_source(row, p, device);
  TunedChoice tuned;
  if (p.softmax.unit == SoftmaxUnit::automatic && has_choice(row, p) &&
      find_tuned(row, p, device, &tuned)) {
    softmax.unit = tuned.unit;
    from = tuned.source;
  }
  if (source != nullptr) {
    *source = from;
  }
  return softmax;
}

struct TileSize {
  int q, k;
};

TileSize tile_of(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device) {
  const VariantHooks hooks = variant_hooks(p);
  const SharedClass device_class = shared_class(device.smem_optin_bytes);
  if (row.dtype == DType::f32) {
    const ForwardTileF32 tile = forward_tile_f32(row.head_dim, p.float32_precision, device_class);
    return TileSize{tile.tile_q, tile.tile_k};
  }
  const SharedClass shared = hooks.any()
                                 ? variant_tile_class(hooks, device_class)
                                 : forward_tile_class(compiled_class(device.smem_optin_bytes),
                                                      forward_softmax(softmax_of(row, p, device)),
                                                      p.seqlen_k > kLongRowKeys);
  const ForwardTile tile = forward_tile(row.head_dim, row.head_dim_v, row.mask, shared);
  return TileSize{tile.tile_q, tile.tile_k};
}

// Blocks are numbered with 31 bits.
Status count_rule(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device) {
  const int tile_q = tile_of(row, p, device).q;
  const std::int64_t tiles = core::ceil_div<std::int64_t>(p.seqlen_q, tile_q);
  if (!core::TileOrder::fits(tiles, p.heads_q, p.batch)) {
    return Status::error(StatusCode::unsupported,
                         "has 31-bit tile numbers: batch %" PRId64 " x heads_q %" PRId64
                         " x %" PRId64 " tiles of rows are too many",
                         p.batch, p.heads_q, tiles);
  }
  return Status();
}

Status softmax_rule(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device) {
  const SoftmaxOptions softmax = softmax_of(row, p, device);
  if (!has_softmax(row.dtype, row.head_dim, row.head_dim_v, row.mask, forward_softmax(softmax))) {
    return Status::error(
        StatusCode::unsupported,
        "has its softmax on vector units, softmax is tensor (there is one for head "
        "dims 64 and 128, full and causal masks)");
  }
  if (variant_hooks(p).any_score() &&
      (softmax.mode != SoftmaxMode::exact || softmax.tensor_quarters != 0)) {
    return Status::error(StatusCode::unsupported,
                         "serves softcap, ALiBi, bias and dropout with softmax_mode = exact and "
                         "tensor_share = 0 only");
  }
  if (p.wants_max_logit && softmax.mode != SoftmaxMode::exact) {
    return Status::error(StatusCode::unsupported,
                         "finds the largest logit with softmax_mode = exact only");
  }
  const double factor = std::abs(static_cast<double>(p.scale)) * core::kLog2E;
  if (softmax.mode == SoftmaxMode::fast_scale && p.dtype == DType::f16 && factor > 1.0) {
    return Status::error(StatusCode::unsupported,
                         "folds scale * log2(e) into an f16 Q only up to 1, where nothing can "
                         "overflow; it is %g (softmax_mode = fast_scale)",
                         factor);
  }
  return Status();
}

Status trial_rule(const KernelInfo& row, const ForwardProblem& p, const DeviceProps& device) {
  const SoftmaxOptions softmax = softmax_of(row, p, device);
  if (!softmax_is_built(forward_softmax(softmax))) {
    return Status::error(StatusCode::unsupported,
                         "kernel not built for tensor_share = %g with softmax_mode = %s; configure "
                         "with PANTILE_EXPERIMENTS=ON",
                         softmax.tensor_quarters / 4.0, softmax_mode_name(softmax.mode));
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
    status = dim_rule(row, problem);
  }
  if (status.ok()) {
    status = layout_rules(problem);
  }
  if (status.ok()) {
    status = softmax_rule(row, problem, device);
  }
  if (status.ok()) {
    status = count_rule(row, problem, device);
  }
  if (status.ok()) {
    status = trial_rule(row, problem, device);
  }
  if (status.ok()) {
    status = variant_rule(problem, device);
  }
  return status.ok() ? build_rule(row, device, problem.page_size > 0) : status;
}

void configure_forward(ForwardPlan* plan) {
  if (plan->kernel->dtype == DType::e4m3) {
    configure_forward_fp8(plan);
    return;
  }
  const TileSize tile = tile_of(*plan->kernel, plan->problem, plan->device);
  plan->tile_q = tile.q;
  plan->tile_k = tile.k;
  plan->blocks = forward_order(plan->problem, plan->device, tile.q).count();
  plan->workspace = Workspace{};
  plan->softmax = softmax_of(*plan->kernel, plan->problem, plan->device, &plan->softmax_source);
}

}  // namespace pantile::ampere
