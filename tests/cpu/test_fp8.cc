// FP8 through the C++ API: quantise, attend, on every instruction set, against exact arithmetic on
// the same operands. The format itself is tested bit for bit in tests/python/test_fp8.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "case.h"
#include "pantile/quantize.h"

namespace pantile::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Operands {
  std::vector<std::uint8_t> codes_q, codes_k, codes_v;
  std::vector<float> scale_q, scale_kv, q_dot_mean, mean_k;
  std::vector<std::uint32_t> nonfinite_v;
};

struct Fp8Shape {
  int batch = 1, heads = 2, heads_k = 1, rows = 200, keys = 300, dim = 64, dim_v = 64;
  std::int64_t right = kUnbounded;
  Fp8Format format;
};

// Memory that the plan asks for, aligned.
struct Scratch {
  explicit Scratch(const Workspace& workspace) : bytes(workspace.bytes + 256) {}
  void* get() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    return bytes.data() + (256 - address % 256) % 256;
  }
  std::vector<char> bytes;
};

class Fp8Case {
 public:
  explicit Fp8Case(const Fp8Shape& s) : shape(s) {
    problem_.dtype = DType::e4m3;
    problem_.batch = s.batch;
    problem_.heads_q = s.heads;
    problem_.heads_k = s.heads_k;
    problem_.seqlen_q = s.rows;
    problem_.seqlen_k = s.keys;
    problem_.head_dim = s.dim;
    problem_.head_dim_v = s.dim_v;
    problem_.window_right = s.right;
    problem_.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    problem_.fp8 = s.format;
    problem_.o = layout(s.rows, s.heads, s.dim_v);
    q = draw(s.rows * s.heads * s.dim, 1);
    k = draw(s.keys * s.heads_k * s.dim, 2);
    v = draw(s.keys * s.heads_k * s.dim_v, 3);
  }

  Operands quantized(int threads) {
    QuantizeProblem problem;
    problem.forward = problem_;
    problem.dtype = DType::f32;
    problem.q = layout(shape.rows, shape.heads, shape.dim);
    problem.k = layout(shape.keys, shape.heads_k, shape.dim);
    problem.v = layout(shape.keys, shape.heads_k, shape.dim_v);
    const QuantizedSizes sizes = quantized_sizes(problem_);
    Operands out;
    out.codes_q.resize(static_cast<std::size_t>(sizes.codes_q));
    out.codes_k.resize(static_cast<std::size_t>(sizes.codes_k));
    out.codes_v.resize(static_cast<std::size_t>(sizes.codes_v));
    out.scale_q.resize(static_cast<std::size_t>(sizes.scale_q));
    out.scale_kv.resize(static_cast<std::size_t>(sizes.scale_kv));
    out.nonfinite_v.resize(static_cast<std::size_t>(sizes.nonfinite_v));
    out.q_dot_mean.resize(static_cast<std::size_t>(sizes.q_dot_mean));
    out.mean_k.resize(static_cast<std::size_t>(sizes.mean_k));
    QuantizeTensors t;
    t.q = q.data();
    t.k = k.data();
    t.v = v.data();
    t.codes_q = out.codes_q.data();
    t.codes_k = out.codes_k.data();
    t.codes_v = out.codes_v.data();
    t.scale_q = out.scale_q.data();
    t.scale_kv = out.scale_kv.data();
    t.nonfinite_v = out.nonfinite_v.data();
    t.q_dot_mean = sizes.q_dot_mean == 0 ? nullptr : out.q_dot_mean.data();
    t.mean_k = sizes.mean_k == 0 ? nullptr : out.mean_k.data();
    QuantizePlan plan;
    Status status = plan_quantize(problem, device(CpuIsa::baseline, threads), {}, &plan);
    EXPECT_TRUE(status.ok()) << status.message();
    Scratch scratch(plan.workspace);
    status = run_quantize(plan, t, scratch.get(), nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  // O, then LSE, of one backend.
  std::vector<double> attend(const Operands& from, const Target& target, Fp8Exp exp) {
    ForwardProblem problem = problem_;
    problem.fp8.exp = exp;
    Buffer o(DType::bf16, std::int64_t{shape.batch} * shape.rows * shape.heads * shape.dim_v);
    std::vector<float> lse(static_cast<std::size_t>(shape.batch * shape.heads * shape.rows), kNaN);
    o.fill(static_cast<double>(kNaN));
    ForwardTensors t;
    t.q = from.codes_q.data();
    t.k = from.codes_k.data();
    t.v = from.codes_v.data();
    t.o = o.data();
    t.lse = lse.data();
    t.fp8.scale_q = from.scale_q.data();
    t.fp8.scale_kv = from.scale_kv.data();
    t.fp8.nonfinite_v = from.nonfinite_v.data();
    t.fp8.q_dot_mean = from.q_dot_mean.empty() ? nullptr : from.q_dot_mean.data();
    PlanOptions options;
    options.backend = target.backend;
    ForwardPlan plan;
    Status status = plan_forward(problem, device(target.isa, target.threads), options, &plan);
    EXPECT_TRUE(status.ok()) << status.message();
    Scratch scratch(plan.workspace);
    status = run_forward(plan, t, scratch.get(), nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    std::vector<double> found;
    for (std::int64_t i = 0; i < o.size(); ++i) {
      found.push_back(o.get(i));
    }
    found.insert(found.end(), lse.begin(), lse.end());
    return found;
  }

  Fp8Shape shape;
  std::vector<float> q, k, v;

 private:
  static Layout layout(int rows, int heads, int dim) {
    return Layout{std::int64_t{rows} * heads * dim, std::int64_t{heads} * dim, dim, 4};
  }
  static DeviceProps device(CpuIsa isa, int threads) {
    DeviceProps props;
    EXPECT_TRUE(query_device({}, &props).ok());
    props.isa = isa;
    props.threads = threads;
    return props;
  }
  std::vector<float> draw(int count, unsigned seed) const {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(count * shape.batch));
    for (float& element : x) {
      element = normal(generator);
    }
    return x;
  }

  ForwardProblem problem_;
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> difference;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) || std::isfinite(b[i])) {  // LSE of rows without keys: -inf in both
      difference.push_back(a[i] - b[i]);
    }
  }
  return rms(difference) / rms(b);
}

