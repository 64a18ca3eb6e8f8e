// Plans whose keys are cut into parts: what the parts are, what is refused, and how many there are.
#include "host/split.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "host/features.h"
#include "host/shape.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// 256 queries of 8 heads over 64k keys.
ForwardProblem chunk(int num_splits) {
  ForwardProblem p = forward_problem();
  p.batch = 1;
  p.seqlen_q = 256;
  p.seqlen_k = 65536;
  p.num_splits = num_splits;
  set_contiguous(&p);
  return p;
}

// The first row that would serve, of kernels that this build may lack; or null and why none does.
const host::ForwardRow* row_for(const ForwardProblem& p, const DeviceProps& device,
                                std::string* reason) {
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int rows = explain_forward(p, device, PlanOptions(), verdicts.data(), kernel_count());
  for (int i = 0; i < rows; ++i) {
    const Verdict& verdict = verdicts[static_cast<std::size_t>(i)];
    if (verdict.reason.ok() || verdict.reason.code() == StatusCode::unavailable) {
      return host::forward_rows().rows + i;
    }
    if (verdict.closest) {
      *reason += std::string(verdict.reason.message()) + "; ";
    }
  }
  return nullptr;
}

std::string refusal(const ForwardProblem& p, const DeviceProps& device = h100()) {
  std::string reason;
  EXPECT_EQ(row_for(p, device, &reason), nullptr);
  return reason;
}

