// Which softmax a forward gets: what the automatic choice stands for, and who refuses what.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "ampere/forward/softmax_choice.h"
#include "ampere/order.h"
#include "ampere/plan.h"
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
SoftmaxOptions completed(DType dtype, int head_dim, MaskKind mask, const ForwardProblem& problem,
                         const DeviceProps& device = a100()) {
  const KernelInfo row{"row",    Backend::ampere, Pass::forward, dtype,
                       head_dim, head_dim,        mask,          true};
  return ampere::complete_softmax(row, problem, device);
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

// Compute capability and the shared memory of a block, multiprocessors and L2 of a card of each.
struct Generation {
  const char* name;
  int major, minor, multiprocessors, smem_optin_bytes, l2_mb;
  SoftmaxUnit unit;
  const char* source;
};
constexpr Generation kGenerations[] = {
    {"A100", 8, 0, 108, 166912, 40, kTensor, "model of sm_80"},
    {"RTX 3090", 8, 6, 82, 101376, 6, kVector, "model of sm_86"},
    {"Orin", 8, 7, 16, 166912, 4, kVector, "model of sm_87"},
    {"RTX 4090", 8, 9, 128, 101376, 72, kVector, "model of sm_89"},
    {"H100", 9, 0, 132, 232448, 50, kTensor, "measured on sm_90"},
    {"B200", 10, 0, 148, 232448, 126, kTensor, "model of sm_100, taken as sm_90"},
    {"B300", 10, 3, 148, 232448, 126, kTensor, "model of sm_100, taken as sm_90"},
    {"RTX 5090", 12, 0, 170, 101376, 96, kVector, "model of sm_120"},
};

DeviceProps device_of(const Generation& g) {
  return gpu_device(g.name, g.major, g.minor, g.multiprocessors, g.smem_optin_bytes, g.l2_mb << 20);
}

TEST(Softmax, EachGenerationHasItsChoiceAndSaysWhence) {
  for (const Generation& g : kGenerations) {
    for (const int head_dim : {64, 128}) {
      for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
        const KernelInfo row{"row",    Backend::ampere, Pass::forward, DType::bf16,
                             head_dim, head_dim,        mask,          true};
        ForwardProblem p = problem_of(head_dim, mask == MaskKind::causal);
        EXPECT_EQ(completed(DType::bf16, head_dim, mask, p, device_of(g)).unit, g.unit) << g.name;
        EXPECT_STREQ(ampere::choice_source(row, p, device_of(g)), g.source);
        p.softmax.unit = g.unit == kTensor ? kVector : kTensor;  // the caller's choice stays
        EXPECT_EQ(completed(DType::bf16, head_dim, mask, p, device_of(g)).unit, p.softmax.unit);
        EXPECT_STREQ(ampere::choice_source(row, p, device_of(g)), "");
        p.softmax.unit = SoftmaxUnit::automatic;
        p.softmax.exact_lse = true;
        EXPECT_STREQ(ampere::choice_source(row, p, device_of(g)), "no other serves the call");
      }
    }
  }
}

TEST(Softmax, WhatWasMeasuredHereGoesBeforeTheTable) {
  const KernelInfo row{"row", Backend::ampere, Pass::forward, DType::bf16, 64,
                       64,    MaskKind::full,  true};
  ForwardProblem p = problem_of(64, false);
  p.seqlen_q = 1000;
  p.seqlen_k = 1025;  // the class up to 2048
  const auto planned = [&](const DeviceProps& device) {
    ForwardPlan plan;
    plan.problem = p;
    plan.device = device;
    plan.kernel = &row;
    ampere::configure_forward(&plan);
    return plan;
  };
  TunedSoftmax choice;
  choice.kernel = "row";
  choice.device = "A100";
  choice.log2_keys = 11;
  choice.log2_queries = 14;  // 2 * 8 * 1000
  choice.unit = kVector;
  choice.source = "autotuned: a file";
  EXPECT_EQ(planned(a100()).softmax.unit, kTensor);
  set_tuned_softmax(&choice, 1);
  EXPECT_EQ(planned(a100()).softmax.unit, kVector);
  EXPECT_STREQ(planned(a100()).softmax_source, "autotuned: a file");
  EXPECT_EQ(planned(h100()).softmax.unit, kTensor);  // another device
  EXPECT_STREQ(planned(h100()).softmax_source, "measured on sm_90");
  p.seqlen_k = 2049;  // another class
  EXPECT_EQ(planned(a100()).softmax.unit, kTensor);
  p.seqlen_k = 2048;
  EXPECT_EQ(planned(a100()).softmax.unit, kVector);
  p.softmax.unit = kTensor;  // the caller's choice stays
  EXPECT_EQ(planned(a100()).softmax.unit, kTensor);
  p.softmax.unit = SoftmaxUnit::automatic;
  choice.unit = kTensor;
  p.softmax.exact_lse = true;  // no choice
  set_tuned_softmax(&choice, 1);
  EXPECT_EQ(planned(a100()).softmax.unit, kVector);
  set_tuned_softmax(nullptr, 0);
  p.softmax.exact_lse = false;
  EXPECT_STREQ(planned(a100()).softmax_source, "model of sm_80");
}

