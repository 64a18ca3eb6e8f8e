// Which softmax a forward gets: what the automatic choice stands for, and who refuses what.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "ampere/forward/softmax_choice.h"
#include "ampere/order.h"
#include "problems.h"

namespace pantile::testing {
namespace {

constexpr SoftmaxUnit kTensor = SoftmaxUnit::tensor;
constexpr SoftmaxUnit kVector = SoftmaxUnit::vector;

ForwardProblem problem_of(int head_dim, bool causal) {
  ForwardProblem p = forward_problem();
  p.head_dim = p.head_dim_v = head_dim;
  p.window_right = causal ? 0 : kUnbounded;
  p.softmax.exact_lse = false;
  set_contiguous(&p);
  return p;
}

ForwardPlan plan_on(const DeviceProps& device, const ForwardProblem& problem,
                    Backend backend = Backend::automatic) {
  PlanOptions options;
  options.backend = backend;
  ForwardPlan plan;
  const Status status = plan_forward(problem, device, options, &plan);
  // A build without CUDA knows the rows but cannot run them; then only refusals can be tested.
  EXPECT_TRUE(status.ok() || status.code() == StatusCode::unavailable) << status.message();
  return plan;
}

// The row's own choice, which needs no compiled kernel.
SoftmaxOptions completed(DType dtype, int head_dim, MaskKind mask, const ForwardProblem& problem) {
  const KernelInfo row{"row",    Backend::ampere, Pass::forward, dtype,
                       head_dim, head_dim,        mask,          true};
  return ampere::complete_softmax(row, problem);
}

TEST(Softmax, AutomaticTakesTensorCoresWhereTheyWon) {
  for (const int head_dim : {64, 128}) {
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
      const ForwardProblem p = problem_of(head_dim, mask == MaskKind::causal);
      EXPECT_EQ(completed(DType::bf16, head_dim, mask, p).unit, kTensor);
      EXPECT_EQ(completed(DType::f16, head_dim, mask, p).unit, kTensor);
      EXPECT_EQ(completed(DType::f32, head_dim, mask, p).unit, kVector);
    }
  }
  EXPECT_EQ(completed(DType::bf16, 64, MaskKind::window, problem_of(64, false)).unit, kVector);
  EXPECT_EQ(completed(DType::bf16, 96, MaskKind::any, problem_of(96, false)).unit, kVector);
}

TEST(Softmax, AutomaticSumsLongRowsOnVectorUnits) {
  ForwardProblem p = problem_of(64, false);
  p.seqlen_k = ampere::kLongRowKeys;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).unit, kTensor);
  ++p.seqlen_k;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).unit, kVector);
  p.softmax.unit = kTensor;  // asked for by name
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).unit, kTensor);
}

// Weights below 2^-25 of an f16 row's largest would be 0.
TEST(Softmax, ManyF16KeysGetLargerWeights) {
  ForwardProblem p = problem_of(64, false);
  p.seqlen_k = ampere::kManyF16Keys;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 0.0f);
  ++p.seqlen_k;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 7.0f);
  EXPECT_EQ(completed(DType::bf16, 64, MaskKind::full, p).p_max_offset, 0.0f);
  p.softmax.rescale_threshold = 12.0f;  // together at most 2^15
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 3.0f);
  p.softmax.p_max_offset = 2.0f;  // asked for
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 2.0f);
  p.softmax = SoftmaxOptions{};
  p.wants_max_logit = true;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 7.0f);
  p.wants_max_logit = false;
  p.softmax.unit = kTensor;
  p.softmax.mode = SoftmaxMode::surrogate;
  EXPECT_EQ(completed(DType::f16, 64, MaskKind::full, p).p_max_offset, 0.0f);
}

TEST(Softmax, ScoresAreMultipliedByAPositiveFiniteNumber) {
  constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (const float scale : {1e-31f, 1e-38f, kSmallest, 0.125f, 3.0f, 2e38f}) {
    EXPECT_EQ(ampere::logit_scale(scale), scale * core::kLog2E);
    EXPECT_EQ(ampere::logit_scale(-scale), scale * core::kLog2E);
    EXPECT_GT(ampere::logit_scale(scale), 0.0f);
  }
  EXPECT_EQ(ampere::logit_scale(kLargest), kLargest);
  EXPECT_GT(ampere::logit_scale(0.0f), 0.0f);  // of a Q of zeros: any will do
}

TEST(Softmax, AutomaticKeepsTheLseThatLeavesExact) {
  ForwardProblem p = problem_of(128, false);
  p.softmax.exact_lse = true;
  EXPECT_EQ(completed(DType::bf16, 128, MaskKind::full, p).unit, kVector);
  p.wants_lse = false;
  EXPECT_EQ(completed(DType::bf16, 128, MaskKind::full, p).unit, kTensor);
  p.wants_lse = true;
  p.softmax.unit = kTensor;  // asked for
  EXPECT_EQ(completed(DType::bf16, 128, MaskKind::full, p).unit, kTensor);
}

