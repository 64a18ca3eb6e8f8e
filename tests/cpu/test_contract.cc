// The numerical contract: what NaN may reach, what empty rows and sequences give, and that results
// depend on nothing but the inputs.
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <vector>

#include "case.h"

namespace pantile::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Elements of a tensor that belong to a row (or key) that exists or not: all are written.
void expect_same(const Buffer& a, const Buffer& b, const char* name) {
  EXPECT_TRUE(a.same_bits(b)) << name;
}

void expect_same(const Outputs& a, const Outputs& b) {
  expect_same(a.o, b.o, "O");
  expect_same(a.lse, b.lse, "LSE");
  EXPECT_TRUE(a.low.same_bits(b.low)) << "low bits of O";
}

void expect_same(const Gradients& a, const Gradients& b) {
  expect_same(a.q, b.q, "dQ");
  expect_same(a.k, b.k, "dK");
  expect_same(a.v, b.v, "dV");
}

// Written elements hold no NaN. Gaps between rows keep the NaN they started with.
void expect_finite(const Case& c, const Tensor& t, const Buffer& buffer, const char* name) {
  for (const double x : values(c, t, buffer)) {
    ASSERT_TRUE(std::isfinite(x)) << name;
  }
}

class Contract : public ::testing::TestWithParam<unsigned> {};

