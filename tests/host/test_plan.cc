// Planning and explaining, on invented devices: no GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "build_info.h"
#include "host/kernel_table.h"
#include "problems.h"

namespace pantile::testing {
namespace {

using ::testing::Test;

bool on_gpu(const KernelInfo& row) {
  return row.backend == Backend::hopper || row.backend == Backend::ampere;
}

DeviceProps home_of(const KernelInfo& row) {
  return row.backend == Backend::hopper   ? h100()
         : row.backend != Backend::ampere ? cpu_device()
         : row.dtype == DType::e4m3       ? l40s()
                                          : a100();
}

// A problem made for one row of the table.
ForwardProblem problem_for(const KernelInfo& row) {
  ForwardProblem problem = forward_problem();
  problem.dtype = row.dtype;
  problem.head_dim = row.head_dim;
  problem.head_dim_v = row.head_dim_v;
  if (row.mask == MaskKind::causal) {
    problem.window_right = 0;
  } else if (row.mask == MaskKind::window) {
    problem.window_left = 100;
    problem.window_right = 0;
  }
  set_contiguous(&problem);
  return problem;
}

std::vector<Verdict> explain(const ForwardProblem& problem, const DeviceProps& device,
                             const PlanOptions& options = {}) {
  std::vector<Verdict> verdicts(static_cast<std::size_t>(host::forward_rows().count));
  const int count =
      explain_forward(problem, device, options, verdicts.data(), static_cast<int>(verdicts.size()));
  EXPECT_EQ(count, static_cast<int>(verdicts.size()));
  return verdicts;
}

const KernelInfo* chosen(const std::vector<Verdict>& verdicts) {
  for (const Verdict& verdict : verdicts) {
    if (verdict.chosen) {
      return verdict.kernel;
    }
  }
  return nullptr;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Plan, EveryForwardRowIsTakenForTheProblemItWasMadeFor) {
  const auto list = host::forward_rows();
  for (int i = 0; i < list.count; ++i) {
    const host::ForwardRow& row = list.rows[i];
    SCOPED_TRACE(row.info.name);
    ForwardPlan plan;
    plan.problem = problem_for(row.info);
    plan.device = home_of(row.info);
    plan.kernel = &row.info;
    const Status status = row.accept(row.info, plan.problem, plan.device);
    ASSERT_TRUE(status.ok()) << status.message();
    row.configure(&plan);
    EXPECT_GT(plan.blocks, 0);
    PlanOptions options;
    options.backend = row.info.backend;
    ForwardPlan made;
    const Status planned = plan_forward(plan.problem, plan.device, options, &made);
    if (row.info.compiled) {
      ASSERT_TRUE(planned.ok()) << planned.message();
      EXPECT_STREQ(made.kernel->name, row.info.name);
      EXPECT_EQ(made.tile_q, plan.tile_q);
      EXPECT_EQ(made.tile_k, plan.tile_k);
      EXPECT_EQ(made.blocks, plan.blocks);
      EXPECT_EQ(made.workspace.bytes, plan.workspace.bytes);
      EXPECT_LE(made.workspace.zeroed_bytes, made.workspace.bytes);
    } else {
      EXPECT_EQ(planned.code(), StatusCode::unavailable);
      EXPECT_TRUE(contains(planned.message(), "it would serve, but this build has no CUDA: "))
          << planned.message();
      EXPECT_TRUE(contains(planned.message(), PANTILE_CUDA_REASON)) << planned.message();
      EXPECT_EQ(made.kernel, nullptr);
    }
  }
}

TEST(Plan, EveryBackwardRowIsTakenForTheProblemItWasMadeFor) {
  const auto list = host::backward_rows();
  for (int i = 0; i < list.count; ++i) {
    const host::BackwardRow& row = list.rows[i];
    SCOPED_TRACE(row.info.name);
    const BackwardProblem problem = backward_problem(problem_for(row.info));
    const DeviceProps device = home_of(row.info);
    const Status status = row.accept(row.info, problem, device);
    ASSERT_TRUE(status.ok()) << status.message();
    PlanOptions options;
    options.backend = row.info.backend;
    BackwardPlan plan;
    const Status planned = plan_backward(problem, device, options, &plan);
    if (row.info.compiled) {
      ASSERT_TRUE(planned.ok()) << planned.message();
      EXPECT_STREQ(plan.kernel->name, row.info.name);
      EXPECT_GT(plan.blocks, 0);
    } else {
      EXPECT_EQ(planned.code(), StatusCode::unavailable) << planned.message();
    }
  }
}

TEST(Plan, RowsRefuseDevicesThatAreNotTheirs) {
  const auto list = host::forward_rows();
  for (int i = 0; i < list.count; ++i) {
    const host::ForwardRow& row = list.rows[i];
    SCOPED_TRACE(row.info.name);
    const ForwardProblem problem = problem_for(row.info);
    const DeviceProps stranger = on_gpu(row.info) ? cpu_device() : h100();
    EXPECT_EQ(row.accept(row.info, problem, stranger).code(), StatusCode::unsupported);
    if (row.info.backend == Backend::hopper) {
      EXPECT_EQ(row.accept(row.info, problem, a100()).code(), StatusCode::unsupported);
    }
  }
}

TEST(Plan, CpuTensorsTakeTheCpuRow) {
  ForwardPlan plan;
  const Status status = plan_forward(forward_problem(), cpu_device(), {}, &plan);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_STREQ(plan.kernel->name, "cpu_forward_bf16");
  EXPECT_EQ(plan.device.threads, 2);
}

TEST(Plan, TheReferenceMustBeAskedFor) {
  PlanOptions options;
  options.backend = Backend::reference;
  ForwardPlan plan;
  ASSERT_TRUE(plan_forward(forward_problem(), cpu_device(), options, &plan).ok());
  EXPECT_STREQ(plan.kernel->name, "reference_forward_bf16");
  for (const Verdict& verdict : explain(forward_problem(), cpu_device())) {
    if (verdict.kernel->backend == Backend::reference) {
      EXPECT_FALSE(verdict.reason.ok());
      EXPECT_STREQ(verdict.reason.message(),
                   "the reference is only taken when options.backend asks for it");
    }
  }
}

TEST(Plan, HoldsTheCanonicalProblem) {
  ForwardProblem problem = forward_problem();
  problem.window_left = 5000;
  ForwardPlan plan;
  ASSERT_TRUE(plan_forward(problem, cpu_device(), {}, &plan).ok());
  EXPECT_EQ(plan.problem.window_left, kUnbounded);
  EXPECT_EQ(plan.problem.total_q, 2048);
}

TEST(Plan, NullPlan) {
  EXPECT_STREQ(plan_forward(forward_problem(), cpu_device(), {}, nullptr).message(),
               "plan is null");
}

TEST(Plan, EmptyProblemsNeedNoWorkspaceAndNoBlocks) {
  ForwardProblem problem = forward_problem();
  problem.seqlen_q = 0;
  set_contiguous(&problem);
  ForwardPlan plan;
  ASSERT_TRUE(plan_forward(problem, cpu_device(), {}, &plan).ok());
  EXPECT_EQ(plan.blocks, 0);
  EXPECT_EQ(plan.workspace.bytes, 0u);
  problem = forward_problem();
  problem.batch = 0;
  BackwardPlan backward;
  ASSERT_TRUE(plan_backward(backward_problem(problem), cpu_device(), {}, &backward).ok());
  EXPECT_EQ(backward.blocks, 0);
}

TEST(Refusal, NamesEveryFamily) {
  ForwardProblem problem = forward_problem();
  problem.head_dim = problem.head_dim_v = 512;
  set_contiguous(&problem);
  ForwardPlan plan;
  const Status status = plan_forward(problem, h100(), {}, &plan);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  const std::string message = status.message();
  EXPECT_EQ(message.rfind("no forward kernel serves this problem. hopper: ", 0), 0u) << message;
  EXPECT_TRUE(contains(message, " cpu: ")) << message;
  EXPECT_FALSE(contains(message, "reference: ")) << message;
  EXPECT_EQ(plan.kernel, nullptr);
}

TEST(Refusal, OfAForcedBackendNamesOnlyIt) {
  PlanOptions options;
  options.backend = Backend::cpu;
  ForwardPlan plan;
  const Status status = plan_forward(forward_problem(), h100(), options, &plan);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_EQ(std::string(status.message()).rfind("no forward kernel serves this problem. cpu: ", 0),
            0u)
      << status.message();
}

TEST(Explain, ChoosesWhatPlanChooses) {
  for (const DeviceProps& device : {cpu_device(), h100(), a100()}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
      for (const std::int64_t dim : {16, 64, 80, 128, 512}) {
        ForwardProblem problem = forward_problem();
        problem.dtype = dtype;
        problem.head_dim = problem.head_dim_v = dim;
        set_contiguous(&problem);
        ForwardPlan plan;
        const Status status = plan_forward(problem, device, {}, &plan);
        EXPECT_EQ(chosen(explain(problem, device)), plan.kernel)
            << dtype_name(dtype) << " d" << dim << " on " << device.name;
        EXPECT_EQ(status.ok(), plan.kernel != nullptr);
      }
    }
  }
}

TEST(Explain, EveryRefusedRowHasAReason) {
  int refused = 0;
  for (const Verdict& verdict : explain(forward_problem(), cpu_device())) {
    if (!verdict.reason.ok()) {
      ++refused;
      EXPECT_GT(std::string(verdict.reason.message()).size(), 10u) << verdict.kernel->name;
    }
  }
  EXPECT_GE(refused, 5);
}

TEST(Explain, RespectsCapacity) {
  Verdict one;
  const int rows = explain_forward(forward_problem(), cpu_device(), {}, &one, 1);
  EXPECT_EQ(rows, host::forward_rows().count);
  EXPECT_NE(one.kernel, nullptr);
  EXPECT_EQ(explain_backward(backward_problem(), cpu_device(), {}, nullptr, 0),
            host::backward_rows().count);
}

TEST(Explain, TheClosestRowOfABackendGivesTheReasonOfTheRefusal) {
  ForwardProblem problem = forward_problem();
  problem.head_dim = problem.head_dim_v = 512;
  set_contiguous(&problem);
  ForwardPlan plan;
  const Status refused = plan_forward(problem, h100(), {}, &plan);
  std::vector<Backend> backends;
  for (const Verdict& verdict : explain(problem, h100())) {
    if (verdict.closest) {
      backends.push_back(verdict.kernel->backend);
      const std::string part =
          std::string(backend_name(verdict.kernel->backend)) + ": " + verdict.reason.message();
      EXPECT_EQ(contains(refused.message(), part), verdict.kernel->backend != Backend::reference)
          << part;
    }
  }
  EXPECT_EQ(backends.size(), 4u);  // one row of each backend
  std::sort(backends.begin(), backends.end());
  EXPECT_EQ(std::unique(backends.begin(), backends.end()), backends.end());
}

TEST(Explain, InvalidProblemsGiveOneReasonEverywhere) {
  ForwardProblem problem = forward_problem();
  problem.head_dim = 0;
  for (const Verdict& verdict : explain(problem, cpu_device())) {
    EXPECT_STREQ(verdict.reason.message(), "head_dim is 0; it must be from 1 to 512");
    EXPECT_FALSE(verdict.chosen);
  }
}

// Sizes past 16 and 32 bits: planned, or refused by name. Grids have 65535 blocks along y and z.
TEST(LargeShapes, ArePlannedOrRefusedByName) {
  std::vector<ForwardProblem> problems;
  ForwardProblem many = forward_problem();
  many.batch = 20000;
  many.seqlen_q = many.seqlen_k = 16;
  set_contiguous(&many);
  problems.push_back(many);
  ForwardProblem far = forward_problem();
  far.q.batch = far.k.batch = far.v.batch = far.o.batch = std::int64_t{1} << 33;
  problems.push_back(far);
  ForwardProblem longest = forward_problem();
  longest.batch = 1;
  longest.seqlen_q = longest.seqlen_k = (1 << 29) - 1;
  set_contiguous(&longest);
  problems.push_back(longest);
  for (ForwardProblem problem : problems) {
    for (const DeviceProps& device : {cpu_device(), h100()}) {
      const auto list = host::forward_rows();
      int served = 0;
      for (int i = 0; i < list.count; ++i) {
        const host::ForwardRow& row = list.rows[i];
        ForwardPlan plan;
        plan.problem = problem;
        plan.device = device;
        plan.kernel = &row.info;
        const Status status = row.accept(row.info, problem, device);
        if (status.ok()) {
          row.configure(&plan);
          EXPECT_GT(plan.blocks, 0) << row.info.name;
          ++served;
        } else {
          EXPECT_GT(std::string(status.message()).size(), 10u) << row.info.name;
        }
      }
      EXPECT_GT(served, 0) << device.name << " batch " << problem.batch;
    }
  }
}

}  // namespace
}  // namespace pantile::testing
