#include "common/fp8_rules.h"

#include <algorithm>
#include <cinttypes>

#include "core/blocked.h"
#include "tile/panel.h"

namespace pantile::common {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - (std::int64_t{1} << 20);

}  // namespace

Status fp8_shape_rule(const ForwardProblem& p) {
  if (p.head_dim != p.head_dim_v) {
    return Status::error(kUnsupported,
                         "needs equal head dims of K and V, they are %" PRId64 " and %" PRId64,
                         p.head_dim, p.head_dim_v);
  }
  if (p.head_dim % tile::kChunkColumns != 0) {
    return Status::error(kUnsupported, "needs head dims that are multiples of %d, it is %" PRId64,
                         tile::kChunkColumns, p.head_dim);
  }
  if (p.fp8.block_k != core::kBlockedRows) {
    return Status::error(kUnsupported, "needs fp8.block_k %d, it is %d", core::kBlockedRows,
                         p.fp8.block_k);
  }
  const QuantizedSizes sizes = quantized_sizes(p);
  if (p.heads_q * sizes.blocks_q * core::kBlockedRows > kMostRows ||
      p.heads_k * sizes.blocks_k * core::kBlockedRows > kMostRows) {
    return Status::error(kUnsupported,
                         "has 32-bit row numbers, and batch * heads * seqlen is too large");
  }
  return Status();
}

Status quantize_rule(const QuantizeProblem& problem) {
  const ForwardProblem& p = problem.forward;
  Status status = fp8_shape_rule(p);
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

}  // namespace pantile::common