Fp8Shape causal_shape() {
  Fp8Shape shape;
  shape.batch = 2;
  shape.right = 0;
  shape.format.smooth_k = true;
  return shape;
}

TEST(Fp8, EveryInstructionSetIsNearExactArithmetic) {
  Fp8Case full({});
  Fp8Case causal(causal_shape());
  for (Fp8Case* c : {&full, &causal}) {
    const Operands operands = c->quantized(1);
    const auto exact = c->attend(operands, Target{Backend::reference}, Fp8Exp::code);
    for (const CpuIsa isa : usable_isas()) {
      for (const Fp8Exp exp : {Fp8Exp::code, Fp8Exp::mixed, Fp8Exp::exp2}) {
        const auto found = c->attend(operands, Target{Backend::cpu, isa, 2}, exp);
        EXPECT_LT(distance(found, exact), 8e-3) << cpu_isa_name(isa) << " " << fp8_exp_name(exp);
        EXPECT_GT(distance(found, exact), 1e-5) << "P is not rounded";
      }
    }
  }
}

TEST(Fp8, BlocksOf64KeysAndScalesOfTokens) {
  Fp8Shape shape;
  shape.format.block_q = 1;
  shape.format.block_k = 64;
  shape.dim = 40;
  shape.dim_v = 72;
  Fp8Case c(shape);
  const Operands operands = c.quantized(2);
  const auto exact = c.attend(operands, Target{Backend::reference}, Fp8Exp::exp2);
  const auto found = c.attend(operands, Target{Backend::cpu}, Fp8Exp::exp2);
  EXPECT_LT(distance(found, exact), 5e-3);
}

TEST(Fp8, ThreadsChangeNoBit) {
  Fp8Case c(causal_shape());
  const Operands one = c.quantized(1);
  const Operands three = c.quantized(3);
  EXPECT_EQ(one.codes_q, three.codes_q);
  EXPECT_EQ(one.codes_k, three.codes_k);
  EXPECT_EQ(one.codes_v, three.codes_v);
  EXPECT_EQ(one.scale_kv, three.scale_kv);
  EXPECT_EQ(one.mean_k, three.mean_k);
  EXPECT_EQ(c.attend(one, Target{Backend::cpu, CpuIsa::baseline, 1}, Fp8Exp::code),
            c.attend(one, Target{Backend::cpu, CpuIsa::baseline, 3}, Fp8Exp::code));
}