TEST_P(Contract, NotAttendedMemoryChangesNoBit) {
  constexpr unsigned kCases = 12;
  for (unsigned i = 0; i < kCases; ++i) {
    const unsigned seed = 1000 + GetParam() * kCases + i;
    const Shape shape = random_shape(seed);
    for (const CpuIsa isa : usable_isas()) {
      std::ostringstream trace;
      trace << "seed " << seed << ": " << shape << ", " << cpu_isa_name(isa);
      SCOPED_TRACE(trace.str());
      const Target target{Backend::cpu, isa, 1};
      Case clean(shape, seed);
      clean.poison(0.5);
      const Outputs outputs = clean.forward(target);
      const Gradients gradients = clean.backward(target, outputs);
      expect_finite(clean, clean.o, outputs.o, "O");
      expect_finite(clean, clean.q, gradients.q, "dQ");
      expect_finite(clean, clean.k, gradients.k, "dK");
      expect_finite(clean, clean.v, gradients.v, "dV");
      for (const double bad : {kNan, kInf, -kInf}) {
        Case dirty(shape, seed);
        dirty.poison(bad);
        const Outputs again = dirty.forward(target);
        expect_same(outputs, again);
        expect_same(gradients, dirty.backward(target, again));
      }
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_P(Contract, ThreadsAndRunsChangeNoBit) {
  constexpr unsigned kCases = 6;
  std::vector<CpuIsa> isas = usable_isas();
#if defined(__SANITIZE_THREAD__)
  isas.erase(isas.begin(), isas.end() - 1);  // which thread writes what is the same for all
#endif
  for (unsigned i = 0; i < kCases; ++i) {
    const unsigned seed = 2000 + GetParam() * kCases + i;
    Shape shape = random_shape(seed);
    shape.rows += 300;  // enough tiles and work for several threads
    shape.keys += 500;
    for (const CpuIsa isa : isas) {
      std::ostringstream trace;
      trace << "seed " << seed << ": " << shape << ", " << cpu_isa_name(isa);
      SCOPED_TRACE(trace.str());
      Case c(shape, seed);
      const Outputs outputs = c.forward(Target{Backend::cpu, isa, 1});
      const Gradients gradients = c.backward(Target{Backend::cpu, isa, 1}, outputs);
      for (const int threads : {2, 5, 5}) {
        const Target target{Backend::cpu, isa, threads};
        expect_same(outputs, c.forward(target));
        expect_same(gradients, c.backward(target, outputs));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Contract, ::testing::Range(0u, 5u));

// One value that is not finite in row `key` of K or V: rows that see the key get NaN or infinity,
// and nothing else changes, in tiles where some rows see it and others do not.
TEST(NotFinite, ReachesOnlyWhatAttends) {
  Shape shape;
  shape.rows = 230;
  shape.keys = 250;
  shape.dim = 40;
  shape.dim_v = 24;
  shape.left = 60;
  shape.right = 13;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    shape.dtype = dtype;
    shape.low = dtype != DType::f32;
    Case c(shape, 5);
    for (const CpuIsa isa : usable_isas()) {
      const Target target{Backend::cpu, isa, 1};
      const Outputs clean = c.forward(target);
      const Gradients clean_gradients = c.backward(target, clean);
      for (const int key : {0, 1, 57, 95, 96, 143, 249}) {
        for (const double bad : {kNan, kInf, -kInf}) {
          for (Tensor* t : {&c.k, &c.v}) {
            SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + cpu_isa_name(isa) + " key " +
                         std::to_string(key) + (t == &c.k ? " K " : " V ") + std::to_string(bad));
            const std::int64_t at = c.at(*t, 0, 0, key, 7);
            const double before = t->buffer.get(at);
            t->buffer.set(at, bad);
            const Outputs outputs = c.forward(target);
            const Gradients gradients = c.backward(target, outputs);
            t->buffer.set(at, before);
            const core::Span rows = core::visible_rows(c.mask(0), key);
            for (int row = 0; row < shape.rows; ++row) {
              const bool sees = row >= rows.begin && row < rows.end;
              for (int d = 0; d < shape.dim_v; ++d) {
                const std::int64_t i = c.at(c.o, 0, 0, row, d);
                if (!sees) {
                  ASSERT_EQ(outputs.o.get(i), clean.o.get(i)) << "row " << row;
                } else if (t == &c.v && d == 7) {
                  ASSERT_FALSE(std::isfinite(outputs.o.get(i))) << "row " << row;
                } else if (t == &c.k && std::isnan(bad)) {
                  ASSERT_TRUE(std::isnan(outputs.o.get(i))) << "row " << row;
                }
              }
              for (int d = 0; d < shape.dim && !sees; ++d) {
                const std::int64_t i = c.at(c.q, 0, 0, row, d);
                ASSERT_EQ(gradients.q.get(i), clean_gradients.q.get(i)) << "dQ row " << row;
              }
            }
            // Keys that share no row with this one.
            const core::Span near{core::visible_keys(c.mask(0), rows.begin).begin,
                                  core::visible_keys(c.mask(0), rows.end - 1).end};
            for (int other = 0; other < shape.keys; ++other) {
              for (int d = 0; d < shape.dim && (other < near.begin || other >= near.end); ++d) {
                const std::int64_t i = c.at(c.k, 0, 0, other, d);
                ASSERT_EQ(gradients.k.get(i), clean_gradients.k.get(i)) << "dK key " << other;
              }
            }
          }
        }
      }
    }
  }
}

// The same for a row of Q or dO in the backward, whose forward was clean.
TEST(NotFinite, OfARowReachesOnlyItsKeys) {
  Shape shape;
  shape.rows = 230;
  shape.keys = 250;
  shape.dim = 40;
  shape.dim_v = 24;
  shape.left = 60;
  shape.right = 13;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    shape.dtype = dtype;
    Case c(shape, 6);
    const core::Mask mask = c.mask(0);
    for (const CpuIsa isa : usable_isas()) {
      const Target target{Backend::cpu, isa, 1};
      const Outputs outputs = c.forward(target);
      const Gradients clean = c.backward(target, outputs);
      for (const int row : {0, 1, 94, 95, 96, 150, 229}) {
        for (Tensor* t : {&c.q, &c.grad_o}) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + cpu_isa_name(isa) + " row " +
                       std::to_string(row) + (t == &c.q ? " Q" : " dO"));
          const std::int64_t at = c.at(*t, 0, 0, row, 7);
          const double before = t->buffer.get(at);
          t->buffer.set(at, kNan);
          const Gradients gradients = c.backward(target, outputs);
          t->buffer.set(at, before);
          const core::Span keys = core::visible_keys(mask, row);
          for (int key = 0; key < shape.keys; ++key) {
            const bool seen = key >= keys.begin && key < keys.end;
            for (int d = 0; d < shape.dim; ++d) {
              const std::int64_t i = c.at(c.k, 0, 0, key, d);
              if (seen) {
                ASSERT_TRUE(std::isnan(gradients.k.get(i))) << "dK key " << key;
              } else {
                ASSERT_EQ(gradients.k.get(i), clean.k.get(i)) << "dK key " << key;
              }
            }
            for (int d = 0; d < shape.dim_v; ++d) {
              const std::int64_t i = c.at(c.v, 0, 0, key, d);
              if (!seen) {
                ASSERT_EQ(gradients.v.get(i), clean.v.get(i)) << "dV key " << key;
              } else if (t == &c.q || d == 7) {
                ASSERT_TRUE(std::isnan(gradients.v.get(i))) << "dV key " << key;
              }
            }
          }
          for (int other = 0; other < shape.rows; ++other) {
            for (int d = 0; d < shape.dim; ++d) {
              const std::int64_t i = c.at(c.q, 0, 0, other, d);
              if (other == row) {
                ASSERT_TRUE(std::isnan(gradients.q.get(i))) << "dQ row " << other;
              } else {
                ASSERT_EQ(gradients.q.get(i), clean.q.get(i)) << "dQ row " << other;
              }
            }
          }
        }
      }
    }
  }
}

// Rows that see nothing, for whatever reason, and rows past seqused.
TEST(Empty, RowsAndKeysGiveZeros) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    for (const CpuIsa isa : usable_isas()) {
      for (const int keys : {0, 1, 40}) {
        Shape shape;
        shape.batch = 2;
        shape.rows = 150;
        shape.keys = keys;
        shape.right = 0;
        shape.used_q = true;
        shape.used_k = true;
        Case c(shape, 8);
        c.used_q = {150, 101};
        c.used_k = {keys, keys / 2};
        const Target target{backend, isa, 2};
        const Outputs outputs = c.forward(target);
        const Gradients gradients = c.backward(target, outputs);
        for (int b = 0; b < 2; ++b) {
          for (int row = 0; row < shape.rows; ++row) {
            const bool sees = row < c.rows_of(b) && !core::visible_keys(c.mask(b), row).empty();
            ASSERT_EQ(std::isinf(outputs.lse.get(c.lse_at(b, 0, row))), !sees);
            for (int d = 0; d < 64 && !sees; ++d) {
              ASSERT_EQ(outputs.o.get(c.at(c.o, b, 0, row, d)), 0.0);
              ASSERT_EQ(gradients.q.get(c.at(c.q, b, 0, row, d)), 0.0);
            }
          }
          for (int key = c.keys_of(b); key < keys; ++key) {
            for (int d = 0; d < 64; ++d) {
              ASSERT_EQ(gradients.k.get(c.at(c.k, b, 0, key, d)), 0.0);
              ASSERT_EQ(gradients.v.get(c.at(c.v, b, 0, key, d)), 0.0);
            }
          }
        }
      }
    }
  }
}

