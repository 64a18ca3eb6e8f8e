// Kernels that a build may leave out (cmake/build_options.cmake): refused by name, never chosen
// automatically, and served when they are built.
#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "ampere/forward/softmax_choice.h"
#include "ampere/plan.h"
#include "build_options.h"
#include "host/kernel_table.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// Ok, or why the row of the family that is most like the problem refuses it. Without CUDA, that
// there is none.
template <class Problem>
std::string closest_reason(const Problem& problem, const DeviceProps& device, Backend family) {
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int room = static_cast<int>(verdicts.size());
  int count = 0;
  if constexpr (std::is_same_v<Problem, BackwardProblem>) {
    count = explain_backward(problem, device, {}, verdicts.data(), room);
  } else {
    count = explain_forward(problem, device, {}, verdicts.data(), room);
  }
  for (int i = 0; i < count; ++i) {
    if (verdicts[i].closest && verdicts[i].kernel->backend == family) {
      return verdicts[i].reason.message();
    }
  }
  ADD_FAILURE() << "no row of this family";
  return "";
}

// Refused for the option's sake exactly where the option is off.
void expect_refusal(const std::string& reason, const std::string& what, const char* option,
                    bool built) {
  const std::string because = "kernel not built for " + what + "; configure with " + option + "=ON";
  EXPECT_EQ(reason.find(because) != std::string::npos, !built) << reason;
}

TEST(BuildOptions, TrialsOfTheSoftmax) {
  struct Trial {
    int quarters;
    SoftmaxMode mode;
    const char* name;
  };
  const Trial trials[] = {{1, SoftmaxMode::exact, "tensor_share = 0.25 with softmax_mode = exact"},
                          {2, SoftmaxMode::exact, "tensor_share = 0.5 with softmax_mode = exact"},
                          {4, SoftmaxMode::exact, "tensor_share = 1 with softmax_mode = exact"},
                          {kAutomaticShare, SoftmaxMode::surrogate,
                           "tensor_share = 0.25 with softmax_mode = surrogate"},
                          {kAutomaticShare, SoftmaxMode::fast_scale,
                           "tensor_share = 0 with softmax_mode = fast_scale"}};
  for (const Trial& trial : trials) {
    ForwardProblem p = forward_problem();
    p.softmax.unit = SoftmaxUnit::tensor;
    p.softmax.tensor_quarters = trial.quarters;
    p.softmax.mode = trial.mode;
    const std::string reason = closest_reason(p, a100(), Backend::ampere);
    expect_refusal(reason, trial.name, "PANTILE_EXPERIMENTS", kExperiments);
  }
  ForwardProblem p = forward_problem();
  p.softmax.unit = SoftmaxUnit::tensor;
  EXPECT_EQ(closest_reason(p, a100(), Backend::ampere).find("not built"), std::string::npos);
}

TEST(BuildOptions, AutomaticTakesNoTrial) {
  int rows = 0;
  for (int i = 0; i < kernel_count(); ++i) {
    const KernelInfo& row = kernel_info(i);
    if (row.backend != Backend::ampere || row.pass != Pass::forward) {
      continue;
    }
    ++rows;
    for (const bool exact_lse : {false, true}) {
      ForwardProblem p = forward_problem();
      p.softmax.exact_lse = exact_lse;
      EXPECT_FALSE(
          ampere::is_trial(ampere::forward_softmax(ampere::complete_softmax(row, p, a100()))))
          << row.name;
    }
  }
  EXPECT_GT(rows, 0);
}

// Tiles for 227 KB are compiled where a GPU that has so much runs them; elsewhere those for 163 KB
// take their place, in the plan too.
TEST(BuildOptions, LargeTilesOfAmpere) {
  using ampere::SharedClass;
  EXPECT_TRUE(kAmpereLargeTiles || !kAmpereOnHopper);
  EXPECT_EQ(ampere::compiled_class(101376), SharedClass::small);
  EXPECT_EQ(ampere::compiled_class(166912), SharedClass::medium);
  EXPECT_EQ(ampere::compiled_class(232448),
            kAmpereLargeTiles ? SharedClass::large : SharedClass::medium);
  const KernelInfo row{"row", Backend::ampere, Pass::forward, DType::bf16, 128,
                       128,   MaskKind::full,  true};
  ForwardPlan plan;
  plan.problem = forward_problem();
  plan.problem.head_dim = plan.problem.head_dim_v = 128;
  plan.device = h100();
  plan.device.compute_major = 10;
  plan.kernel = &row;
  ampere::configure_forward(&plan);
  EXPECT_EQ(plan.tile_k, kAmpereLargeTiles ? 64 : 32);
}

TEST(BuildOptions, TrialOfTheFp8Exponential) {
  ForwardProblem p = forward_problem();
  p.dtype = DType::e4m3;
  for (const Fp8Exp exp : {Fp8Exp::code, Fp8Exp::mixed, Fp8Exp::exp2}) {
    p.fp8.exp = exp;
    expect_refusal(closest_reason(p, h100(), Backend::hopper), "fp8_exp = mixed",
                   "PANTILE_EXPERIMENTS", exp != Fp8Exp::mixed || kExperiments);
  }
}

TEST(BuildOptions, HopperGpusTakeTheFp32RowsOfAmpere) {
  DeviceProps orin = a100();
  orin.compute_minor = 7;
  DeviceProps later = h100();
  later.compute_major = 10;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    ForwardProblem p = forward_problem();
    p.dtype = dtype;
    const BackwardProblem backward = backward_problem(p);
    const bool built = dtype == DType::f32 || kAmpereOnHopper;
    for (const DeviceProps& device : {a100(), orin, h100(), later}) {
      const bool served = device.compute_major != 9 || built;
      for (const std::string& reason : {closest_reason(p, device, Backend::ampere),
                                        closest_reason(backward, device, Backend::ampere)}) {
        expect_refusal(reason, "compute capability 9.0 of device 0", "PANTILE_AMPERE_ON_HOPPER",
                       served);
      }
    }
  }
}

// What the rows refuse for another reason is not put down to the build: Python then copies tensors
// until a row serves, which no copy does for a kernel that is not there.
TEST(BuildOptions, OtherReasonsComeFirst) {
  ForwardProblem p = forward_problem();
  p.q.base_align_bytes = 2;
  const std::string reason = closest_reason(p, h100(), Backend::ampere);
  EXPECT_NE(reason.find("needs q aligned to 16 bytes"), std::string::npos) << reason;
}

// Copies help where a hopper row wants them, although an ampere row would want none.
TEST(BuildOptions, WhatIsNotBuiltIsUnsupported) {
  BackwardProblem p = backward_problem();
  p.grad_o.head = 0;  // expanded
  p.grad_o.seq = p.forward.head_dim_v;
  ForwardProblem trial = forward_problem();
  trial.softmax.unit = SoftmaxUnit::tensor;
  trial.softmax.tensor_quarters = 1;
  BackwardPlan plan;
  ForwardPlan forward_plan;
  if (!kAmpereOnHopper) {
    EXPECT_EQ(plan_backward(p, h100(), {}, &plan).code(), StatusCode::unsupported);
  }
  if (!kExperiments) {
    EXPECT_EQ(plan_forward(trial, a100(), {}, &forward_plan).code(), StatusCode::unsupported);
  }
}

}  // namespace
}  // namespace pantile::testing