// As plan_forward() makes it in a build with all kernels.
ForwardPlan plan_of(const ForwardProblem& p, const DeviceProps& device) {
  ForwardPlan plan;
  std::string reason;
  const host::ForwardRow* row = row_for(p, device, &reason);
  EXPECT_NE(row, nullptr) << reason;
  if (row != nullptr) {
    plan.problem = host::canonical(p);
    plan.device = device;
    plan.kernel = &row->info;
    if (!host::writes_nothing(plan.problem)) {
      row->configure(&plan);
      host::cut_keys(*row, &plan);
    }
  }
  return plan;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(Split, NumbersOutsideTheirRangeAreInvalid) {
  for (const int splits : {-1, kMaxSplits + 1}) {
    ForwardPlan plan;
    const Status status = plan_forward(chunk(splits), h100(), PlanOptions(), &plan);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_TRUE(contains(status.message(), "num_splits")) << status.message();
  }
}

TEST(Split, OneIsThePlanThatItWas) {
  for (const DeviceProps& device : {h100(), a100(), cpu_device()}) {
    for (const std::int64_t right : {kUnbounded, std::int64_t{0}}) {
      ForwardProblem p = chunk(1);
      p.window_right = right;
      const ForwardPlan one = plan_of(p, device);
      EXPECT_EQ(one.num_splits, 1);
      EXPECT_EQ(one.prefix_kernel, nullptr);
      const ForwardPlan cut = plan_of(
          [&] {
            p.num_splits = 4;
            return p;
          }(),
          device);
      EXPECT_EQ(cut.kernel, one.kernel);
      EXPECT_GT(cut.workspace.bytes, one.workspace.bytes);
    }
  }
}

TEST(Split, FullMasksAreOneLaunchOfAllParts) {
  const ForwardPlan plan = plan_of(chunk(8), h100());
  EXPECT_EQ(plan.num_splits, 8);
  EXPECT_FALSE(plan.automatic_splits);
  EXPECT_STREQ(plan.kernel->name, "hopper_forward_bf16_d128_full");
  EXPECT_EQ(plan.blocks, 132);  // 8 heads x 8 parts x 2 tiles of queries, and slots of the packing
  EXPECT_EQ(plan.split_tile, plan.tile_k);
  ForwardPlan launches[2];
  ASSERT_EQ(host::split_launches(plan, launches), 1);
  EXPECT_EQ(launches[0].problem.batch, 8);
  EXPECT_EQ(launches[0].problem.total_q, 8 * 256);
  EXPECT_TRUE(launches[0].problem.output_f32);
  EXPECT_TRUE(launches[0].problem.wants_lse);
}

// Kernels of the library serve causal parts: none is compiled at run time.
TEST(Split, CausalMasksHaveAPrefixAndATail) {
  ForwardProblem p = chunk(8);
  p.window_right = 0;
  for (const DeviceProps& device : {h100(), a100()}) {
    const ForwardPlan plan = plan_of(p, device);
    ASSERT_NE(plan.prefix_kernel, nullptr);
    EXPECT_EQ(plan.kernel->mask, MaskKind::causal);
    EXPECT_EQ(plan.prefix_kernel->mask, MaskKind::full);
    EXPECT_EQ(plan.prefix_kernel->backend, plan.kernel->backend);
    EXPECT_GE(plan.prefix_blocks, 7 * 8);
    ForwardPlan launches[2];
    ASSERT_EQ(host::split_launches(plan, launches), 2);
    EXPECT_EQ(launches[0].problem.batch, 7);
    EXPECT_EQ(launches[0].problem.window_right, kUnbounded);
    EXPECT_EQ(launches[1].problem.batch, 1);
    EXPECT_EQ(launches[1].problem.window_right, 0);
    EXPECT_LE(launches[1].problem.seqlen_k, 256 + 256);
    jit::KernelState states[4];
    int count = -1;
    ASSERT_TRUE(jit::describe(plan, states, 4, &count).ok());
    EXPECT_EQ(count, 0);
  }
}

TEST(Split, WindowsShiftTheirMask) {
  ForwardProblem p = chunk(4);
  p.window_left = 5000;
  p.window_right = 0;
  const ForwardPlan plan = plan_of(p, h100());
  EXPECT_EQ(plan.prefix_kernel, nullptr);
  ForwardPlan launches[2];
  ASSERT_EQ(host::split_launches(plan, launches), 1);
  EXPECT_TRUE(launches[0].problem.has_mask_shift);
  EXPECT_EQ(launches[0].problem.window_left, 5000);
  // Rows without shifts say so.
  p.head_dim = p.head_dim_v = 256;
  set_contiguous(&p);
  const std::string message = refusal(p, a100());
  EXPECT_TRUE(contains(message, "num_splits is 4; for its parts it does not serve mask_shift"))
      << message;
}

TEST(Split, PartsHaveNothingThatIsDoneOnce) {
  ForwardProblem p = chunk(4);
  p.variant.has_sinks = true;
  p.wants_o_low = true;
  p.softmax.exact_lse = false;
  const ForwardPlan plan = plan_of(p, h100());
  ForwardPlan launches[2];
  ASSERT_EQ(host::split_launches(plan, launches), 1);
  EXPECT_FALSE(launches[0].problem.variant.has_sinks);
  EXPECT_FALSE(launches[0].problem.wants_o_low);
  EXPECT_TRUE(launches[0].problem.softmax.exact_lse);
  EXPECT_EQ(launches[0].problem.num_splits, 1);
}

TEST(Split, WhatAPartWouldReadElsewhereIsRefusedByName) {
  const struct {
    const char* name;
    void (*set)(ForwardProblem*);
  } cases[] = {
      {"ALiBi", [](ForwardProblem* p) { p->variant.has_alibi = true; }},
      {"dropout", [](ForwardProblem* p) { p->variant.dropout = 20; }},
      {"keys in pages",
       [](ForwardProblem* p) {
         p->page_size = 64;
         p->pages = p->max_pages = p->table_stride = 1024;
         p->has_seqused_k = true;
         p->k = p->v = contiguous(64, 2, 128);
       }},
      {"a document mask",
       [](ForwardProblem* p) {
         p->variant.has_documents = true;
         p->variant.mask_queries = p->seqlen_q;
         p->variant.mask_keys = p->seqlen_k;
       }},
  };
  for (const auto& one : cases) {
    ForwardProblem p = chunk(4);
    one.set(&p);
    const std::string message = refusal(p);
    EXPECT_TRUE(contains(message, "num_splits is 4")) << one.name << ": " << message;
    EXPECT_TRUE(contains(message, one.name)) << message;
    // Left to the plan, keys stay whole.
    p.num_splits = kAutomaticSplits;
    EXPECT_EQ(plan_of(p, h100()).num_splits, 1) << one.name;
  }
}

TEST(Split, KeysMustBeRowsOfOneTensor) {
  ForwardProblem p = chunk(4);
  p.batch = 3;
  set_contiguous(&p);
  ForwardPlan launches[2];
  ASSERT_EQ(host::split_launches(plan_of(p, h100()), launches), 1);
  EXPECT_EQ(launches[0].problem.total_k, 3 * 65536);
  // [batch, heads, seq, dim] in memory.
  p.k = p.v = Layout{65536 * 2 * 128, 128, 65536 * 128, 16};
  ASSERT_EQ(host::split_launches(plan_of(p, h100()), launches), 1);
  EXPECT_EQ(launches[0].problem.total_k, 2 * 65536 * 2 + 65536);
  // [seq, batch, heads, dim]: sequences lie between each other's rows.
  p.k = p.v = Layout{2 * 128, 3 * 2 * 128, 128, 16};
  EXPECT_TRUE(contains(refusal(p), "num_splits is 4; it needs the keys of one sequence after"));
  p.batch = 1;
  EXPECT_EQ(plan_of(p, h100()).num_splits, 4);
  // V with other gaps than K.
  p = chunk(4);
  p.batch = 3;
  set_contiguous(&p);
  p.v.batch += p.v.seq;
  EXPECT_TRUE(contains(refusal(p), "as many rows between the sequences of k as of v"));
}

TEST(Split, TheModelCutsWhereFewBlocksAreBusy) {
  for (const DeviceProps& device : {h100(), a100()}) {
    const ForwardPlan few = plan_of(chunk(kAutomaticSplits), device);
    EXPECT_TRUE(few.automatic_splits);
    EXPECT_GE(few.num_splits, 4);
    EXPECT_LE(few.num_splits, 32);
    EXPECT_EQ(few.problem.num_splits, few.num_splits);
    // The whole GPU is busy, or there is little to do.
    ForwardProblem p = chunk(kAutomaticSplits);
    p.batch = 32;
    set_contiguous(&p);
    EXPECT_EQ(plan_of(p, device).num_splits, 1);
    p = chunk(kAutomaticSplits);
    p.seqlen_k = 512;
    set_contiguous(&p);
    EXPECT_EQ(plan_of(p, device).num_splits, 1);
  }
}

TEST(Split, NothingIsCutWithoutKeysOrRows) {
  for (const bool keys : {false, true}) {
    ForwardProblem p = chunk(4);
    (keys ? p.seqlen_k : p.seqlen_q) = 0;
    set_contiguous(&p);
    EXPECT_EQ(plan_of(p, h100()).num_splits, 1);
    EXPECT_EQ(plan_of(p, cpu_device()).num_splits, 1);
  }
}

TEST(Split, BackwardPlansIgnoreIt) {
  ForwardProblem p = forward_problem();
  BackwardPlan whole, cut;
  ASSERT_TRUE(plan_backward(backward_problem(p), cpu_device(), PlanOptions(), &whole).ok());
  p.num_splits = 4;
  ASSERT_TRUE(plan_backward(backward_problem(p), cpu_device(), PlanOptions(), &cut).ok());
  EXPECT_EQ(whole.kernel, cut.kernel);
  EXPECT_EQ(whole.workspace.bytes, cut.workspace.bytes);
}

}  // namespace
}  // namespace pantile::testing
