// run_*: pointers and workspace are checked before anything is launched or written.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "build_info.h"
#include "host/kernel_table.h"
#include "host/validate.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// A tiny f32 problem on the CPU with all its tensors: batch 1, 2 heads on 1, 3 rows, 5 keys, dim 4.
class Run : public ::testing::Test {
 protected:
  Run() { reset(3, 5); }

  void reset(std::int64_t rows, std::int64_t keys) {
    problem_ = ForwardProblem();
    problem_.dtype = DType::f32;
    problem_.batch = 1;
    problem_.heads_q = 2;
    problem_.heads_k = 1;
    problem_.seqlen_q = rows;
    problem_.seqlen_k = keys;
    problem_.head_dim = problem_.head_dim_v = 4;
    problem_.scale = 0.5f;
    set_contiguous(&problem_);
    q_.assign(static_cast<std::size_t>(rows * 8), 0.25f);
    k_.assign(static_cast<std::size_t>(keys * 4), 0.5f);
    v_.assign(static_cast<std::size_t>(keys * 4), 2.0f);
    o_.assign(static_cast<std::size_t>(rows * 8), kPoison);
    lse_.assign(static_cast<std::size_t>(rows * 2), kPoison);
    tensors_ = ForwardTensors();
    tensors_.q = q_.data();
    tensors_.k = k_.data();
    tensors_.v = v_.data();
    tensors_.o = o_.data();
    tensors_.lse = lse_.data();
  }

  Status run(Backend backend = Backend::automatic) {
    PlanOptions options;
    options.backend = backend;
    ForwardPlan plan;
    Status status = plan_forward(problem_, cpu_device(), options, &plan);
    if (!status.ok()) {
      return status;
    }
    workspace_.assign(plan.workspace.bytes + 256, 0);
    void* aligned = workspace_.data();
    std::size_t room = workspace_.size();
    std::align(256, plan.workspace.bytes, aligned, room);
    return run_forward(plan, tensors_, aligned, nullptr);
  }

  // The run must fail with this text and leave the outputs alone.
  void expect_refused(const std::string& message) {
    const Status status = run();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(std::string(status.message()).rfind(message, 0), 0u) << status.message();
    for (const float value : o_) {
      EXPECT_EQ(value, kPoison);
    }
    for (const float value : lse_) {
      EXPECT_EQ(value, kPoison);
    }
  }

  static constexpr float kPoison = -1234.5f;
  ForwardProblem problem_;
  ForwardTensors tensors_;
  std::vector<float> q_, k_, v_, o_, lse_;
  std::vector<unsigned char> workspace_;
};

TEST_F(Run, EqualKeysAverageTheValues) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    reset(3, 5);
    const Status status = run(backend);
    ASSERT_TRUE(status.ok()) << status.message();
    for (const float value : o_) {
      EXPECT_NEAR(value, 2.0f, 1e-6f);
    }
    for (const float value : lse_) {
      EXPECT_NEAR(value, 0.25f + std::log(5.0f), 1e-6f);  // score 4 * 0.25 * 0.5 * 0.5
    }
  }
}

