// The low bits of a 16-bit O: what the forward writes, and the gradients that need them. Where K
// and V have a common offset, one weight dominates or one row is sharp, a delta of the rounded O
// costs digits of dQ and dK that textbook attention keeps.
#include <gtest/gtest.h>

#include <algorithm>

#include "case.h"
#include "core/low_bits.h"
#include "textbook.h"

namespace pantile::testing {
namespace {

std::int8_t expected_low(DType dtype, double exact, double rounded) {
  const auto y = static_cast<float>(exact);
  const auto r = static_cast<float>(rounded);
  return dtype == DType::bf16 ? core::low_bits<core::kLowShiftBf16>(y, r)
                              : core::low_bits<core::kLowShiftF16>(y, r);
}

// Those of the same O before its rounding, in their own contiguous layout, for every row that sees
// a key; and the rest of the outputs do not change for them.
void expect_low_bits(Case& c, const Target& target) {
  const Outputs outputs = c.forward(target);
  const Outputs exact = c.forward_unrounded(target);
  c.shape.low = false;
  const Outputs without = c.forward(target);
  c.shape.low = true;
  ASSERT_TRUE(outputs.o.same_bits(without.o));
  ASSERT_TRUE(outputs.lse.same_bits(without.lse));
  c.for_each_row([&](int batch, int head, int row, core::Span keys) {
    for (int d = 0; d < c.shape.dim_v && !keys.empty(); ++d) {
      const std::int64_t at = c.at(c.o, batch, head, row, d);
      ASSERT_EQ(outputs.low_at(c.low_at(batch, head, row, d)),
                expected_low(c.shape.dtype, exact.o.get(at), outputs.o.get(at)))
          << "batch " << batch << " head " << head << " row " << row << " column " << d;
    }
  });
}

TEST(LowBits, AreThoseOfTheUnroundedOutput) {
  int cases = 0;
  for (unsigned seed = 5000; cases < 24; ++seed) {
    Shape shape = random_shape(seed);
    shape.low = shape.dtype != DType::f32;
    if (!shape.low) {
      continue;
    }
    ++cases;
    Case c(shape, seed);
    for (const CpuIsa isa : usable_isas()) {
      std::ostringstream trace;
      trace << "seed " << seed << ": " << shape << ", " << cpu_isa_name(isa);
      SCOPED_TRACE(trace.str());
      expect_low_bits(c, Target{Backend::cpu, isa, 2});
      if (HasFailure()) {
        return;
      }
    }
  }
}

// The reference rounds from double: its low bits may differ by one step from those of an f32 O, and
// the sum of O and low bits is within a step of O.
TEST(LowBits, OfTheReferenceAddUpToItsOutput) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.low = true;
    shape.rows = 40;
    shape.keys = 50;
    shape.right = 0;
    Case c(shape, 3);
    const Target target{Backend::reference, CpuIsa::baseline, 1};
    const Outputs outputs = c.forward(target);
    const Outputs exact = c.forward_unrounded(target);
    const double step = dtype == DType::bf16 ? 0x1p-15 : 0x1p-18;  // of a number's binade
    c.for_each_row([&](int batch, int head, int row, core::Span) {
      for (int d = 0; d < shape.dim_v; ++d) {
        const std::int64_t at = c.at(c.o, batch, head, row, d);
        const auto near = static_cast<float>(outputs.o.get(at));
        const std::int8_t low = outputs.low_at(c.low_at(batch, head, row, d));
        const float whole = dtype == DType::bf16
                                ? core::with_low_bits<core::kLowShiftBf16>(near, low)
                                : core::with_low_bits<core::kLowShiftF16>(near, low);
        ASSERT_NEAR(static_cast<double>(whole), exact.o.get(at), step * std::fabs(exact.o.get(at)));
      }
    });
  }
}

// ---- gradients -------------------------------------------------------------------------------

void add_to_all(Buffer& buffer, double x) {
  for (std::int64_t i = 0; i < buffer.size(); ++i) {
    buffer.set(i, buffer.get(i) + x);
  }
}

