// Rules that hold for every row, with one wording: dtype, head dims, mask.
#include "host/row_rules.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "host/features.h"
#include "host/kernel_table.h"
#include "host/shape.h"
#include "problems.h"

namespace pantile::testing {
namespace {

constexpr KernelInfo row_of(MaskKind mask) {
  return {"row",
          Backend::hopper,
          Pass::forward,
          DType::bf16,
          128,
          64,
          mask,
          true,
          host::feature_sets::forward_f32};
}

std::string refusal(const KernelInfo& row, const ForwardProblem& problem) {
  return host::row_rule(row, host::canonical(problem), problem.dtype, host::required(problem))
      .message();
}

ForwardProblem problem_of(int head_dim, int head_dim_v) {
  ForwardProblem p = forward_problem();
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  set_contiguous(&p);
  return p;
}

TEST(RowRules, NameWhatDoesNotFit) {
  const KernelInfo row = row_of(MaskKind::any);
  ForwardProblem p = problem_of(128, 64);
  EXPECT_EQ(refusal(row, p), "");
  EXPECT_EQ(refusal(row, problem_of(8, 8)), "");
  p.dtype = DType::f16;
  EXPECT_EQ(refusal(row, p), "serves bf16, dtype is f16");
  EXPECT_EQ(refusal(row, problem_of(136, 64)),
            "serves head dims up to 128 and 64, they are 136 and 64");
  EXPECT_EQ(refusal(row, problem_of(64, 72)),
            "serves head dims up to 128 and 64, they are 64 and 72");
}

TEST(RowRules, FeaturesThatARowDoesNotListAreRefused) {
  const KernelInfo row = row_of(MaskKind::any);
  ForwardProblem p = problem_of(64, 64);
  p.packed_q = p.has_seqused_k = p.wants_max_logit = p.output_f32 = true;
  EXPECT_EQ(refusal(row, p), "");
  p.wants_o_low = true;
  EXPECT_EQ(refusal(row, p), "does not serve o_low");
}

TEST(RowRules, EachMaskHasItsRow) {
  struct Window {
    std::int64_t left, right;
    MaskKind kind;
  };
  const Window windows[] = {{kUnbounded, kUnbounded, MaskKind::full},
                            {kUnbounded, 0, MaskKind::causal},
                            {kUnbounded, 5, MaskKind::window},
                            {100, 0, MaskKind::window},
                            {5000, 5000, MaskKind::full},  // hides nothing
                            {5000, 0, MaskKind::causal}};
  for (const Window& window : windows) {
    ForwardProblem p = problem_of(64, 64);
    p.window_left = window.left;
    p.window_right = window.right;
    EXPECT_EQ(mask_kind(host::canonical(p)), window.kind);
    for (const MaskKind mask :
         {MaskKind::full, MaskKind::causal, MaskKind::window, MaskKind::any}) {
      const std::string reason = refusal(row_of(mask), p);
      if (mask == window.kind || mask == MaskKind::any) {
        EXPECT_EQ(reason, "");
      } else {
        EXPECT_EQ(
            reason.find(std::string("serves ") + mask_kind_name(mask) + " masks, window_left"), 0u)
            << reason;
      }
    }
  }
}

// Through the table: no family has rules of its own for these.
TEST(RowRules, HoldForEveryRow) {
  const auto rows = host::forward_rows();
  std::vector<Verdict> verdicts(static_cast<std::size_t>(rows.count));
  ForwardProblem p = problem_of(320, 320);  // more than any GPU row has
  for (const DeviceProps& device : {h100(), a100()}) {
    explain_forward(p, device, {}, verdicts.data(), rows.count);
    int refused = 0;
    for (const Verdict& verdict : verdicts) {
      const KernelInfo& row = *verdict.kernel;
      if (row.dtype == p.dtype && row.head_dim < 320) {
        EXPECT_EQ(std::string(verdict.reason.message()).find("serves head dims up to"), 0u)
            << row.name << ": " << verdict.reason.message();
        ++refused;
      }
    }
    EXPECT_GT(refused, 0);
  }
}

}  // namespace
}  // namespace pantile::testing
