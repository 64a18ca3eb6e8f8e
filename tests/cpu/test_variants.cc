// Variants on every instruction set of this machine against the reference in double, which
// tests/python/test_variants.py compares with a textbook.
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "case.h"

namespace pantile::testing {
namespace {

// What a run writes: O, LSE, dQ, dK, dV, and the gradients of slopes, sinks and bias.
struct Results {
  std::vector<std::vector<double>> all;
};

struct Choice {
  const char* name;
  bool softcap, alibi, sinks, bias, dropout;
};
constexpr Choice kChoices[] = {
    {"softcap", true, false, false, false, false}, {"alibi", false, true, false, false, false},
    {"sinks", false, false, true, false, false},   {"bias", false, false, false, true, false},
    {"dropout", false, false, false, false, true}, {"all", true, true, true, true, true},
};

class VariantCase {
 public:
  VariantCase(const Shape& shape, const Choice& choice, unsigned seed) : c_(shape, seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Variant& v = c_.problem.variant;
    v.softcap = choice.softcap ? 1.5f : 0.0f;
    v.has_alibi = choice.alibi;
    v.alibi_by_batch = choice.alibi && seed % 2 == 0;
    v.has_sinks = choice.sinks;
    v.has_bias = choice.bias;
    v.bias_dtype = seed % 3 == 0 ? DType::f32 : shape.dtype;
    const std::int64_t heads = c_.problem.heads_q;
    // In turn a bias of its own for each, one for all heads, and one for all queries.
    v.bias.query = seed % 3 == 2 ? 0 : shape.keys + 1;
    v.bias.head = seed % 3 == 1 ? 0 : std::int64_t{shape.keys + 1} * shape.rows;
    v.bias.batch = v.bias.head == 0 ? 0 : v.bias.head * heads;
    v.bias.base_align_bytes = dtype_bytes(v.bias_dtype);
    v.dropout = choice.dropout ? 77 : 0;
    v.query_offset = seed * 7;
    v.key_offset = seed * 5;
    const auto room = static_cast<std::size_t>(shape.batch * heads);
    for (std::size_t i = 0; i < room; ++i) {
      slopes_.push_back(0.1f * normal(random));
      sinks_.push_back(normal(random));
    }
    bias_ =
        Buffer(v.bias_dtype, std::int64_t{shape.batch} * heads * shape.rows * (shape.keys + 1) + 1);
    for (std::int64_t i = 0; i < bias_.size(); ++i) {
      bias_.set(i, double(normal(random)));
    }
  }

  Results run(const Target& target) {
    const BackwardProblem problem = backward_problem();
    const BiasShape shape = bias_gradient_shape(problem.forward);
    Outputs outputs = empty_outputs();
    Gradients g{c_.grad_q.buffer.copy(), c_.grad_k.buffer.copy(), c_.grad_v.buffer.copy()};
    Buffer slopes(DType::f32, static_cast<std::int64_t>(slopes_.size()));
    Buffer sinks(DType::f32, c_.problem.heads_q);
    Buffer bias(DType::f32, shape.count());
    for (Buffer* x : {&g.q, &g.k, &g.v, &slopes, &sinks, &bias}) {
      x->fill(NAN);
    }
    BackwardTensors t;
    t.forward = forward_tensors(&outputs);
    t.grad_o = c_.grad_o.buffer.data();
    t.grad_lse = static_cast<float*>(c_.grad_lse.data());
    t.grad_q = g.q.data();
    t.grad_k = g.k.data();
    t.grad_v = g.v.data();
    t.variant.alibi_slopes =
        problem.wants_grad_alibi ? static_cast<float*>(slopes.data()) : nullptr;
    t.variant.sinks = problem.wants_grad_sinks ? static_cast<float*>(sinks.data()) : nullptr;
    t.variant.bias = problem.wants_grad_bias ? static_cast<float*>(bias.data()) : nullptr;
    run_passes(target, problem, t);
    const std::int64_t slope_count =
        problem.forward.variant.alibi_by_batch ? slopes.size() : c_.problem.heads_q;
    Results results;
    results.all = {values(c_, c_.o, outputs.o), lse_values(c_, outputs.lse), values(c_, c_.q, g.q),
                   values(c_, c_.k, g.k), values(c_, c_.v, g.v)};
    results.all.push_back(first(slopes, problem.wants_grad_alibi ? slope_count : 0));
    results.all.push_back(first(sinks, problem.wants_grad_sinks ? sinks.size() : 0));
    results.all.push_back(first(bias, problem.wants_grad_bias ? bias.size() : 0));
    return results;
  }

