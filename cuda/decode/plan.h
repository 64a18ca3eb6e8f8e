// Host half of decode, common to the families: which problems a row serves, and the plan. No CUDA
// headers.
#pragma once

#include "decode/config.h"
#include "pantile/kv.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::decode {

constexpr Shape shape_of(const KernelInfo& row, const KvProblem& problem) {
  return Shape{row.head_dim, row.head_dim_v, problem.format, problem.v_in_k};
}

// Parts that a pair of a sequence and a key head may have; two slots a block with automatic cuts.
std::int64_t most_parts(const KvProblem& problem);

// Behind the rules of the device.
Status accept(const KernelInfo& row, const KvProblem& problem, SharedClass shared);
void configure(DecodePlan* plan, SharedClass shared);

// Pairs of a sequence and a key head, times tiles of packed queries: one counter each.
std::int64_t pair_count(const KvProblem& problem, int columns);

// Bytes of the counters, rounded up so that parts are aligned behind them.
constexpr std::int64_t counter_bytes(std::int64_t pairs) {
  return core::round_up<std::int64_t>(pairs * 4, 256);
}

Status accept_append(const KvProblem& problem);
void configure_append(AppendPlan* plan);

inline constexpr int kAppendWarps = 4;  // of a block, a row each

// Blocks of a sequence: a warp for each new row of K and of V, and for each row of Q that is
// rotated.
constexpr std::int64_t append_blocks(const KvProblem& p) {
  const std::int64_t rows =
      p.seqlen_new * p.heads_k * (p.v_in_k ? 1 : 2) + (p.rotates_q ? p.seqlen_q * p.heads_q : 0);
  return core::ceil_div<std::int64_t>(rows, kAppendWarps);
}

}  // namespace pantile::decode