void scale_row(Case& c, Tensor& t, int row, double factor) {
  for (int d = 0; d < static_cast<int>(t.dim); ++d) {
    const std::int64_t at = c.at(t, 0, 0, row, d);
    t.buffer.set(at, t.buffer.get(at) * factor);
  }
}

// Every channel of K gets a mean of its own, of 3 standard deviations; V gets 1.
void add_means(Case& c) {
  std::mt19937 random(77);
  std::normal_distribution<double> normal(0.0, 3.0);
  std::vector<double> means(static_cast<std::size_t>(c.shape.dim));
  for (double& mean : means) {
    mean = normal(random);
  }
  for (int key = 0; key < c.shape.keys; ++key) {
    for (int d = 0; d < c.shape.dim; ++d) {
      const std::int64_t at = c.at(c.k, 0, 0, key, d);
      c.k.buffer.set(at, c.k.buffer.get(at) + means[static_cast<std::size_t>(d)]);
    }
  }
  add_to_all(c.v.buffer, 1.0);
}

// Row i looks at key i: nearly all of its weight.
void look_at_own_key(Case& c, double factor) {
  for (int row = 0; row < c.shape.rows; ++row) {
    for (int d = 0; d < c.shape.dim; ++d) {
      const std::int64_t at = c.at(c.q, 0, 0, row, d);
      c.q.buffer.set(at,
                     c.k.buffer.get(c.at(c.k, 0, 0, row, d)) * factor + 0.1 * c.q.buffer.get(at));
    }
  }
}

void leave(Case&) {}

void add_offsets(Case& c) {
  add_to_all(c.k.buffer, 3.0);
  add_to_all(c.v.buffer, 3.0);
}

void let_weights_dominate(Case& c) {
  look_at_own_key(c, 1.2);
}

// Every 64th row looks at its own key with nearly all of its weight, six hundred times louder than
// the others, which look at all keys alike: what its delta is off by, times its Q, is most of dK.
void sharpen_some_rows(Case& c) {
  look_at_own_key(c, 1.2);
  for (int row = 0; row < c.shape.rows; ++row) {
    scale_row(c, c.q, row, row % 64 == 0 ? 1.0 : 0.002);
  }
}

// Its one weight is 1, and its dS 0.
void make_one_row_loud(Case& c) {
  scale_row(c, c.q, 100, 1e3);
}

struct Law {
  const char* name;
  int length;
  bool causal;
  void (*shape)(Case& c);
  // Largest relative errors in bf16, in percent; an eighth of them in f16. The textbook's are in
  // the comments of kLaws.
  double limit_q, limit_k;
  // What a delta of the rounded O cannot reach in bf16, of the worse of dQ and dK, in percent.
  double without;
};

std::ostream& operator<<(std::ostream& out, const Law& law) {
  return out << law.name;
}

const Law kLaws[] = {
    {"Normal", 256, false, leave, 0.3, 0.3, 0.0},        // 0.6, 0.6
    {"Offset", 256, false, add_offsets, 0.3, 0.3, 5.0},  // 2.4, 1.0
    {"OffsetCausal", 256, true, add_offsets, 0.3, 0.3, 4.5},
    {"DominantWeight", 256, false, let_weights_dominate, 1.0, 1.0, 5.0},
    {"DominantWeightCausal", 256, true, let_weights_dominate, 1.0, 1.0, 5.0},
    {"SharpRows", 512, false, sharpen_some_rows, 0.5, 1.0, 5.0},
    {"RowOfOneWeight", 256, false, make_one_row_loud, 0.3, 0.3, 0.0},
    {"Means", 512, false, add_means, 0.5, 0.5, 2.0},  // 1.4, 1.0
    {"MeansCausal", 512, true, add_means, 0.5, 0.5, 2.0},
    {"Means1k", 1024, false, add_means, 0.5, 0.5, 2.0},
    {"Means2k", 2048, false, add_means, 0.5, 0.5, 2.0},
    {"Means4k", 4096, false, add_means, 0.5, 0.5, 2.0},
    {"MeansCausal4k", 4096, true, add_means, 0.5, 0.5, 2.0},
};

struct Relative {
  double q, k, v;  // percent
};

