// FP8 problems: what is refused and in which words, sizes of operands, plans.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ampere/fp8/config.h"
#include "build_options.h"
#include "host/kernel_table.h"
#include "host/shape.h"
#include "pantile/quantize.h"
#include "problems.h"

namespace pantile::testing {
namespace {

QuantizeProblem quantize_problem(const ForwardProblem& inputs = forward_problem()) {
  QuantizeProblem p;
  p.forward = inputs;
  p.forward.dtype = DType::e4m3;
  p.dtype = inputs.dtype;
  p.q = inputs.q;
  p.k = inputs.k;
  p.v = inputs.v;
  return p;
}

ForwardProblem fp8_problem() {
  ForwardProblem p = forward_problem();
  p.dtype = DType::e4m3;
  return p;
}

std::string refusal(const QuantizeProblem& problem) {
  QuantizePlan plan;
  return plan_quantize(problem, cpu_device(), {}, &plan).message();
}

std::string refusal(const ForwardProblem& problem) {
  ForwardPlan plan;
  return plan_forward(problem, cpu_device(), {}, &plan).message();
}

template <class Problem>
std::string refusal_after(Problem problem, const std::function<void(Problem*)>& change) {
  change(&problem);
  return refusal(problem);
}

TEST(Fp8Forward, WrongFieldsAreNamed) {
  const auto after = [](const std::function<void(ForwardProblem*)>& change) {
    return refusal_after(fp8_problem(), change);
  };
  EXPECT_EQ(after([](ForwardProblem*) {}), "");
  EXPECT_EQ(after([](ForwardProblem* p) { p->fp8.output = DType::f32; }),
            "fp8.output is f32 (0); it must be bf16 (2) or f16 (1)");
  EXPECT_EQ(after([](ForwardProblem* p) { p->fp8.exp = static_cast<Fp8Exp>(7); }),
            "fp8.exp is 7; it must be code (0), mixed (1) or exp2 (2)");
  EXPECT_EQ(after([](ForwardProblem* p) { p->fp8.block_q = 2; }),
            "fp8.block_q is 2; it must be 1, 64 or 128");
  EXPECT_EQ(after([](ForwardProblem* p) { p->fp8.block_k = 1; }),
            "fp8.block_k is 1; it must be 64 or 128");
  EXPECT_EQ(after([](ForwardProblem* p) { p->scale = -0.5f; }),
            "scale is -0.5; with FP8 operands it must be 0 or more");
}

TEST(Fp8Forward, OtherDtypesIgnoreTheFormat) {
  ForwardProblem p = forward_problem();
  p.fp8.block_k = 7;
  EXPECT_EQ(refusal(p), "");
  EXPECT_EQ(host::canonical(p).fp8.block_k, 128);
}

TEST(Fp8Forward, LayoutsOfOperandsAreNotRead) {
  ForwardProblem p = fp8_problem();
  p.q.seq = p.k.head = p.v.batch = -1;
  EXPECT_EQ(refusal(p), "");
  EXPECT_EQ(host::canonical(p).q.seq, 0);
  p.o.head = -1;
  EXPECT_EQ(refusal(p), "o: stride along head is -1; it must be 0 or more");
}

TEST(Fp8Forward, PointersAreThereExactlyWhenWanted) {
  ForwardPlan plan;
  ASSERT_TRUE(plan_forward(fp8_problem(), cpu_device(), {}, &plan).ok());
  alignas(256) static char memory[256];
  float* floats = reinterpret_cast<float*>(memory);
  ForwardTensors t;
  t.q = t.k = t.v = memory;
  t.o = memory;
  t.lse = floats;
  const auto message = [&] {
    return std::string(run_forward(plan, t, nullptr, nullptr).message());
  };
  EXPECT_EQ(message(), "fp8.scale_q is null; it must point to the tensor");
  t.fp8.scale_q = floats;
  EXPECT_EQ(message(), "fp8.scale_kv is null; it must point to the tensor");
  t.fp8.scale_kv = floats;
  EXPECT_EQ(message(), "fp8.nonfinite_v is null; it must point to the tensor");
  t.fp8.nonfinite_v = reinterpret_cast<const std::uint32_t*>(memory);
  t.fp8.q_dot_mean = floats;
  EXPECT_EQ(message(), "fp8.q_dot_mean is set; it must be null because fp8.smooth_k is false");
}

TEST(Quantize, WrongFieldsAreNamed) {
  const auto after = [](const std::function<void(QuantizeProblem*)>& change) {
    return refusal_after(quantize_problem(), change);
  };
  EXPECT_EQ(after([](QuantizeProblem*) {}), "");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->forward.dtype = DType::bf16; }),
            "forward.dtype is bf16 (2); it must be e4m3 (3)");
  EXPECT_EQ(
      after([](QuantizeProblem* p) { p->forward.heads_q = 3; }),
      "heads_q is 3 and heads_k is 2; heads_q must be a positive multiple of heads_k, or both "
      "0");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->dtype = static_cast<DType>(9); }),
            "dtype is 9; it must be f32 (0), f16 (1), bf16 (2) or e4m3 (3)");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->dtype = DType::e4m3; }),
            "hadamard is true; it must be false for inputs of dtype e4m3");
  EXPECT_EQ(after([](QuantizeProblem* p) {
              p->dtype = DType::e4m3;
              p->hadamard = false;
              p->forward.fp8.smooth_k = true;
            }),
            "forward.fp8.smooth_k is true; it must be false for inputs of dtype e4m3");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->v.seq = -2; }),
            "v: stride along seq is -2; it must be 0 or more");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->keep_rotation = true; }),
            "keep_rotation is true; it must be false without dequantize");
  EXPECT_EQ(after([](QuantizeProblem* p) {
              p->dtype = DType::e4m3;
              p->hadamard = false;
              p->dequantize = true;
            }),
            "dtype is e4m3; with dequantize it must be f32, f16 or bf16");
  EXPECT_EQ(after([](QuantizeProblem* p) { p->dequantize = p->keep_rotation = true; }), "");
}

