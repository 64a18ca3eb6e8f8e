// How the backward lays out the memory it is lent. Linear in the number of query rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/attended.h"
#include "common/bias.h"
#include "core/integer_unit.h"
#include "hopper/backward/config.h"
#include "pantile/problem.h"

namespace pantile::hopper {

// Warps that sum dS times the distance, of a tile of keys.
inline constexpr int kSlopeParts = 8;

struct BackwardWorkspace {
  std::int64_t row_tile_count;  // numbers of row tiles, per query head
  // Byte offsets.
  std::size_t dq_sum;       // fp32 or int32 [heads_q][row_tile_count][tile_q * 64 * panels]
  std::size_t lse_terms;    // 16 bytes [heads_q][row_tile_count * tile_q]
  std::size_t delta_terms;  // the same
  std::size_t claimed;      // int32, the main kernel's work counter
  std::size_t large_means;  // int32 [batch][heads_k], whether the mean of the keys is large
  std::size_t key_means;    // float [batch][heads_k][columns of whole panels]
  std::size_t row_sums;     // float [heads_q][row_tile_count][fragments][64]
  // Deterministic only. The first two are zero when the first kernel starts.
  std::size_t measured;    // int32, whether some head is measured
  std::size_t key_bounds;  // core::KeyBounds [batch][heads_k]
  std::size_t zeroed_end;
  std::size_t row_max;  // uint32 [heads_q][row_tile_count * tile_q]
  // Gradient of ALiBi's slopes only: float [heads_q][key_tile_count][kSlopeParts], zero when the
  // main kernel starts.
  std::int64_t key_tile_count;
  std::size_t slope_parts;
  std::size_t
      bias_parts;  // with common::has_bias_parts(): float [batch][heads_q][seqlen_q][seqlen_k]
  std::size_t bytes;
};

// Rows that tile numbers are counted from: the longest sequence or, packed, all rows.
constexpr std::int64_t counted_rows(const ForwardProblem& problem) {
  return problem.packed_q ? problem.total_q : problem.seqlen_q;
}

constexpr std::int64_t counted_keys(const ForwardProblem& problem) {
  return problem.packed_k ? problem.total_k : problem.seqlen_k;
}

// Work items of the main kernel: key tiles of every key head.
constexpr std::int64_t key_work(const ForwardProblem& problem, int tile_k) {
  return problem.heads_k *
         common::tile_numbers(problem.packed_k, counted_keys(problem), problem.batch, tile_k);
}

// fp32 elements of one tile of dQ: whole fragments of 64 x 64.
constexpr int dq_tile_floats(int kernel_head_dim) {
  return backward_tile_q(kernel_head_dim) * panels(kernel_head_dim) * kPanel;
}

constexpr BackwardWorkspace backward_workspace(const BackwardProblem& problem,
                                               int kernel_head_dim) {
  constexpr std::size_t kAlign = 256;
  const ForwardProblem& forward = problem.forward;
  const int tile_q = backward_tile_q(kernel_head_dim);
  BackwardWorkspace workspace{};
  workspace.row_tile_count =
      common::tile_numbers(forward.packed_q, counted_rows(forward), forward.batch, tile_q);
  const auto tiles = static_cast<std::size_t>(workspace.row_tile_count * forward.heads_q);
  const std::size_t terms = tiles * static_cast<std::size_t>(tile_q) * 16;
  workspace.lse_terms = tiles * static_cast<std::size_t>(dq_tile_floats(kernel_head_dim)) * 4;
  workspace.delta_terms = workspace.lse_terms + terms;
  workspace.claimed = workspace.delta_terms + terms;
  workspace.bytes = workspace.claimed + kAlign;
  if (problem.has_o_low) {
    const auto heads = static_cast<std::size_t>(forward.batch * forward.heads_k);
    workspace.large_means = workspace.bytes;
    workspace.key_means = (workspace.large_means + heads * 4 + 15) / 16 * 16;
    workspace.row_sums = workspace.key_means +
                         heads * static_cast<std::size_t>(panels(kernel_head_dim) * kPanel) * 4;
    workspace.row_sums = (workspace.row_sums + 15) / 16 * 16;
    workspace.bytes =
        workspace.row_sums +
        tiles * static_cast<std::size_t>(dq_tile_floats(kernel_head_dim)) / kPanel * 4;
  }
  if (problem.deterministic) {
    workspace.measured = workspace.bytes;
    workspace.key_bounds = workspace.measured + 16;
    workspace.zeroed_end =
        workspace.key_bounds +
        static_cast<std::size_t>(forward.batch * forward.heads_k) * sizeof(core::KeyBounds);
    workspace.row_max = (workspace.zeroed_end + 15) / 16 * 16;
    workspace.bytes = workspace.row_max + terms / 4;
  }
  if (problem.wants_grad_alibi) {
    workspace.key_tile_count = common::tile_numbers(
        forward.packed_k, counted_keys(forward), forward.batch, backward_tile_k(kernel_head_dim));
    workspace.slope_parts = (workspace.bytes + 15) / 16 * 16;
    workspace.bytes = workspace.slope_parts +
                      static_cast<std::size_t>(forward.heads_q * workspace.key_tile_count) *
                          kSlopeParts * sizeof(float);
  }
  if (common::has_bias_parts(problem)) {
    workspace.bias_parts = (workspace.bytes + 15) / 16 * 16;
    workspace.bytes = workspace.bias_parts + common::bias_parts_bytes(problem);
  }
  workspace.bytes = (workspace.bytes + kAlign - 1) / kAlign * kAlign;
  return workspace;
}

}  // namespace pantile::hopper
