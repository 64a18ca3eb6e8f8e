// Compiling ahead of the first run, by plan.
#include <gtest/gtest.h>

#include <string>

#include "pantile/jit.h"
#include "problems.h"

namespace pantile {
namespace {

using testing::backward_problem;
using testing::forward_problem;

TEST(Compile, PlainAttentionNeedsNothing) {
  ForwardPlan forward;
  BackwardPlan backward;
  ASSERT_TRUE(plan_forward(forward_problem(), testing::cpu_device(), {}, &forward).ok());
  ASSERT_TRUE(plan_backward(backward_problem(), testing::cpu_device(), {}, &backward).ok());
  setenv("PANTILE_JIT", "off", 1);  // an attempt to compile would be an error
  EXPECT_TRUE(compile(forward).ok());
  EXPECT_TRUE(compile(backward).ok());
  int count = -1;
  EXPECT_TRUE(jit::compile_to_folder(forward, "unused", nullptr, 0, &count).ok());
  EXPECT_EQ(count, 0);
  count = -1;
  EXPECT_TRUE(jit::compile_to_folder(backward, "unused", nullptr, 0, &count).ok());
  EXPECT_EQ(count, 0);
  unsetenv("PANTILE_JIT");
}

TEST(Compile, PlainGpuPlansNeedNothing) {
  ForwardPlan plan;
  const Status status = plan_forward(forward_problem(), testing::h100(), {}, &plan);
  if (status.code() == StatusCode::unavailable) {
    GTEST_SKIP() << "this build has no CUDA";
  }
  ASSERT_TRUE(status.ok()) << status.message();
  setenv("PANTILE_JIT", "off", 1);
  EXPECT_TRUE(compile(plan).ok());
  unsetenv("PANTILE_JIT");
}

TEST(Compile, ChecksItsArguments) {
  const Status no_plan = compile(ForwardPlan());
  EXPECT_EQ(no_plan.code(), StatusCode::invalid_argument);
  EXPECT_TRUE(std::string(no_plan.message()).find("plan.kernel is null") == 0);
  ForwardPlan plan;
  ASSERT_TRUE(plan_forward(forward_problem(), testing::cpu_device(), {}, &plan).ok());
  int count = 0;
  EXPECT_EQ(jit::compile_to_folder(plan, nullptr, nullptr, 0, &count).code(),
            StatusCode::invalid_argument);
  EXPECT_EQ(jit::compile_to_folder(plan, "", nullptr, 0, &count).code(),
            StatusCode::invalid_argument);
}

}  // namespace
}  // namespace pantile