// Packed rows that belong to no sequence are written like rows that see nothing.
TEST(Empty, RowsOutsideThePackedSequencesGiveZeros) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    Shape shape;
    shape.batch = 2;
    shape.rows = 20;
    shape.keys = 30;
    shape.packed_q = true;
    shape.packed_k = true;
    Case c(shape, 9);
    const std::int32_t last_q = c.cu_q[2] - 3;
    const std::int32_t last_k = c.cu_k[2] - 2;
    c.cu_q = {2, std::max(2, std::min(c.cu_q[1], last_q)), last_q};
    c.cu_k = {1, std::max(1, std::min(c.cu_k[1], last_k)), last_k};
    const Target target{backend, usable_isas().back(), 1};
    const Outputs outputs = c.forward(target);
    const Gradients gradients = c.backward(target, outputs);
    for (std::int64_t row = 0; row < c.problem.total_q; ++row) {
      const bool inside = row >= c.cu_q[0] && row < c.cu_q[2];
      EXPECT_EQ(std::isinf(outputs.lse.get(row)), !inside) << row;
      for (int d = 0; d < 64 && !inside; ++d) {
        ASSERT_EQ(outputs.o.get(row * 64 + d), 0.0);
        ASSERT_EQ(gradients.q.get(row * 64 + d), 0.0);
      }
    }
    for (std::int64_t key = 0; key < c.problem.total_k; ++key) {
      for (int d = 0; d < 64 && (key < c.cu_k[0] || key >= c.cu_k[2]); ++d) {
        ASSERT_EQ(gradients.k.get(key * 64 + d), 0.0);
        ASSERT_EQ(gradients.v.get(key * 64 + d), 0.0);
      }
    }
  }
}

// Workspace grows with the number of tokens, not with its square, and stays within what training a
// long sequence on a small machine can afford.
TEST(Workspace, IsLinear) {
  const auto bytes = [](int length, DType dtype) {
    Case small(Shape{}, 1);
    BackwardProblem backward;
    backward.forward = small.problem;
    backward.forward.dtype = dtype;
    backward.forward.seqlen_q = length;
    backward.forward.seqlen_k = length;
    backward.forward.total_q = length;
    backward.forward.total_k = length;
    const Layout rows{std::int64_t{length} * 64, 64, 64, 16};
    for (Layout* layout :
         {&backward.forward.q, &backward.forward.k, &backward.forward.v, &backward.forward.o,
          &backward.grad_o, &backward.grad_q, &backward.grad_k, &backward.grad_v}) {
      *layout = rows;
    }
    DeviceProps device;
    EXPECT_TRUE(query_device(Device{}, &device).ok());
    device.threads = 8;
    ForwardPlan forward_plan;
    BackwardPlan backward_plan;
    EXPECT_TRUE(plan_forward(backward.forward, device, PlanOptions{}, &forward_plan).ok());
    EXPECT_TRUE(plan_backward(backward, device, PlanOptions{}, &backward_plan).ok());
    return forward_plan.workspace.bytes + backward_plan.workspace.bytes;
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    EXPECT_LT(bytes(32768, dtype), std::size_t{64} << 20);
    EXPECT_LT(bytes(65536, dtype) - bytes(32768, dtype),
              (bytes(32768, dtype) - bytes(16384, dtype)) * 5 / 2);
  }
}

}  // namespace
}  // namespace pantile::testing
