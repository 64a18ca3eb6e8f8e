// How the backward lays out the memory it is lent. Linear in the number of query rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ampere/config.h"
#include "common/attended.h"
#include "common/bias.h"
#include "core/integer_unit.h"
#include "pantile/problem.h"

namespace pantile::ampere {

struct BackwardWorkspace {
  std::int64_t row_tiles;  // numbers of row tiles (common/attended.h), per query head
  // Byte offsets.
  std::size_t dq_sum;     // fp32 or int32 [heads_q][row_tiles][tile_q * head_dim of the kernel]
  std::size_t row_terms;  // fp32 [heads_q][row_tiles][kRowTerms][tile_q]
  // With has_o_low only: what is taken from dQ where keys have a mean (common::RowPass).
  std::size_t large_means;  // int32 [batch][heads_k], whether it is large
  std::size_t key_means;    // fp32 [batch][heads_k][head_dim of the kernel]
  std::size_t row_sums;     // fp32 or int32 [heads_q][row_tiles][common::row_sum_floats()]
  // Deterministic only. The first two are zero when the first kernel starts.
  std::size_t measured;    // int32, whether some head is measured
  std::size_t key_bounds;  // core::KeyBounds [batch][heads_k]
  std::size_t zeroed_end;
  std::size_t row_max;  // uint32 [heads_q][row_tiles * tile_q]
  // With wants_grad_alibi only: fp32 [heads_q][key_tiles][warps], parts of the slopes' gradients.
  std::int64_t key_tiles;  // numbers of tiles of keys
  std::size_t slope_parts;
  std::size_t bias_parts;  // with common::has_bias_parts(): fp32, as it says
  std::size_t bytes;
};

// Rows that tile numbers are counted from: the longest sequence or, packed, all rows.
constexpr std::int64_t counted_rows(const ForwardProblem& p) {
  return p.packed_q ? p.total_q : p.seqlen_q;
}

// In fp32: two floats a row and query head.
constexpr std::size_t backward_workspace_bytes_f32(const ForwardProblem& p) {
  const std::int64_t rows = p.packed_q ? p.total_q : p.batch * p.seqlen_q;
  return static_cast<std::size_t>(rows * p.heads_q) * 8;
}

constexpr BackwardWorkspace backward_workspace(const BackwardProblem& problem, int kernel_head_dim,
                                               const BackwardTile& tile) {
  const int tile_q = tile.tile_q;
  constexpr std::size_t kAlign = 256;
  const ForwardProblem& p = problem.forward;
  BackwardWorkspace workspace{};
  workspace.row_tiles = common::tile_numbers(p.packed_q, counted_rows(p), p.batch, tile_q);
  const auto rows = static_cast<std::size_t>(workspace.row_tiles * p.heads_q * tile_q);
  workspace.dq_sum = 0;
  workspace.row_terms = rows * static_cast<std::size_t>(kernel_head_dim) * 4;
  workspace.bytes = workspace.row_terms + rows * kRowTerms * 4;
  if (problem.has_o_low) {
    const auto heads = static_cast<std::size_t>(p.batch * p.heads_k);
    workspace.large_means = workspace.bytes;
    workspace.key_means = (workspace.large_means + heads * 4 + 15) / 16 * 16;
    workspace.row_sums =
        workspace.key_means + heads * static_cast<std::size_t>(kernel_head_dim) * 4;
    workspace.bytes =
        workspace.row_sums +
        static_cast<std::size_t>(workspace.row_tiles * p.heads_q *
                                 common::row_sum_floats(tile_q * kernel_head_dim, tile_q)) *
            4;
    workspace.bytes = (workspace.bytes + 15) / 16 * 16;
  }
  if (problem.deterministic) {
    workspace.measured = workspace.bytes;
    workspace.key_bounds = workspace.measured + 16;
    workspace.zeroed_end = workspace.key_bounds +
                           static_cast<std::size_t>(p.batch * p.heads_k) * sizeof(core::KeyBounds);
    workspace.row_max = (workspace.zeroed_end + 15) / 16 * 16;
    workspace.bytes = workspace.row_max + rows * 4;
  }
  if (problem.wants_grad_alibi) {
    workspace.key_tiles =
        common::tile_numbers(p.packed_k, p.packed_k ? p.total_k : p.seqlen_k, p.batch, tile.tile_k);
    workspace.slope_parts = (workspace.bytes + 15) / 16 * 16;
    workspace.bytes = workspace.slope_parts +
                      static_cast<std::size_t>(workspace.key_tiles * p.heads_q * tile.warps()) * 4;
  }
  if (common::has_bias_parts(problem)) {
    workspace.bias_parts = (workspace.bytes + 15) / 16 * 16;
    workspace.bytes = workspace.bias_parts + common::bias_parts_bytes(problem);
  }
  workspace.bytes = (workspace.bytes + kAlign - 1) / kAlign * kAlign;
  return workspace;
}

}  // namespace pantile::ampere
