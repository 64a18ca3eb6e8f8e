// Which FP8 problems the Hopper backward serves. No CUDA headers.
#include <cinttypes>

#include "core/blocked.h"
#include "hopper/device_rule.h"
#include "hopper/fp8_backward/config.h"
#include "hopper/plan.h"
#include "hopper/tensor_rules.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr int kChunkColumns = 8;  // 16 bytes of gradients

Status shape_rule(const ForwardProblem& p) {
  if (p.head_dim != p.head_dim_v || p.head_dim % kChunkColumns != 0) {
    return Status::error(kUnsupported,
                         "needs equal head dims of K and V that are multiples of %d, they are "
                         "%" PRId64 " and %" PRId64,
                         kChunkColumns, p.head_dim, p.head_dim_v);
  }
  constexpr std::int64_t kMostBatch = 65535;
  if (p.batch > kMostBatch) {
    return Status::error(kUnsupported, "serves up to %" PRId64 " sequences, they are %" PRId64,
                         kMostBatch, p.batch);
  }
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 24;  // 32-bit numbers of rows
  const QuantizedSizes sizes = quantized_sizes(p);
  if (p.heads_q * sizes.blocks_q > kMostBlocks || p.heads_k * sizes.blocks_k > kMostBlocks) {
    return Status::error(kUnsupported,
                         "has 32-bit row numbers, and batch * heads * seqlen is too large");
  }
  return Status();
}

Status tensor_rules(const BackwardProblem& problem) {
  const ForwardProblem& p = problem.forward;
  const std::int64_t rows = p.packed_q ? p.total_q : p.seqlen_q;
  const std::int64_t keys = p.packed_k ? p.total_k : p.seqlen_k;
  const std::int64_t query_batch = p.packed_q ? 1 : p.batch;
  const std::int64_t key_batch = p.packed_k ? 1 : p.batch;
  const struct {
    const char* name;
    const Layout& layout;
    bool of_keys, written;
  } tensors[] = {{"o", p.o, false, false},
                 {"grad_o", problem.grad_o, false, false},
                 {"grad_q", problem.grad_q, false, true},
                 {"grad_k", problem.grad_k, true, true},
                 {"grad_v", problem.grad_v, true, true}};
  Status status;
  for (const auto& x : tensors) {
    if (status.ok()) {
      status = tensor_rule(x.name, x.layout, p.fp8.output, x.of_keys ? key_batch : query_batch,
                           x.of_keys ? keys : rows, x.of_keys ? p.heads_k : p.heads_q, x.written);
    }
  }
  return status;
}

}  // namespace

Status accept_backward_fp8(const KernelInfo&, const BackwardProblem& problem,
                           const DeviceProps& device) {
  Status status = device_rule(device);
  if (status.ok()) {
    status = shape_rule(problem.forward);
  }
  return status.ok() ? tensor_rules(problem) : status;
}

void configure_backward_fp8(BackwardPlan* plan) {
  const ForwardProblem& p = plan->problem.forward;
  plan->tile_q = Fp8BackwardConfig::kRows;
  plan->tile_k = Fp8BackwardConfig::kKeys;
  plan->blocks = static_cast<int>(p.heads_k * quantized_sizes(p).blocks_k);
  plan->workspace.bytes = fp8_backward_workspace(p, plan->kernel->head_dim).bytes;
  plan->workspace.zeroed_bytes = 0;
}

}  // namespace pantile::hopper
