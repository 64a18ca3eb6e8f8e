// Which decode problems the GPU kernels serve, and with which tiles. No CUDA headers.
#include "decode/plan.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>

#include "core/geometry.h"
#include "core/kv_split.h"

namespace pantile::decode {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr std::int64_t kStrideLimit = std::int64_t{1} << 39;

int packed_rows(const KvProblem& p) {
  return static_cast<int>(std::min<std::int64_t>(p.seqlen_q * (p.heads_q / p.heads_k), 1 << 30));
}

int columns_of(const KernelInfo& row, const KvProblem& p, SharedClass shared) {
  return columns_for(packed_rows(p), shape_of(row, p), shared);
}

Status stride_rule(const char* name, const char* axis, std::int64_t stride, int elements) {
  if (stride % elements != 0 || stride >= kStrideLimit || stride < 0) {
    return Status::error(kUnsupported,
                         "needs the stride of %s along %s to be a multiple of %d below 2^39, it is "
                         "%" PRId64,
                         name, axis, elements, stride);
  }
  return Status();
}

Status align_rule(const char* name, int bytes) {
  if (bytes < kChunkBytes) {
    return Status::error(kUnsupported, "needs %s aligned to %d bytes, it is to %d", name,
                         kChunkBytes, bytes);
  }
  return Status();
}

Status rows_rule(const char* name, const Layout& layout, int elements) {
  const char* const axes[] = {"batch", "seq", "head"};
  const std::int64_t strides[] = {layout.batch, layout.seq, layout.head};
  Status status = align_rule(name, layout.base_align_bytes);
  for (int i = 0; i < 3 && status.ok(); ++i) {
    status = stride_rule(name, axes[i], strides[i], elements);
  }
  return status;
}

Status cache_rule(const char* name, const CacheLayout& layout, int elements) {
  const char* const axes[] = {"block", "slot", "head"};
  const std::int64_t strides[] = {layout.block, layout.slot, layout.head};
  Status status = align_rule(name, layout.base_align_bytes);
  for (int i = 0; i < 3 && status.ok(); ++i) {
    status = stride_rule(name, axes[i], strides[i], elements);
  }
  return status;
}

Status dim_rule(const char* name, std::int64_t dim, int elements) {
  if (dim % elements != 0) {
    return Status::error(kUnsupported, "needs %s to be a multiple of %d, it is %" PRId64, name,
                         elements, dim);
  }
  return Status();
}

// Places on the line of tiles, counters and page numbers have 31 bits.
Status count_rule(const KvProblem& p, const Shape& shape, int columns, SharedClass shared) {
  const std::int64_t tiles =
      core::ceil_div<std::int64_t>(capacity(p), tile_keys(shape, columns, shared)) + 1;
  if (capacity(p) >= core::kNoBound || p.seqlen_q >= core::kNoBound / 64 ||
      pair_count(p, columns) > (std::int64_t{1} << 30) / tiles) {
    return Status::error(kUnsupported,
                         "has 31-bit tile numbers: batch %" PRId64 " x heads_k %" PRId64
                         " x %" PRId64 " slots x %" PRId64 " queries are too many",
                         p.batch, p.heads_k, capacity(p), p.seqlen_q);
  }
  return Status();
}

}  // namespace

std::int64_t pair_count(const KvProblem& p, int columns) {
  return p.batch * p.heads_k * core::ceil_div(packed_rows(p), columns);
}

std::int64_t most_parts(const KvProblem& p) {
  const std::int64_t slots = capacity(p);
  if (p.split == KvSplit::fixed) {
    return core::ceil_div(slots, p.split_keys) + 1;
  }
  // A sixteenth of a sequence at least, until a part has the most keys.
  return std::max<std::int64_t>(16, core::ceil_div<std::int64_t>(slots, core::kMostInvariantKeys)) +
         1;
}

Status accept(const KernelInfo& row, const KvProblem& p, SharedClass shared) {
  if (p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0) {
    return Status();
  }
  if (!(p.scale >= 0.0f)) {
    return Status::error(kUnsupported, "needs scale >= 0, it is %g", static_cast<double>(p.scale));
  }
  if (row.head_dim_v > 256 && !p.v_in_k) {
    return Status::error(kUnsupported, "is for latent caches, whose V is in K");
  }
  const int elements = kChunkBytes / shape_of(row, p).element_bytes();
  const Status rules[] = {
      dim_rule("head_dim", p.head_dim, elements),
      dim_rule("head_dim_v", p.head_dim_v, elements),
      rows_rule("q", p.q, 8),
      rows_rule("o", p.o, 4),
      cache_rule("k", p.k, elements),
      p.v_in_k ? Status() : cache_rule("v", p.v, elements),
      count_rule(p, shape_of(row, p), columns_of(row, p, shared), shared),
  };
  for (const Status& rule : rules) {
    if (!rule.ok()) {
      return rule;
    }
  }
  return Status();
}

void configure(DecodePlan* plan, SharedClass shared) {
  const KvProblem& p = plan->problem;
  plan->schedule_ints = 0;  // every block finds its work by itself
  if (p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0) {
    plan->blocks = 0;
    plan->workspace = Workspace{};
    return;
  }
  const Shape shape = shape_of(*plan->kernel, p);
  const int columns = columns_of(*plan->kernel, p, shared);
  plan->tile_q = columns;
  plan->tile_k = tile_keys(shape, columns, shared);
  const int resident = resident_blocks(shape, columns, shared);
  const int bytes = stages(shape, columns, shared, resident) * slices(shape, columns, shared) *
                        slice_bytes(shape) +
                    fixed_bytes(shape, columns, shared);
  // Shared memory of a multiprocessor: 1 KB of it is reserved for each block.
  const int fitting = (plan->device.smem_optin_bytes + 1024) / (bytes + 1024);
  const std::int64_t pairs = pair_count(p, columns);
  const std::int64_t tiles = core::ceil_div<std::int64_t>(capacity(p), plan->tile_k) + 1;
  plan->blocks = static_cast<int>(std::min<std::int64_t>(
      plan->device.multiprocessors * std::max(1, std::min(resident, fitting)), pairs * tiles));
  const std::int64_t slots =
      p.split == KvSplit::automatic ? 2 * plan->blocks : pairs * most_parts(p);
  const std::int64_t part_bytes = 4 * std::int64_t{columns} * (shape.head_dim_v + 2);
  plan->workspace.zeroed_bytes = static_cast<std::size_t>(counter_bytes(pairs));
  plan->workspace.bytes = static_cast<std::size_t>(counter_bytes(pairs) + slots * part_bytes);
}

Status accept_append(const KvProblem& p) {
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
  if (append_blocks(p) > kMostBlocks / (4 * core::max_of<std::int64_t>(p.batch, 1)) ||
      capacity(p) >= core::kNoBound) {
    return Status::error(kUnsupported,
                         "has 31-bit numbers of rows and slots: batch %" PRId64 " x %" PRId64
                         " new keys x %" PRId64 " heads, %" PRId64 " slots",
                         p.batch, p.seqlen_new, p.heads_k, capacity(p));
  }
  return Status();
}

void configure_append(AppendPlan* plan) {
  plan->blocks = static_cast<int>(append_blocks(plan->problem) * plan->problem.batch);
}

}  // namespace pantile::decode