TEST(Quantize, DequantizeWritesItsOwnTensors) {
  QuantizeProblem p = quantize_problem();
  p.dequantize = true;
  QuantizePlan plan;
  ASSERT_TRUE(plan_quantize(p, cpu_device(), {}, &plan).ok());
  alignas(256) static char memory[256];
  QuantizeTensors t;
  t.q = t.k = t.v = memory;
  EXPECT_STREQ(run_quantize(plan, t, memory, nullptr).message(),
               "restored_q is null; it must point to the tensor");
  t.restored_q = t.restored_k = t.restored_v = memory;
  t.codes_q = t.codes_k = t.codes_v = memory;
  EXPECT_STREQ(run_quantize(plan, t, memory, nullptr).message(),
               "scale_q is null; it must point to the tensor");
}

TEST(Quantize, IgnoresTheMaskOfTheAttention) {
  QuantizeProblem p = quantize_problem();
  p.forward.window_left = -7;
  p.forward.scale = -1.0f;
  p.forward.o = Layout{-1, -1, -1, 16};
  EXPECT_EQ(refusal(p), "");
}

TEST(Quantize, DescalesComeWithCodes) {
  QuantizePlan plan;
  ASSERT_TRUE(plan_quantize(quantize_problem(), cpu_device(), {}, &plan).ok());
  alignas(256) static char memory[256];
  QuantizeTensors t;
  t.q = t.k = t.v = memory;
  t.descale_q = reinterpret_cast<const float*>(memory);
  EXPECT_STREQ(run_quantize(plan, t, memory, nullptr).message(),
               "descale_q is set; it must be null because dtype == e4m3 is false");
}

TEST(Quantize, SizesOfDenseOperands) {
  ForwardProblem p = fp8_problem();  // batch 2, heads 8 and 2, 1024 rows and keys
  p.seqlen_q = 100;
  p.seqlen_k = 129;
  p.head_dim = 72;
  p.head_dim_v = 40;
  p.fp8.block_q = 1;
  p.fp8.block_k = 64;
  p.fp8.smooth_k = true;
  const QuantizedSizes s = quantized_sizes(p);
  EXPECT_EQ(s.blocks_q, 2);
  EXPECT_EQ(s.blocks_k, 4);
  EXPECT_EQ(s.codes_q, 8 * 2 * 128 * 80);  // rows of 72 channels take 80 bytes
  EXPECT_EQ(s.codes_k, 2 * 4 * 128 * 80);
  EXPECT_EQ(s.codes_v, 2 * 4 * 40 * 128);
  EXPECT_EQ(s.scale_q, 8 * 2 * 128);
  EXPECT_EQ(s.scale_kv, 2 * 4 * 2 * 2);
  EXPECT_EQ(s.nonfinite_v, 2 * 4 * 40 * 4);
  EXPECT_EQ(s.q_dot_mean, 8 * 2 * 128);
  EXPECT_EQ(s.mean_k, 2 * 2 * 72);
  p.fp8.smooth_k = false;
  EXPECT_EQ(quantized_sizes(p).q_dot_mean, 0);
  EXPECT_EQ(quantized_sizes(p).mean_k, 0);
}

