// Host half of the Ampere backward: the memory that it is lent.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ampere/backward/workspace.h"
#include "ampere/config.h"
#include "problems.h"

namespace pantile::testing {
namespace {

constexpr ampere::SharedClass kClasses[] = {ampere::SharedClass::small, ampere::SharedClass::medium,
                                            ampere::SharedClass::large};
constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};

struct Area {
  std::size_t begin, bytes, align;
};

// What the kernels write to each array, in the order of the offsets.
std::vector<Area> areas_of(const BackwardProblem& problem, int head_dim,
                           const ampere::BackwardTile& tile) {
  const int tile_q = tile.tile_q;
  const ampere::BackwardWorkspace w = ampere::backward_workspace(problem, head_dim, tile);
  const auto size = [](std::int64_t count, std::size_t bytes) {
    return static_cast<std::size_t>(count) * bytes;
  };
  const std::int64_t tiles = w.row_tiles * problem.forward.heads_q;
  const std::int64_t heads = problem.forward.batch * problem.forward.heads_k;
  std::vector<Area> areas{{w.dq_sum, size(tiles * tile_q * head_dim, 4), 16},
                          {w.row_terms, size(tiles * tile_q * ampere::kRowTerms, 4), 16}};
  if (problem.has_o_low) {
    const int sums = common::row_sum_floats(tile_q * head_dim, tile_q);
    EXPECT_GE(sums, tile_q);
    areas.push_back({w.large_means, size(heads, 4), 4});
    areas.push_back({w.key_means, size(heads * head_dim, 4), 16});
    areas.push_back({w.row_sums, size(tiles * sums, 4), 4});
  }
  if (problem.deterministic) {
    areas.push_back({w.measured, 4, 4});
    areas.push_back({w.key_bounds, size(heads, sizeof(core::KeyBounds)), 4});
    areas.push_back({w.row_max, size(tiles * tile_q, 4), 4});
  }
  if (problem.wants_grad_alibi) {
    areas.push_back(
        {w.slope_parts, size(w.key_tiles * problem.forward.heads_q * tile.warps(), 4), 4});
  }
  areas.push_back({w.bytes, 0, 256});
  return areas;
}

TEST(AmpereBackward, ArraysOfTheWorkspaceAreAlignedAndDoNotOverlap) {
  BackwardProblem problem = backward_problem();
  problem.forward.batch = 3;
  problem.forward.heads_k = 1;
  problem.forward.seqlen_q = 77;
  for (const int head_dim : kHeadDims) {
    for (const ampere::SharedClass shared : kClasses) {
      const ampere::BackwardTile tile = ampere::backward_tile(head_dim, shared);
      for (int flags = 0; flags < 8; ++flags) {
        problem.has_o_low = (flags & 1) != 0;
        problem.deterministic = (flags & 2) != 0;
        problem.wants_grad_alibi = (flags & 4) != 0;
        std::size_t end = 0;
        for (const Area& area : areas_of(problem, head_dim, tile)) {
          EXPECT_GE(area.begin, end) << head_dim << " " << flags;
          EXPECT_EQ(area.begin % area.align, 0u) << head_dim << " " << flags;
          end = area.begin + area.bytes;
        }
      }
    }
  }
}

TEST(AmpereBackward, WorkspaceIsLinearInTheRows) {
  BackwardProblem problem = backward_problem();
  problem.has_o_low = true;
  for (const int head_dim : kHeadDims) {
    const ampere::BackwardTile tile = ampere::backward_tile(head_dim, kClasses[1]);
    for (const bool deterministic : {false, true}) {
      problem.deterministic = deterministic;
      problem.forward.seqlen_q = 4096;
      const std::size_t once = ampere::backward_workspace(problem, head_dim, tile).bytes;
      problem.forward.seqlen_q = 8192;
      const std::size_t twice = ampere::backward_workspace(problem, head_dim, tile).bytes;
      EXPECT_LE(twice, 2 * once) << head_dim;
      EXPECT_GT(twice, 2 * once - 65536) << head_dim;
    }
  }
}

}  // namespace
}  // namespace pantile::testing