TEST(Softmax, ClassesOfLengths) {
  const std::int64_t lengths[] = {0, 1, 2, 3, 1024, 1025, 131072};
  const int expected[] = {0, 0, 1, 2, 10, 11, 17};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(rounded_up_log2(lengths[i]), expected[i]);
  }
}

// The plans of the whole family on each: tiles that fit, blocks that cover the rows.
TEST(Softmax, PlansOfEveryGenerationFitItsSharedMemory) {
  for (const Generation& g : kGenerations) {
    const DeviceProps device = device_of(g);
    const ampere::SharedClass shared = ampere::compiled_class(device.smem_optin_bytes);
    EXPECT_LE(ampere::shared_class_bytes(shared), device.smem_optin_bytes);
    for (const int head_dim : {32, 64, 96, 128, 192, 256}) {
      for (const bool causal : {false, true}) {
        ForwardProblem p = problem_of(head_dim, causal);
        const ampere::ForwardTile tile = ampere::forward_tile(
            head_dim, head_dim, causal ? MaskKind::causal : MaskKind::full, shared);
        // A multiprocessor has 1 KB more than a block may ask for, and each block uses up 1 KB.
        const int block = ampere::forward_shared_bytes(tile, head_dim, head_dim) + 1024;
        // Of the widest tiles the smallest multiprocessors hold one.
        const bool small = shared == ampere::SharedClass::small;
        const int resident = small && head_dim > 128 ? 1 : tile.blocks_per_sm;
        EXPECT_LE(resident * block, ampere::shared_class_bytes(shared) + 1024)
            << g.name << " d" << head_dim;
        const ampere::BackwardTile back = ampere::backward_tile(head_dim, shared);
        EXPECT_LE(ampere::backward_shared_bytes(back, head_dim, head_dim),
                  ampere::shared_class_bytes(shared))
            << g.name << " d" << head_dim;
        if (head_dim == 32 || g.major == 9) {
          continue;  // no row of the table; Hopper rows come first
        }
        const ForwardPlan plan = plan_on(device, p, Backend::ampere);
        if (plan.kernel != nullptr) {  // of a build without CUDA there is none
          EXPECT_EQ(plan.tile_q, tile.tile_q);
          EXPECT_EQ(plan.tile_k, tile.tile_k);
          EXPECT_GE(static_cast<std::int64_t>(plan.blocks) * tile.tile_q,
                    p.seqlen_q * p.heads_q * p.batch);
        }
      }
    }
  }
}

// Long rows have the smallest tile everywhere, softmax on tensor cores has none of 99 KB, and yet
// every tile fits every GPU that may take it.
TEST(Softmax, TilesOfLongRowsAndOfTensorCores) {
  using ampere::ForwardSoftmax;
  using ampere::SharedClass;
  constexpr SharedClass kClasses[] = {SharedClass::small, SharedClass::medium, SharedClass::large};
  for (const SharedClass shared : kClasses) {
    EXPECT_EQ(ampere::forward_tile_class(shared, ForwardSoftmax::vector, true), SharedClass::small);
    EXPECT_EQ(ampere::forward_tile_class(shared, ForwardSoftmax::vector, false), shared);
    const SharedClass tensor = ampere::forward_tile_class(shared, ForwardSoftmax::tensor, false);
    EXPECT_EQ(tensor, shared == SharedClass::small ? SharedClass::medium : shared);
    for (const int head_dim : {64, 128}) {
      for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
        const ampere::ForwardTile tile = ampere::forward_tile(head_dim, head_dim, mask, tensor);
        EXPECT_LE(ampere::forward_shared_bytes(tile, head_dim, head_dim),
                  ampere::shared_class_bytes(shared));
      }
    }
  }
  // The tile for 163 KB of head dim 256 has other rows than the smallest.
  const KernelInfo row{"row", Backend::ampere, Pass::forward, DType::bf16, 256,
                       256,   MaskKind::full,  true};
  for (const std::int64_t keys : {ampere::kLongRowKeys, ampere::kLongRowKeys + 1}) {
    ForwardPlan plan;
    plan.problem = problem_of(256, false);
    plan.problem.seqlen_k = keys;
    plan.device = a100();
    plan.kernel = &row;
    ampere::configure_forward(&plan);
    const SharedClass shared =
        keys > ampere::kLongRowKeys ? SharedClass::small : SharedClass::medium;
    EXPECT_EQ(plan.tile_q, ampere::forward_tile(256, 256, MaskKind::full, shared).tile_q);
    EXPECT_GE(static_cast<std::int64_t>(plan.blocks) * plan.tile_q,
              plan.problem.seqlen_q * plan.problem.heads_q * plan.problem.batch);
  }
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
