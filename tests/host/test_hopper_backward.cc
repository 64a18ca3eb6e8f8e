// Host half of the Hopper backward: what takes part, how tiles are numbered, what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/attended.h"
#include "hopper/backward/workspace.h"
#include "hopper/plan.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// Every mask of up to 9 x 9: what attended_part() cuts off is what sees (is seen by) nothing, and
// the mask of the rest says the same as the mask of the whole.
TEST(HopperBackward, AttendedPartCutsExactlyWhatSeesNothing) {
  const int sides[] = {0, 1, 2, 5, core::kNoBound};
  for (int rows = 0; rows <= 9; ++rows) {
    for (int keys = 0; keys <= 9; ++keys) {
      for (const int left : sides) {
        for (const int right : sides) {
          const core::Mask whole{rows, keys, left, right};
          const common::Attended part = common::attended_part(whole);
          const auto in_part = [&part](int row, int key) {
            const int r = row - part.first_row;
            const int k = key - part.first_key;
            return r >= 0 && r < part.mask.rows && k >= 0 && k < part.mask.keys &&
                   core::is_visible(part.mask, r, k);
          };
          for (int row = 0; row < rows; ++row) {
            bool sees = false;
            for (int key = 0; key < keys; ++key) {
              ASSERT_EQ(in_part(row, key), core::is_visible(whole, row, key))
                  << rows << " x " << keys << " (" << left << ", " << right << ") at " << row
                  << ", " << key;
              sees = sees || core::is_visible(whole, row, key);
            }
            const int local = row - part.first_row;
            ASSERT_EQ(sees, local >= 0 && local < part.mask.rows);
          }
          for (int key = 0; key < keys; ++key) {
            bool seen = false;
            for (int row = 0; row < rows; ++row) {
              seen = seen || core::is_visible(whole, row, key);
            }
            const int local = key - part.first_key;
            ASSERT_EQ(seen, local >= 0 && local < part.mask.keys);
          }
        }
      }
    }
  }
}

// finish_rows takes away a constant for every addition to an integer sum of dQ: tiles of keys that
// visit a tile of rows are as many as plan_row_tile() says, for every attended part.
TEST(HopperBackward, ATileOfRowsIsVisitedByTheTilesOfKeysThatItsRowsSee) {
  const int sides[] = {0, 1, 2, 5, 9, core::kNoBound};
  for (int rows = 1; rows <= 17; ++rows) {
    for (int keys = 1; keys <= 17; ++keys) {
      for (const int left : sides) {
        for (const int right : sides) {
          const core::Mask mask = common::attended_part(core::Mask{rows, keys, left, right}).mask;
          for (const int tile_q : {1, 2, 4, 8}) {
            for (const int tile_k : {2, 4, 8}) {
              std::vector<int> visits(static_cast<std::size_t>(rows + 1), 0);
              for (int begin = 0; begin < mask.keys; begin += tile_k) {
                const core::Span span{begin, core::min_of(begin + tile_k, mask.keys)};
                const core::Span seen = core::plan_key_tile(mask, span, tile_q).visit;
                for (int tile = seen.begin; tile < seen.end; ++tile) {
                  ++visits[static_cast<std::size_t>(tile)];
                }
              }
              for (int begin = 0; begin < mask.rows; begin += tile_q) {
                const core::Span span{begin, core::min_of(begin + tile_q, mask.rows)};
                ASSERT_EQ(core::plan_row_tile(mask, span, tile_k).visit.size(),
                          visits[static_cast<std::size_t>(begin / tile_q)])
                    << rows << " x " << keys << " (" << left << ", " << right << ") tiles "
                    << tile_q << " x " << tile_k << " at row " << begin;
              }
            }
          }
        }
      }
    }
  }
}