TEST_F(Run, RowsWithoutKeysGiveZeroAndMinusInfinity) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    reset(3, 0);
    tensors_.k = tensors_.v = nullptr;
    const Status status = run(backend);
    ASSERT_TRUE(status.ok()) << status.message();
    for (const float value : o_) {
      EXPECT_EQ(value, 0.0f);
    }
    for (const float value : lse_) {
      EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_F(Run, NothingToWriteIsDoneAtOnce) {
  reset(0, 5);
  tensors_ = ForwardTensors();
  tensors_.k = k_.data();
  tensors_.v = v_.data();
  EXPECT_TRUE(run().ok());
}

TEST_F(Run, MissingTensors) {
  tensors_.q = nullptr;
  expect_refused("q is null; it must point to the tensor");
  reset(3, 5);
  tensors_.k = nullptr;
  expect_refused("k is null; it must point to the tensor");
  reset(3, 5);
  tensors_.v = nullptr;
  expect_refused("v is null; it must point to the tensor");
  reset(3, 5);
  tensors_.o = nullptr;
  expect_refused("o is null; it must point to the tensor");
  reset(3, 5);
  tensors_.lse = nullptr;
  expect_refused("lse is null; it must be set because wants_lse is true");
}

TEST_F(Run, WithoutLse) {
  problem_.wants_lse = false;
  tensors_.lse = nullptr;
  EXPECT_TRUE(run().ok());
}

TEST_F(Run, MaxLogitIsRaised) {
  float max_logit[2] = {-std::numeric_limits<float>::infinity(), 3.0f};
  tensors_.max_logit = max_logit;
  expect_refused("max_logit is set; it must be null because wants_max_logit is false");
  problem_.wants_max_logit = true;
  ASSERT_TRUE(run().ok());
  EXPECT_FLOAT_EQ(max_logit[0], 0.25f);  // 4 * 0.25 * 0.5, times the scale of 0.5
  EXPECT_FLOAT_EQ(max_logit[1], 3.0f);   // larger than any score of this run
  tensors_.max_logit = nullptr;
  reset(3, 5);
  problem_.wants_max_logit = true;
  expect_refused("max_logit is null; it must be set because wants_max_logit is true");
}

TEST_F(Run, OptionalArraysMustMatchTheProblem) {
  const std::int32_t offsets[] = {0, 3};
  tensors_.cu_seqlens_q = offsets;
  expect_refused("cu_seqlens_q is set; it must be null because packed_q is false");
  reset(3, 5);
  tensors_.seqused_k = offsets;
  expect_refused("seqused_k is set; it must be null because has_seqused_k is false");
  reset(3, 5);
  problem_.packed_k = true;
  problem_.total_k = 5;
  expect_refused("cu_seqlens_k is null; it must be set because packed_k is true");
  reset(3, 5);
  problem_.has_seqused_q = true;
  expect_refused("seqused_q is null; it must be set because has_seqused_q is true");
}

TEST_F(Run, MisalignedTensor) {
  problem_.q.base_align_bytes = 4;
  EXPECT_TRUE(run().ok());
  reset(3, 5);
  problem_.q.base_align_bytes = 1 << 30;
  expect_refused("q is at 0x");
}

TEST_F(Run, PlanFromNowhere) {
  ForwardPlan plan;
  EXPECT_STREQ(run_forward(plan, tensors_, nullptr, nullptr).message(),
               "plan.kernel is not a row of the forward kernels; make the plan with plan_forward");
  KernelInfo fake{};
  plan.kernel = &fake;
  EXPECT_EQ(run_forward(plan, tensors_, nullptr, nullptr).code(), StatusCode::invalid_argument);
  EXPECT_STREQ(
      run_backward(BackwardPlan(), BackwardTensors(), nullptr, nullptr).message(),
      "plan.kernel is not a row of the backward kernels; make the plan with plan_backward");
}

TEST_F(Run, RowsThatAreNotCompiledSaySo) {
  for (int i = 0; i < host::forward_rows().count; ++i) {
    const host::ForwardRow& row = host::forward_rows().rows[i];
    if (!row.info.compiled) {
      ForwardPlan plan;
      plan.kernel = &row.info;
      const Status status = run_forward(plan, tensors_, nullptr, nullptr);
      EXPECT_EQ(status.code(), StatusCode::unavailable);
      EXPECT_EQ(std::string(status.message()),
                std::string(row.info.name) + ": this build has no CUDA: " + PANTILE_CUDA_REASON);
    }
  }
}

TEST(WorkspaceRules, NullAndMisaligned) {
  Workspace none;
  EXPECT_TRUE(host::validate_workspace(none, nullptr).ok());
  Workspace some;
  some.bytes = 4096;
  EXPECT_STREQ(host::validate_workspace(some, nullptr).message(),
               "workspace is null; the plan needs 4096 bytes");
  alignas(256) static unsigned char block[512];
  EXPECT_TRUE(host::validate_workspace(some, block).ok());
  const std::string message = host::validate_workspace(some, block + 64).message();
  EXPECT_TRUE(message.rfind("workspace is at 0x", 0) == 0 &&
              message.find("; its address must be a multiple of 256 bytes") != std::string::npos)
      << message;
}

TEST(LowBitsRules, NameThePointerAndItsAddress) {
  ForwardProblem problem = forward_problem();
  alignas(256) static float memory[64];
  auto* const low = reinterpret_cast<std::int8_t*>(memory);
  ForwardTensors tensors;
  tensors.q = tensors.k = tensors.v = memory;
  tensors.o = memory;
  tensors.lse = memory;
  EXPECT_TRUE(host::validate_tensors(problem, tensors).ok());
  tensors.o_low = low;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "o_low is set; it must be null because wants_o_low is false");
  problem.wants_o_low = true;
  EXPECT_TRUE(host::validate_tensors(problem, tensors).ok());
  tensors.o_low = low + 8;
  const std::string text = host::validate_tensors(problem, tensors).message();
  EXPECT_TRUE(text.rfind("o_low is at 0x", 0) == 0 &&
              text.find("; its address must be a multiple of 16 bytes") != std::string::npos)
      << text;
  tensors.o_low = nullptr;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "o_low is null; it must be set because wants_o_low is true");
  problem.seqlen_q = 0;  // no rows: nothing to point to
  EXPECT_TRUE(host::validate_tensors(problem, tensors).ok());
}

TEST(BackwardTensorRules, NameTheMissingOne) {
  const BackwardProblem problem = backward_problem();
  alignas(256) static float memory[64];
  BackwardTensors tensors;
  tensors.forward.q = tensors.forward.k = tensors.forward.v = memory;
  tensors.forward.o = memory;
  tensors.forward.lse = memory;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "grad_o is null; it must point to the tensor");
  tensors.grad_o = memory;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "grad_q is null; it must point to the tensor");
  tensors.grad_q = memory;
  tensors.grad_k = memory;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "grad_v is null; it must point to the tensor");
  tensors.grad_v = memory;
  EXPECT_TRUE(host::validate_tensors(problem, tensors).ok());
  tensors.grad_lse = memory;
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "grad_lse is set; it must be null because has_grad_lse is false");
  tensors.grad_lse = nullptr;
  tensors.o_low = reinterpret_cast<std::int8_t*>(memory);
  EXPECT_STREQ(host::validate_tensors(problem, tensors).message(),
               "o_low is set; it must be null because has_o_low is false");
  BackwardProblem with_low = problem;
  with_low.has_o_low = true;
  EXPECT_TRUE(host::validate_tensors(with_low, tensors).ok());
  tensors.o_low = nullptr;
  EXPECT_STREQ(host::validate_tensors(with_low, tensors).message(),
               "o_low is null; it must be set because has_o_low is true");
}

}  // namespace
}  // namespace pantile::testing