 private:
  static std::vector<double> first(const Buffer& buffer, std::int64_t count) {
    std::vector<double> x;
    for (std::int64_t i = 0; i < count; ++i) {
      x.push_back(buffer.get(i));
    }
    return x;
  }

  Outputs empty_outputs() const {
    Outputs outputs;
    outputs.o = c_.o.buffer.copy();
    outputs.lse = c_.grad_lse.copy();
    outputs.o.fill(NAN);
    outputs.lse.fill(NAN);
    return outputs;
  }

  BackwardProblem backward_problem() const {
    BackwardProblem p;
    p.forward = c_.problem;
    p.has_grad_lse = true;
    p.wants_grad_alibi = p.forward.variant.has_alibi;
    p.wants_grad_sinks = p.forward.variant.has_sinks;
    p.wants_grad_bias = p.forward.variant.has_bias;
    p.grad_o = c_.grad_o.layout;
    p.grad_q = c_.grad_q.layout;
    p.grad_k = c_.grad_k.layout;
    p.grad_v = c_.grad_v.layout;
    return p;
  }

  ForwardTensors forward_tensors(Outputs* outputs) {
    ForwardTensors t;
    t.q = c_.q.buffer.data();
    t.k = c_.k.buffer.data();
    t.v = c_.v.buffer.data();
    t.o = outputs->o.data();
    t.lse = static_cast<float*>(outputs->lse.data());
    t.cu_seqlens_q = c_.cu_q.empty() ? nullptr : c_.cu_q.data();
    t.cu_seqlens_k = c_.cu_k.empty() ? nullptr : c_.cu_k.data();
    t.seqused_q = c_.shape.used_q ? c_.used_q.data() : nullptr;
    t.seqused_k = c_.shape.used_k ? c_.used_k.data() : nullptr;
    const Variant& v = c_.problem.variant;
    t.variant.alibi_slopes = v.has_alibi ? slopes_.data() : nullptr;
    t.variant.sinks = v.has_sinks ? sinks_.data() : nullptr;
    t.variant.bias = v.has_bias ? bias_.data() : nullptr;
    t.variant.dropout_seed = v.dropout > 0 ? seed_ : nullptr;
    return t;
  }