TEST(Fp8Backward, RunsOnTheCpuWithBlocksOf128) {
  BackwardPlan plan;
  const BackwardProblem problem = backward_problem(fp8_problem());
  ASSERT_TRUE(plan_backward(problem, cpu_device(), {}, &plan).ok());
  EXPECT_STREQ(plan.kernel->name, "cpu_backward_e4m3");
  EXPECT_EQ(plan.tile_q, 64);
  EXPECT_EQ(plan.tile_k, 128);
  EXPECT_GT(plan.workspace.bytes, 0u);
  BackwardProblem other = problem;
  other.forward.fp8.block_q = 64;
  EXPECT_STREQ(plan_backward(other, cpu_device(), {}, &plan).message(),
               "forward.fp8.block_q is 64; it must be 128 in a backward problem");
  other = problem;
  other.forward.fp8.block_k = 64;
  EXPECT_STREQ(plan_backward(other, cpu_device(), {}, &plan).message(),
               "forward.fp8.block_k is 64; it must be 128 in a backward problem");
}

TEST(Fp8Backward, VariantsAreRefusedByName) {
  BackwardPlan plan;
  BackwardProblem problem = backward_problem(fp8_problem());
  problem.forward.variant.softcap = 20.0f;
  const Status status = plan_backward(problem, cpu_device(), {}, &plan);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(std::string(status.message()).find("cpu: does not serve softcap"), std::string::npos)
      << status.message();
}

TEST(Quantize, SizesOfPackedOperandsHoldAnyLengths) {
  ForwardProblem p = packed_problem();  // 2048 rows of two sequences
  p.dtype = DType::e4m3;
  EXPECT_EQ(quantized_sizes(p).blocks_q, 2048 / 128 + 2);
  p.total_k = 2047;
  EXPECT_EQ(quantized_sizes(p).blocks_k, 15 + 2);
}

TEST(Quantize, HeadDimsAbove256AreRefused) {
  QuantizeProblem p = quantize_problem();
  p.forward.head_dim = 257;
  set_contiguous(&p.forward);
  p.q = p.forward.q;
  p.k = p.forward.k;
  EXPECT_NE(refusal(p).find("serves head dims up to 256 and 256, they are 257 and 128"),
            std::string::npos)
      << refusal(p);
}

// ---- GPUs other than Hopper

DeviceProps gpu_of(int major, int minor, int smem_kib) {
  return gpu_device("invented", major, minor, 100, smem_kib << 10, 64 << 20);
}

// Every row of the Ampere family that quantises or attends to codes: what it says of a problem that
// it serves on a GPU of its own.
std::vector<std::string> verdicts_on(const DeviceProps& device, Fp8Exp exp = Fp8Exp::code) {
  std::vector<std::string> reasons;
  const auto forwards = host::forward_rows();
  for (int i = 0; i < forwards.count; ++i) {
    const KernelInfo& row = forwards.rows[i].info;
    if (row.backend == Backend::ampere && row.dtype == DType::e4m3) {
      ForwardProblem p = fp8_problem();
      p.fp8.exp = exp;
      p.head_dim = p.head_dim_v = row.head_dim;
      set_contiguous(&p);
      reasons.emplace_back(forwards.rows[i].accept(row, p, device).message());
    }
  }
  const auto quantisers = host::quantize_rows();
  for (int i = 0; i < quantisers.count; ++i) {
    const KernelInfo& row = quantisers.rows[i].info;
    if (row.backend == Backend::ampere) {
      QuantizeProblem p = quantize_problem();
      p.dtype = row.dtype;
      p.hadamard = row.dtype != DType::e4m3;
      reasons.emplace_back(quantisers.rows[i].accept(row, p, device).message());
    }
  }
  return reasons;
}

TEST(Fp8OnAmpereFamily, NeedsComputeCapability89) {
  for (const DeviceProps& device : {a100(), gpu_of(8, 6, 99), gpu_of(8, 7, 163)}) {
    const std::string has = "device 0 has 8." + std::to_string(device.compute_minor);
    for (const std::string& reason : verdicts_on(device)) {
      EXPECT_EQ(reason, "FP8 needs compute capability 8.9 or later, " + has);
    }
  }
  for (const DeviceProps& device :
       {l40s(), gpu_of(10, 0, 227), gpu_of(10, 3, 227), gpu_of(12, 0, 99), gpu_of(12, 1, 99)}) {
    const std::vector<std::string> reasons = verdicts_on(device);
    EXPECT_FALSE(reasons.empty());
    for (const std::string& reason : reasons) {
      EXPECT_EQ(reason, "");
    }
  }
}