TEST(Softmax, SharesAreFilledIn) {
  ForwardProblem p = problem_of(128, false);
  p.softmax.unit = kTensor;
  EXPECT_EQ(completed(DType::bf16, 128, MaskKind::full, p).tensor_quarters, 0);
  p.softmax.mode = SoftmaxMode::surrogate;
  EXPECT_EQ(completed(DType::bf16, 128, MaskKind::full, p).tensor_quarters, 1);
}

TEST(Softmax, EveryChoiceHasItsKernel) {
  using ampere::ForwardSoftmax;
  SoftmaxOptions softmax;
  softmax.unit = kVector;
  EXPECT_EQ(ampere::forward_softmax(softmax), ForwardSoftmax::vector);
  softmax.unit = kTensor;
  const ForwardSoftmax by_quarters[] = {ForwardSoftmax::tensor, ForwardSoftmax::quarter_share,
                                        ForwardSoftmax::half_share, ForwardSoftmax::tensor,
                                        ForwardSoftmax::full_share};
  for (const int quarters : {0, 1, 2, 4}) {
    softmax.tensor_quarters = quarters;
    EXPECT_EQ(ampere::forward_softmax(softmax), by_quarters[quarters]);
    EXPECT_EQ(ampere::softmax_kind(by_quarters[quarters]).tensor_quarters, quarters);
  }
  softmax.tensor_quarters = 2;
  softmax.split_rows = true;
  EXPECT_EQ(ampere::forward_softmax(softmax), ForwardSoftmax::row_share);
  softmax.mode = SoftmaxMode::surrogate;
  EXPECT_EQ(ampere::forward_softmax(softmax), ForwardSoftmax::surrogate);
  softmax.mode = SoftmaxMode::fast_scale;
  EXPECT_EQ(ampere::forward_softmax(softmax), ForwardSoftmax::fast_scale);
}

TEST(Softmax, HalfPrecisionLimitsASharedReference) {
  SoftmaxOptions softmax;
  EXPECT_EQ(ampere::shared_reach(softmax, DType::bf16), 100.0f);
  EXPECT_EQ(ampere::shared_reach(softmax, DType::f16), 10.0f);
  softmax.p_max_offset = 3.0f;
  EXPECT_EQ(ampere::shared_reach(softmax, DType::f16), 13.0f);
  softmax.min_exponent_log2 = -5.0f;
  EXPECT_EQ(ampere::shared_reach(softmax, DType::f16), 5.0f);
  EXPECT_EQ(ampere::shared_reach(softmax, DType::bf16), 5.0f);
}

std::string refusal(const DeviceProps& device, const ForwardProblem& problem, Backend backend) {
  PlanOptions options;
  options.backend = backend;
  ForwardPlan plan;
  const Status status = plan_forward(problem, device, options, &plan);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  return status.message();
}

TEST(Softmax, WhoHasNoneOnTensorCoresSaysSo) {
  ForwardProblem p = problem_of(128, false);
  p.softmax.unit = kTensor;
  EXPECT_NE(refusal(h100(), p, Backend::hopper).find("no softmax on tensor cores"),
            std::string::npos);
  EXPECT_NE(refusal(cpu_device(), p, Backend::cpu).find("no softmax on tensor cores"),
            std::string::npos);
  p.window_left = 100;
  p.window_right = 0;
  EXPECT_NE(refusal(a100(), p, Backend::ampere).find("head dims 64 and 128, full and causal"),
            std::string::npos);
}

TEST(Softmax, HopperHasOneThreshold) {
  ForwardProblem p = problem_of(128, false);
  p.softmax.rescale_threshold = 0.0f;
  EXPECT_NE(refusal(h100(), p, Backend::hopper).find("rescale_threshold 8"), std::string::npos);
}

TEST(Softmax, ModesRefuseWhatTheyCannotGive) {
  ForwardProblem p = problem_of(64, false);
  p.softmax.unit = kTensor;
  p.softmax.mode = SoftmaxMode::surrogate;
  p.wants_max_logit = true;
  EXPECT_NE(refusal(a100(), p, Backend::ampere).find("softmax_mode = exact only"),
            std::string::npos);
  p.wants_max_logit = false;
  p.softmax.mode = SoftmaxMode::fast_scale;
  p.dtype = DType::f16;
  p.scale = -0.75f;
  EXPECT_NE(refusal(a100(), p, Backend::ampere).find("only up to 1"), std::string::npos);
}

TEST(Softmax, PlansSayWhatRuns) {
  ForwardProblem p = problem_of(128, false);
  EXPECT_EQ(plan_on(cpu_device(), p, Backend::cpu).softmax.unit, kVector);
  const ForwardPlan on_a100 = plan_on(a100(), p, Backend::ampere);
  if (on_a100.kernel != nullptr) {
    EXPECT_EQ(on_a100.softmax.unit, kTensor);
    EXPECT_EQ(plan_on(h100(), p, Backend::hopper).softmax.unit, kVector);
  }
}

}  // namespace
}  // namespace pantile::testing