  static void run_passes(const Target& target, const BackwardProblem& problem,
                         const BackwardTensors& t) {
    DeviceProps device;
    ASSERT_TRUE(query_device(Device{DeviceType::cpu, 0}, &device).ok());
    device.isa = target.isa;
    device.threads = target.threads;
    PlanOptions options;
    options.backend = target.backend;
    ForwardPlan forward;
    BackwardPlan backward;
    Status status = plan_forward(problem.forward, device, options, &forward);
    ASSERT_TRUE(status.ok()) << status.message();
    status = plan_backward(problem, device, options, &backward);
    ASSERT_TRUE(status.ok()) << status.message();
    const std::size_t bytes = std::max(forward.workspace.bytes, backward.workspace.bytes) + 256;
    std::vector<char> memory(2 * bytes, '\x7f');
    void* workspace = memory.data();
    std::size_t room = memory.size();
    std::align(256, bytes, workspace, room);
    status = run_forward(forward, t.forward, workspace, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    status = run_backward(backward, t, workspace, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  Case c_;
  std::vector<float> slopes_, sinks_;
  Buffer bias_;
  std::int64_t seed_[2] = {12345, 678};
};

// Root of the mean square error over that of the values, infinities left out.
double relative_error(const std::vector<double>& x, const std::vector<double>& truth) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isinf(truth[i])) {
      EXPECT_EQ(x[i], truth[i]);
      continue;
    }
    error += (x[i] - truth[i]) * (x[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  EXPECT_FALSE(std::isnan(error));
  return std::sqrt(error / (size + 1e-3 * double(x.size()) + 1e-30));
}

void check(const Shape& shape, const Choice& choice, unsigned seed) {
  VariantCase c(shape, choice, seed);
  const Results truth = c.run(Target{Backend::reference, CpuIsa::baseline, 2});
  const char* const names[] = {"O", "LSE", "dQ", "dK", "dV", "slopes", "sinks", "bias"};
  // Slopes and sinks are sums over a whole head, of terms that cancel.
  constexpr std::size_t kSlopes = 5;
  constexpr std::size_t kSinks = 6;
  const double bound = shape.dtype == DType::f32 ? 3e-6 : shape.dtype == DType::f16 ? 3e-3 : 2e-2;
  for (const CpuIsa isa : usable_isas()) {
    std::ostringstream trace;
    trace << choice.name << ", seed " << seed << ": " << shape << ", " << cpu_isa_name(isa);
    SCOPED_TRACE(trace.str());
    const Results one = c.run(Target{Backend::cpu, isa, 1});
    const Results two = c.run(Target{Backend::cpu, isa, 2});
    for (std::size_t i = 0; i < truth.all.size(); ++i) {
      SCOPED_TRACE(names[i]);
      const double sums = i == kSlopes || i == kSinks ? 4.0 : 1.0;
      EXPECT_LT(relative_error(one.all[i], truth.all[i]), sums * bound);
      EXPECT_TRUE(one.all[i] == two.all[i] || relative_error(two.all[i], one.all[i]) == 0.0);
    }
  }
}

class Variants : public ::testing::TestWithParam<DType> {};

TEST_P(Variants, AgreeWithTheReference) {
  Shape dense;
  dense.dtype = GetParam();
  dense.batch = 2;
  dense.heads_k = 2;
  dense.group = 2;
  dense.rows = 101;
  dense.keys = 143;
  dense.dim = 24;
  dense.dim_v = 40;
  dense.right = 0;
  Shape packed = dense;
  packed.packed_q = packed.packed_k = packed.used_k = true;
  packed.right = kUnbounded;
  packed.left = 60;
  unsigned seed = 1;
  for (const Choice& choice : kChoices) {
    for (const Shape& shape : {dense, packed}) {
      check(shape, choice, seed++);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Variants, ::testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

// tanh of the vector code, through scores that are softcap * tanh(s / softcap): LSE of a row with
// one key is its score.
TEST(Softcap, IsAccurateEverywhere) {
  for (const CpuIsa isa : usable_isas()) {
    for (const double size : {1e-6, 1e-3, 0.1, 0.69, 0.71, 1.0, 3.0, 9.0, 50.0, 1e4}) {
      Shape shape;
      shape.batch = 3;
      shape.rows = 40;
      shape.keys = 1;
      shape.dim = shape.dim_v = 1;
      shape.scale = 1.0;
      Choice choice{"softcap", true, false, false, false, false};
      shape.spread = std::sqrt(size * 1.5);
      VariantCase c(shape, choice, 9);
      const Results truth = c.run(Target{Backend::reference, CpuIsa::baseline, 1});
      const Results found = c.run(Target{Backend::cpu, isa, 1});
      for (std::size_t i = 0; i < truth.all[1].size(); ++i) {
        EXPECT_NEAR(found.all[1][i], truth.all[1][i], 4e-7 * std::abs(truth.all[1][i]) + 1e-20)
            << cpu_isa_name(isa) << " size " << size;
      }
    }
  }
}

}  // namespace
}  // namespace pantile::testing