TEST(Fp8, RowsWithoutKeysAreEmpty) {
  Fp8Shape shape = causal_shape();
  shape.keys = 60;  // the first 140 rows see none
  Fp8Case c(shape);
  const Operands operands = c.quantized(1);
  const auto found = c.attend(operands, Target{Backend::cpu}, Fp8Exp::code);
  const std::size_t elements = std::size_t{2} * 200 * 2 * 64;  // of O
  for (std::size_t i = 0; i < 140 * 2 * 64; ++i) {
    ASSERT_EQ(found[i], 0.0);
  }
  ASSERT_EQ(found.size(), elements + 2 * 2 * 200);
  EXPECT_TRUE(std::isinf(found[elements]) && found[elements] < 0.0);
  EXPECT_TRUE(std::isfinite(found[elements + 140]));
}

// A NaN of V reaches its channel in the rows that see it, and the code in its place is 0.
TEST(Fp8, NotFiniteValuesReachTheirRowsOnly) {
  Fp8Case c(causal_shape());
  c.v[150 * 64 + 5] = kNaN;  // first sequence, key 150: seen from row 50 on
  const Operands operands = c.quantized(1);
  EXPECT_LT(operands.scale_kv[2 * 1 + 1], 0.0f);  // block 1 is marked
  EXPECT_GT(operands.scale_kv[2 * 0 + 1], 0.0f);
  const auto found = c.attend(operands, Target{Backend::cpu}, Fp8Exp::code);
  for (int row = 0; row < 200; ++row) {
    for (int d = 0; d < 64; ++d) {
      const bool reached = row >= 50 && d == 5;
      ASSERT_EQ(std::isnan(found[static_cast<std::size_t>(row * 2 * 64 + d)]), reached) << row;
    }
  }
}

// A block of V that is all zero has no scale: neither large nor small values of its neighbours lose
// anything on the way to a scale of 1 and back. Key 256 begins the block that is visited first.
TEST(Fp8, BlocksOfZeroValuesKeepTheirNeighbours) {
  for (const float size : {1e36f, 1.0f, 1e-15f}) {
    for (const int zeros : {0, 128, 256}) {
      SCOPED_TRACE("V of size " + std::to_string(size) + ", zeros from key " +
                   std::to_string(zeros));
      Fp8Case c(Fp8Shape{});
      for (int key = 0; key < c.shape.keys; ++key) {
        const bool zero = key >= zeros && key < zeros + 128;
        for (int d = 0; d < 64; ++d) {
          c.v[static_cast<std::size_t>(key * 64 + d)] *= zero ? 0.0f : size;
        }
      }
      const Operands operands = c.quantized(1);
      EXPECT_EQ(operands.scale_kv[static_cast<std::size_t>(zeros / 128 * 2 + 1)], 0.0f);
      auto exact = c.attend(operands, Target{Backend::reference}, Fp8Exp::exp2);
      exact.resize(std::size_t{200} * 2 * 64);  // O without LSE
      for (const CpuIsa isa : usable_isas()) {
        auto found = c.attend(operands, Target{Backend::cpu, isa, 1}, Fp8Exp::exp2);
        found.resize(exact.size());
        for (const double x : found) {
          ASSERT_TRUE(std::isfinite(x));
        }
        EXPECT_LT(distance(found, exact), 3e-2) << cpu_isa_name(isa);
      }
    }
  }
}

// NaN in a block of zeros: the mark is the sign of -0.
TEST(Fp8, NotFiniteValuesAmongZerosAreMarked) {
  Fp8Case c(causal_shape());
  std::fill(c.v.begin() + 128 * 64, c.v.begin() + 256 * 64, 0.0f);
  c.v[150 * 64 + 5] = kNaN;
  const Operands operands = c.quantized(1);
  EXPECT_EQ(operands.scale_kv[2 * 1 + 1], 0.0f);
  EXPECT_TRUE(std::signbit(operands.scale_kv[2 * 1 + 1]));
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const auto found = c.attend(operands, Target{backend}, Fp8Exp::code);
    for (int row = 0; row < 200; ++row) {
      for (int d = 0; d < 64; ++d) {
        const bool reached = row >= 50 && d == 5;
        ASSERT_EQ(std::isnan(found[static_cast<std::size_t>(row * 2 * 64 + d)]), reached) << row;
      }
    }
  }
}

}  // namespace
}  // namespace pantile::testing
