// Canonical problems, empty problems and mask kinds.
#include <gtest/gtest.h>

#include "core/geometry.h"
#include "host/shape.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// Lifting a window side must not change which pairs are visible, for any shorter sequence either.
TEST(Canonical, LiftedWindowsHideNothing) {
  int lifted = 0;
  for (int rows = 0; rows <= 6; ++rows) {
    for (int keys = 0; keys <= 6; ++keys) {
      for (int left = -1; left <= 7; ++left) {
        for (int right = -1; right <= 7; ++right) {
          ForwardProblem problem = forward_problem();
          problem.seqlen_q = rows;
          problem.seqlen_k = keys;
          problem.window_left = left;
          problem.window_right = right;
          const ForwardProblem plain = host::canonical(problem);
          lifted += plain.window_left != left || plain.window_right != right;
          for (int used_rows = 0; used_rows <= rows; ++used_rows) {
            for (int used_keys = 0; used_keys <= keys; ++used_keys) {
              const core::Mask before = core::make_mask(used_rows, used_keys, left, right);
              const core::Mask after =
                  core::make_mask(used_rows, used_keys, plain.window_left, plain.window_right);
              for (int row = 0; row < used_rows; ++row) {
                for (int key = 0; key < used_keys; ++key) {
                  ASSERT_EQ(core::is_visible(before, row, key), core::is_visible(after, row, key))
                      << rows << "x" << keys << " window " << left << "," << right << " used "
                      << used_rows << "x" << used_keys << " at " << row << "," << key;
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(lifted, 1000);
}

TEST(Canonical, DecodeIsNotCausal) {
  ForwardProblem problem = forward_problem();
  problem.seqlen_q = 1;
  problem.window_right = 0;
  EXPECT_EQ(mask_kind(host::canonical(problem)), MaskKind::full);
}

TEST(Canonical, StridesOfSingleAxes) {
  ForwardProblem problem = forward_problem();
  problem.batch = 1;
  problem.heads_k = 1;
  problem.q.batch = 13;
  problem.k.head = -7;
  problem.k.seq = 136;
  const ForwardProblem plain = host::canonical(problem);
  EXPECT_EQ(plain.q.batch, 1024 * 8 * 128);
  EXPECT_EQ(plain.k.head, 128);
  EXPECT_EQ(plain.k.seq, 136) << "an axis of many elements keeps its stride";
  EXPECT_EQ(host::canonical(backward_problem(problem)).grad_q.batch, 1024 * 8 * 128);
}

TEST(Canonical, TotalsOfDenseTensors) {
  ForwardProblem problem = forward_problem();
  problem.seqlen_k = 100;
  problem.packed_q = true;
  problem.total_q = 5;
  const ForwardProblem plain = host::canonical(problem);
  EXPECT_EQ(plain.total_q, 5);
  EXPECT_EQ(plain.total_k, 200);
}

TEST(MaskKinds, FollowTheWindow) {
  ForwardProblem problem = forward_problem();
  EXPECT_EQ(mask_kind(problem), MaskKind::full);
  problem.window_right = 0;
  EXPECT_EQ(mask_kind(problem), MaskKind::causal);
  problem.window_right = 5;
  EXPECT_EQ(mask_kind(problem), MaskKind::window);
  problem.window_right = 0;
  problem.window_left = 64;
  EXPECT_EQ(mask_kind(problem), MaskKind::window);
}

TEST(WritesNothing, Forward) {
  ForwardProblem problem = forward_problem();
  EXPECT_FALSE(host::writes_nothing(problem));
  problem.seqlen_k = 0;  // rows without keys still get O = 0 and LSE = -inf
  EXPECT_FALSE(host::writes_nothing(problem));
  problem.seqlen_q = 0;
  EXPECT_TRUE(host::writes_nothing(problem));
  problem = packed_problem();
  problem.total_q = 0;
  EXPECT_TRUE(host::writes_nothing(problem));
}

TEST(WritesNothing, Backward) {
  ForwardProblem forward = forward_problem();
  forward.seqlen_q = 0;  // keys without rows still get zero gradients
  EXPECT_FALSE(host::writes_nothing(backward_problem(forward)));
  forward.seqlen_k = 0;
  EXPECT_TRUE(host::writes_nothing(backward_problem(forward)));
  forward = forward_problem();
  forward.batch = 0;
  EXPECT_TRUE(host::writes_nothing(backward_problem(forward)));
}

}  // namespace
}  // namespace pantile::testing