double relative(const std::vector<double>& ours, const std::vector<double>& truth) {
  std::vector<double> difference;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    difference.push_back(ours[i] - truth[i]);
  }
  return 100.0 * rms(difference) / rms(truth);
}

class Gradient : public ::testing::TestWithParam<Law> {
 protected:
  // The case in a 16-bit type, and its gradients in f32 from the same numbers.
  void make(DType dtype) {
    Shape shape;
    shape.dtype = dtype;
    shape.rows = shape.keys = GetParam().length;
    shape.dim = shape.dim_v = 128;
    shape.right = GetParam().causal ? 0 : kUnbounded;
    shape.low = true;
    case_ = std::make_unique<Case>(shape, 11);
    GetParam().shape(*case_);
    case_->grad_lse.fill(0.0);
    wide_ = std::make_unique<Case>(case_->widened());
    const Target target{Backend::cpu, usable_isas().back(), 2};
    true_outputs_ = wide_->forward(target);
    truth_ = wide_->backward(target, true_outputs_);
  }

  Relative errors(const Target& target, bool low) {
    case_->shape.low = low;
    const Outputs outputs = case_->forward(target);
    const Gradients gradients = case_->backward(target, outputs);
    case_->shape.low = true;
    const auto of = [&](const Tensor& t, const Tensor& wide, const Buffer& ours,
                        const Buffer& truth) {
      return relative(values(*case_, t, ours), values(*wide_, wide, truth));
    };
    return Relative{of(case_->q, wide_->q, gradients.q, truth_.q),
                    of(case_->k, wide_->k, gradients.k, truth_.k),
                    of(case_->v, wide_->v, gradients.v, truth_.v)};
  }

  std::unique_ptr<Case> case_, wide_;
  Outputs true_outputs_;
  Gradients truth_;
};

TEST_P(Gradient, IsAsExactAsItsType) {
  const Law& law = GetParam();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    make(dtype);
    const double unit = dtype == DType::bf16 ? 1.0 : 0.125;
    for (const CpuIsa isa : usable_isas()) {
      if (law.length > 512 && isa != usable_isas().back()) {
        continue;
      }
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + cpu_isa_name(isa));
      const Relative error = errors(Target{Backend::cpu, isa, 2}, true);
      EXPECT_LE(error.q, unit * law.limit_q);
      EXPECT_LE(error.k, unit * law.limit_k);
      EXPECT_LE(error.v, unit * 0.4);
    }
  }
}

// The contract: twice the textbook's error, for the lengths at which the textbook is quick enough.
TEST_P(Gradient, IsWithinTwiceTheTextbooks) {
  if (GetParam().length > 512) {
    GTEST_SKIP() << "the textbook of this length takes minutes";
  }
  make(DType::bf16);
  const Errors textbook = textbook_errors(*case_, true_outputs_, truth_);
  const Relative error = errors(Target{Backend::cpu, usable_isas().back(), 2}, true);
  const auto percent = [&](double absolute, const Tensor& t, const Buffer& truth) {
    return 100.0 * absolute / rms(values(*wide_, t, truth));
  };
  EXPECT_LE(error.q, 2.0 * percent(textbook.q, wide_->q, truth_.q));
  EXPECT_LE(error.k, 2.0 * percent(textbook.k, wide_->k, truth_.k));
  EXPECT_LE(error.v, 2.0 * percent(textbook.v, wide_->v, truth_.v));
}

// That the laws can fail: without low bits they do.
TEST_P(Gradient, NeedsTheLowBits) {
  const Law& law = GetParam();
  if (law.without == 0.0) {
    GTEST_SKIP() << "a law that the rounded O keeps too";
  }
  make(DType::bf16);
  const Relative error = errors(Target{Backend::cpu, usable_isas().back(), 2}, false);
  EXPECT_GE(std::max(error.q, error.k), law.without);
}

INSTANTIATE_TEST_SUITE_P(Laws, Gradient, ::testing::ValuesIn(kLaws),
                         [](const auto& law) { return std::string(law.param.name); });

}  // namespace
}  // namespace pantile::testing