TEST(HopperBackward, TileNumbersOfPackedSequencesNeverOverlap) {
  std::uint32_t state = 1;
  const auto random = [&state](int below) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((state >> 8) % static_cast<std::uint32_t>(below));
  };
  for (int round = 0; round < 500; ++round) {
    const int tile = 1 + random(9);
    const int batch = 1 + random(12);
    std::vector<std::int32_t> cu(1, 0);
    for (int b = 0; b < batch; ++b) {
      cu.push_back(cu.back() + (random(3) == 0 ? 0 : random(40)));
    }
    const common::TileNumbers numbers{tile, batch, 0, cu.data()};
    const std::int64_t count = common::tile_numbers(true, cu.back(), batch, tile);
    int next = 0;
    for (int b = 0; b < batch; ++b) {
      const int tiles = core::ceil_div(cu[b + 1] - cu[b], tile);
      ASSERT_GE(numbers.first(b), next);
      for (int t = 0; t < tiles; ++t) {
        ASSERT_EQ(numbers.sequence(numbers.first(b) + t), b);
      }
      next = numbers.first(b) + tiles;
    }
    ASSERT_LE(next, count);
  }
}

BackwardProblem problem_of(std::int64_t head_dim) {
  ForwardProblem forward = forward_problem();
  forward.head_dim = head_dim;
  forward.head_dim_v = head_dim;
  set_contiguous(&forward);
  return backward_problem(forward);
}

KernelInfo row_of(const BackwardProblem& problem, int head_dim) {
  return KernelInfo{"row",    Backend::hopper, Pass::backward,   problem.forward.dtype,
                    head_dim, head_dim,        MaskKind::window, true};
}

std::string refusal(const BackwardProblem& problem, const DeviceProps& device = h100()) {
  return hopper::accept_backward(row_of(problem, 128), problem, device).message();
}

TEST(HopperBackward, AcceptsWhatItServesAndNamesWhatItDoesNot) {
  EXPECT_EQ(refusal(problem_of(128)), "");
  EXPECT_EQ(refusal(problem_of(72)), "");
  EXPECT_EQ(refusal(problem_of(128), a100()), "needs compute capability 9.0, device 0 has 8.0");
  EXPECT_EQ(refusal(problem_of(100)), "head_dim is 100; it must be a multiple of 8");
  DeviceProps small = h100();
  small.smem_optin_bytes = 100 * 1024;
  EXPECT_EQ(refusal(problem_of(128), small),
            "needs 232448 bytes of shared memory a block, device 0 has 102400");

  BackwardProblem problem = problem_of(128);
  problem.forward.scale = 0.0f;
  EXPECT_EQ(refusal(problem), "scale is 0; its magnitude must be from 2^-40 to 2^40");

  problem = problem_of(128);
  problem.grad_o.seq = 0;
  EXPECT_EQ(refusal(problem),
            "grad_o: stride along seq is 0; this kernel needs a positive multiple of 8 below 2^39");

  problem = problem_of(128);
  problem.forward.o.head = 132;
  EXPECT_EQ(refusal(problem),
            "o: stride along head is 132; this kernel needs a positive multiple of 8 below 2^39");

  problem = problem_of(128);
  problem.grad_k.base_align_bytes = 8;
  EXPECT_EQ(refusal(problem), "grad_k is aligned to 8 bytes; this kernel needs 16");
}

TEST(HopperBackward, WorkspaceIsLinearInTheRows) {
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    BackwardProblem problem = problem_of(head_dim);
    for (const bool deterministic : {false, true}) {
      problem.deterministic = deterministic;
      problem.forward.seqlen_q = 4096;
      const std::size_t once = hopper::backward_workspace(problem, head_dim).bytes;
      problem.forward.seqlen_q = 8192;
      const std::size_t twice = hopper::backward_workspace(problem, head_dim).bytes;
      EXPECT_LE(twice, 2 * once) << head_dim;
      EXPECT_GT(twice, 2 * once - 65536) << head_dim;
    }
  }
}

}  // namespace
}  // namespace pantile::testing
