// The tiled kernels of every instruction set against the reference, over random shapes, masks,
// types and layouts; and the reference against finite differences.
#include <gtest/gtest.h>

#include "case.h"
#include "textbook.h"

namespace pantile::testing {
namespace {

double epsilon(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

std::vector<double> difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  std::vector<double> result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    result.push_back(a[i] - b[i]);
  }
  return result;
}

// At most twice the textbook's error, plus a floor: the rounding of the result itself, and that of
// LSE in f32, from which the backward recomputes P.
void expect_accurate(const char* name, const std::vector<double>& ours,
                     const std::vector<double>& truth, double textbook, double floor) {
  const double error = rms(difference(ours, truth));
  EXPECT_LE(error, 2.0 * textbook + floor * rms(truth)) << name << ", textbook " << textbook;
}

// LSE is -inf where the reference says so, and as accurate as the textbook's elsewhere.
void expect_lse(std::vector<double> ours, std::vector<double> truth, double textbook) {
  ASSERT_EQ(ours.size(), truth.size());
  for (std::size_t i = 0; i < truth.size(); ++i) {
    ASSERT_EQ(std::isinf(ours[i]), std::isinf(truth[i])) << i;
    if (std::isinf(truth[i])) {
      ASSERT_EQ(ours[i], truth[i]);
      ours[i] = truth[i] = 0.0;
    }
  }
  // Half an ulp of the maximum, and of LSE, in base 2 and in base e.
  expect_accurate("LSE", ours, truth, textbook, 4 * epsilon(DType::f32));
}

double largest(const std::vector<double>& x) {
  double result = 0.0;
  for (const double value : x) {
    result = std::isfinite(value) ? std::max(result, std::fabs(value)) : result;
  }
  return result;
}

// Sums of `a` would overflow f16; such cases say nothing about accuracy.
bool fits(DType dtype, const std::vector<double>& a) {
  return dtype != DType::f16 || largest(a) < 60000.0;
}

void check(Case& c, const Target& target) {
  Case wide = c.widened();
  const Target reference{Backend::reference, CpuIsa::baseline, 2};
  const Outputs true_outputs = wide.forward(reference);
  const Gradients true_gradients = wide.backward(reference, true_outputs);
  const Errors textbook = textbook_errors(c, true_outputs, true_gradients);
  const Outputs outputs = c.forward(target);
  const Gradients gradients = c.backward(target, outputs);

  const std::vector<double> lse = lse_values(c, true_outputs.lse);
  const double own = epsilon(c.shape.dtype);
  const double recomputed = own + 0x1p-22 * (1.0 + largest(lse));
  expect_lse(lse_values(c, outputs.lse), lse, textbook.lse);
  // P loses digits to large scores, of which LSE shows the size.
  expect_accurate("O", values(c, c.o, outputs.o), values(wide, wide.o, true_outputs.o), textbook.o,
                  own + 0x1p-25 * largest(lse));
  const std::vector<double> q = values(wide, wide.q, true_gradients.q);
  const std::vector<double> k = values(wide, wide.k, true_gradients.k);
  const std::vector<double> v = values(wide, wide.v, true_gradients.v);
  if (fits(c.shape.dtype, q) && fits(c.shape.dtype, k) && fits(c.shape.dtype, v)) {
    // dQ and dK also lose what cancels in dP - delta, whose terms grow with the root of dim_v.
    const double cancelled = recomputed * (2.0 + 0.5 * std::sqrt(double(c.shape.dim_v)));
    expect_accurate("dQ", values(c, c.q, gradients.q), q, textbook.q, cancelled);
    expect_accurate("dK", values(c, c.k, gradients.k), k, textbook.k, cancelled);
    expect_accurate("dV", values(c, c.v, gradients.v), v, textbook.v, recomputed);
  }
}

class Accuracy : public ::testing::TestWithParam<unsigned> {};

TEST_P(Accuracy, RandomCases) {
  constexpr unsigned kCases = 12;
  for (unsigned i = 0; i < kCases; ++i) {
    const unsigned seed = GetParam() * kCases + i;
    const Shape shape = random_shape(seed);
    Case c(shape, seed);
    for (const CpuIsa isa : usable_isas()) {
      std::ostringstream trace;
      trace << "seed " << seed << ": " << shape << ", " << cpu_isa_name(isa);
      SCOPED_TRACE(trace.str());
      check(c, Target{Backend::cpu, isa, 2});
      if (HasFailure()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Accuracy, ::testing::Range(0u, 12u));

// Many heads and keys: the work items of the backward are larger than in small problems.
TEST(Accuracy, LargeWorkItems) {
  Shape shape;
  shape.batch = 2;
  shape.heads_k = 8;
  shape.rows = 60;
  shape.keys = 700;
  shape.dim = 8;
  shape.dim_v = 8;
  shape.right = 40;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    shape.dtype = dtype;
    Case c(shape, 4);
    for (const CpuIsa isa : usable_isas()) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + cpu_isa_name(isa));
      check(c, Target{Backend::cpu, isa, 2});
    }
  }
}

TEST(Reference, GradientsAreThoseOfFiniteDifferences) {
  Shape shape;
  shape.batch = 2;
  shape.group = 2;
  shape.rows = 7;
  shape.keys = 9;
  shape.dim = 5;
  shape.dim_v = 4;
  shape.left = 4;
  shape.right = 1;
  Case c(shape, 3);
  const Target target{Backend::reference, CpuIsa::baseline, 1};
  const Outputs outputs = c.forward(target);
  const Gradients gradients = c.backward(target, outputs);
  const auto loss = [&] {
    const Outputs now = c.forward(target);
    double sum = 0.0;
    for (std::int64_t i = 0; i < now.o.size(); ++i) {
      sum += now.o.get(i) * c.grad_o.buffer.get(i);
    }
    for (std::int64_t i = 0; i < now.lse.size(); ++i) {
      sum += std::isfinite(now.lse.get(i)) ? now.lse.get(i) * c.grad_lse.get(i) : 0.0;
    }
    return sum;
  };
  const double step = 1e-2;  // outputs are f32: rounding and curvature are both below 1e-4 of it
  const auto expect_slope = [&](Tensor& t, const Buffer& gradient) {
    for (std::int64_t i = 0; i < t.buffer.size(); ++i) {
      const double x = t.buffer.get(i);
      t.buffer.set(i, x + step);
      const double above = loss();
      t.buffer.set(i, x - step);
      const double below = loss();
      t.buffer.set(i, x);
      ASSERT_NEAR(gradient.get(i), (above - below) / (2.0 * step), 1e-3) << "element " << i;
    }
  };
  expect_slope(c.q, gradients.q);
  expect_slope(c.k, gradients.k);
  expect_slope(c.v, gradients.v);
}

// One key: P is 1, so that O is V. Every half-precision number goes through reading and writing.
TEST(Conversion, EveryHalfComesBackAsItWas) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.batch = 128;
    shape.dim = 1;
    shape.dim_v = 512;
    Case c(shape, 1);
    auto* v = static_cast<std::uint16_t*>(c.v.buffer.data());
    for (int i = 0; i < 65536; ++i) {
      v[i] = static_cast<std::uint16_t>(i);
    }
    for (const CpuIsa isa : usable_isas()) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + cpu_isa_name(isa));
      const Outputs outputs = c.forward(Target{Backend::cpu, isa, 1});
      for (int i = 0; i < 65536; ++i) {
        const double x = c.v.buffer.get(i);
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(outputs.o.get(i))) << i;
        } else {
          ASSERT_EQ(outputs.o.get(i), x) << i;
        }
      }
    }
  }
}

// Scores so low that LSE is near -200, where P = exp(S - LSE) must not be exp(S) / exp(LSE).
TEST(Accuracy, LowLogSumExp) {
  for (const int keys : {1, 2, 47, 48, 49, 95, 96, 97, 191, 192, 193}) {
    Shape shape;
    shape.rows = 50;
    shape.keys = keys;
    shape.dim = 16;
    shape.dim_v = 16;
    shape.scale = 1.0;
    shape.spread = 0.05;
    Case c(shape, static_cast<unsigned>(keys));
    for (int row = 0; row < shape.rows; ++row) {
      c.q.buffer.set(c.at(c.q, 0, 0, row, 0), 14.0);
    }
    for (int key = 0; key < keys; ++key) {
      c.k.buffer.set(c.at(c.k, 0, 0, key, 0), -15.0);
    }
    for (const CpuIsa isa : usable_isas()) {
      SCOPED_TRACE(std::to_string(keys) + " keys, " + cpu_isa_name(isa));
      check(c, Target{Backend::cpu, isa, 1});
    }
  }
}

}  // namespace
}  // namespace pantile::testing