TEST(Fp8OnAmpereFamily, IsBuiltForHopperByAnOptionOnly) {
  for (const std::string& reason : verdicts_on(h100())) {
    EXPECT_EQ(reason.empty(), kAmpereOnHopper) << reason;
    EXPECT_EQ(reason.find("configure with PANTILE_AMPERE_ON_HOPPER=ON") != std::string::npos,
              !kAmpereOnHopper)
        << reason;
  }
}

TEST(Fp8OnAmpereFamily, HasTwoOfTheExponentials) {
  int refused = 0;
  for (const std::string& reason : verdicts_on(l40s(), Fp8Exp::mixed)) {
    refused += reason == "has fp8_exp code and exp2, it is mixed" ? 1 : 0;
  }
  EXPECT_GT(refused, 0);
  for (const std::string& reason : verdicts_on(l40s(), Fp8Exp::exp2)) {
    EXPECT_EQ(reason, "");
  }
}

TEST(Fp8OnAmpereFamily, TilesFitTheSmallestSharedMemory) {
  const auto rows = host::forward_rows();
  int tiles = 0;
  for (int i = 0; i < rows.count; ++i) {
    const KernelInfo& row = rows.rows[i].info;
    if (row.backend != Backend::ampere || row.dtype != DType::e4m3) {
      continue;
    }
    ++tiles;
    const ampere::Fp8Tile tile = ampere::fp8_tile(row.head_dim);
    EXPECT_EQ(tile.head_dim, row.head_dim);
    EXPECT_LE(tile.shared_bytes(), l40s().smem_optin_bytes) << row.name;
    ForwardPlan plan;
    plan.problem = fp8_problem();
    plan.device = l40s();
    plan.kernel = &row;
    rows.rows[i].configure(&plan);
    EXPECT_EQ(plan.tile_q, tile.tile_q);
    EXPECT_EQ(plan.tile_k, 64);
    EXPECT_EQ(plan.blocks, 2 * 8 * 1024 / tile.tile_q);
    EXPECT_EQ(plan.workspace.bytes, 0u);
  }
  EXPECT_GT(tiles, 0);
}

// Asked in code; what the environment asks is only preferred (python).
TEST(Fp8OnAmpereFamily, HasOneSoftmax) {
  PlanOptions options;
  options.backend = Backend::ampere;
  for (const SoftmaxUnit unit : {SoftmaxUnit::vector, SoftmaxUnit::tensor}) {
    ForwardProblem p = fp8_problem();
    p.softmax.unit = unit;
    ForwardPlan plan;
    const std::string message = plan_forward(p, l40s(), options, &plan).message();
    EXPECT_NE(message.find(unit == SoftmaxUnit::vector
                               ? "takes row sums from the product with V, softmax is vector"
                               : "has no softmax on tensor cores, softmax is tensor"),
              std::string::npos)
        << message;
  }
}

TEST(Fp8OnAmpereFamily, HasNoBackwardOfItsOwn) {
  PlanOptions options;
  options.backend = Backend::ampere;
  BackwardPlan plan;
  EXPECT_EQ(plan_backward(backward_problem(fp8_problem()), l40s(), options, &plan).code(),
            StatusCode::unsupported);
}

TEST(Quantize, ExplainsEveryRow) {
  Verdict verdicts[64];
  const int rows = explain_quantize(quantize_problem(), cpu_device(), {}, verdicts, 64);
  int chosen = 0;
  for (int i = 0; i < rows; ++i) {
    EXPECT_EQ(verdicts[i].kernel->pass, Pass::quantize);
    if (verdicts[i].chosen) {
      ++chosen;
      EXPECT_STREQ(verdicts[i].kernel->name, "cpu_quantize_bf16");
    }
  }
  EXPECT_EQ(chosen, 1);
}

TEST(Quantize, NamesOfExponentials) {
  EXPECT_STREQ(fp8_exp_name(Fp8Exp::code), "code");
  EXPECT_STREQ(fp8_exp_name(Fp8Exp::mixed), "mixed");
  EXPECT_STREQ(fp8_exp_name(Fp8Exp::exp2), "exp2");
}

}  // namespace
}  // namespace pantile::testing
