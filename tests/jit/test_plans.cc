// From plans to files of kernels, with the compiler that pretends.
#include <gtest/gtest.h>

#include <string>

#include "pantile/pantile.h"
#include "support.h"

#include "../host/problems.h"

namespace pantile::jit {
namespace {

class Plans : public JitTest {
 protected:
  void SetUp() override {
    JitTest::SetUp();
    setenv("PANTILE_NVRTC", FAKE_NVRTC_13_0, 1);
    problem_ = testing::forward_problem();
    problem_.window_right = 0;
    problem_.variant.softcap = 20.0f;
    status_ = plan_forward(problem_, testing::h100(), {Backend::hopper}, &plan_);
    if (status_.code() == StatusCode::unavailable) {
      GTEST_SKIP() << "this build has no CUDA";
    }
    ASSERT_TRUE(status_.ok()) << status_.message();
  }

  ForwardProblem problem_;
  ForwardPlan plan_;
  Status status_;
};

TEST_F(Plans, AVariantIsCompiledIntoAFolder) {
  KernelFacts facts[2];
  int count = 0;
  const Status status = compile_to_folder(plan_, in_folder("out").c_str(), facts, 2, &count);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(count, 1);
  EXPECT_TRUE(contains(facts[0].name, "hopper_forward_bf16_d128_causal softcap")) << facts[0].name;
  EXPECT_EQ(facts[0].registers, 168);
  Image image;
  ASSERT_TRUE(decode(read_text(facts[0].file), &image));
  EXPECT_TRUE(contains(image.code, "MaskKind::causal")) << image.code;
}

TEST_F(Plans, LengthsAndValuesAreNoPartOfAKernel) {
  KernelFacts first;
  KernelFacts second;
  int count = 0;
  ASSERT_TRUE(compile_to_folder(plan_, folder.c_str(), &first, 1, &count).ok());
  problem_.batch = 3;
  problem_.seqlen_q = problem_.seqlen_k = 1500;
  problem_.variant.softcap = 50.0f;
  testing::set_contiguous(&problem_);
  ASSERT_TRUE(plan_forward(problem_, testing::h100(), {Backend::hopper}, &plan_).ok());
  ASSERT_TRUE(compile_to_folder(plan_, folder.c_str(), &second, 1, &count).ok());
  EXPECT_STREQ(first.file, second.file);
  problem_.variant.has_alibi = true;
  ASSERT_TRUE(plan_forward(problem_, testing::h100(), {Backend::hopper}, &plan_).ok());
  ASSERT_TRUE(compile_to_folder(plan_, folder.c_str(), &second, 1, &count).ok());
  EXPECT_STRNE(first.file, second.file);
}

}  // namespace
}  // namespace pantile::jit
