// Expressions: one handle for equal functions, columns of errors, derivatives, values, and what the
// text for a kernel holds.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "expression/evaluate.h"
#include "expression/print.h"
#include "pantile/expression.h"

namespace pantile::testing {
namespace {

const std::vector<CapturedType> kTensors = {{"slope", CapturedDType::f32, 1},
                                            {"rel", CapturedDType::f32, 2}};

Status parse(const std::string& text, Expression* expression,
             ExpressionKind kind = ExpressionKind::score) {
  return parse_expression(kind, text.c_str(), kTensors.data(), static_cast<int>(kTensors.size()),
                          expression);
}

Expression parsed(const std::string& text, ExpressionKind kind = ExpressionKind::score) {
  Expression expression = Expression::none;
  const Status status = parse(text, &expression, kind);
  EXPECT_TRUE(status.ok()) << status.message();
  return expression;
}

std::string refusal(const std::string& text, ExpressionKind kind = ExpressionKind::score) {
  Expression expression = Expression::none;
  const Status status = parse(text, &expression, kind);
  EXPECT_FALSE(status.ok()) << text;
  EXPECT_EQ(expression, Expression::none);
  return status.message();
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Tables {
  std::vector<float> slope{0.5f, -0.25f};
  std::vector<float> rel{1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
  CapturedTensor tensors[2];
  Tables() {
    tensors[0].data = slope.data();
    tensors[0].size[0] = 2;
    tensors[0].stride[0] = 1;
    tensors[1].data = rel.data();
    tensors[1].size[0] = 2;
    tensors[1].size[1] = 3;
    tensors[1].stride[0] = 3;
    tensors[1].stride[1] = 1;
  }
};

double value(const std::string& text, const expression::Place& place) {
  const Tables tables;
  return expression::evaluate(expression::programs_of(parsed(text)), tables.tensors, place);
}

TEST(Expression, EqualFunctionsHaveOneHandle) {
  const Expression one = parsed("s + slope[h] * (j - i)");
  EXPECT_EQ(one, parsed(" s+slope[ h ]*( j-i ) "));
  EXPECT_EQ(one, parsed("d = j - i; s + slope[h] * d"));
  EXPECT_NE(one, parsed("s + slope[b] * (j - i)"));
  EXPECT_EQ(parsed("2 * s * 3"), parsed("6.0 * s"));
  EXPECT_EQ(parsed("s + 0"), parsed("(s)"));
  Expression renamed = Expression::none;
  const CapturedType other[] = {{"a", CapturedDType::f32, 1}, {"c", CapturedDType::f32, 2}};
  ASSERT_TRUE(
      parse_expression(ExpressionKind::score, "s + a[h] * (j - i)", other, 2, &renamed).ok());
  EXPECT_EQ(one, renamed);
  const CapturedType half[] = {{"a", CapturedDType::f16, 1}, {"c", CapturedDType::f32, 2}};
  ASSERT_TRUE(
      parse_expression(ExpressionKind::score, "s + a[h] * (j - i)", half, 2, &renamed).ok());
  EXPECT_NE(one, renamed);
}

TEST(Expression, Values) {
  const expression::Place at{1.5, 0, 1, 7, 4};
  EXPECT_EQ(value("s + slope[h] * (j - i)", at), 1.5 + 0.25 * 3);
  EXPECT_EQ(value("rel[h, i - 100] + rel[5, 1]", at), 4.0 + 5.0);  // moved into the tensor
  EXPECT_EQ(value("-7 // 2 + (0 - i) // 2 + (0 - i) % 3", at), -4 - 4 + 2);
  EXPECT_EQ(value("i // 0 + i % 0", at), 0.0);
  EXPECT_EQ(value("2147483647 + i", at), -2147483642.0);
  EXPECT_EQ(value("1 if 3 < j < 5 and not h == 0 else s", at), 1.0);
  EXPECT_EQ(value("where((i > j) | (h == 0), max(s, 2), min(s, 2))", at), 2.0);
  EXPECT_EQ(value("abs(j - i) / 2", at), 1.5);
  EXPECT_NEAR(value("tanh(exp(log(sqrt(s))))", at), std::tanh(std::sqrt(1.5)), 1e-15);
  EXPECT_EQ(value("where(False, s, -inf)", at), -HUGE_VAL);
}

TEST(Expression, DerivativesAreThoseOfDifferences) {
  const Tables tables;
  for (const char* text :
       {"50 * tanh(s / 50)", "s * s - exp(-abs(s) / 3) * slope[h]", "log(2 + s * s) / (1 + s * s)",
        "max(s, rel[h, 1]) * sqrt(3 + s) - min(2 * s, 0.5)", "where(s > 0, s * s, slope[h] * s)"}) {
    const expression::Programs& programs = expression::programs_of(parsed(text));
    for (const double s : {-1.3, 0.4, 2.2}) {
      const auto f = [&](double x) {
        return expression::evaluate(programs, tables.tensors, {x, 0, 1, 5, 3});
      };
      const double slope = expression::evaluate_slope(programs, tables.tensors, {s, 0, 1, 5, 3});
      EXPECT_NEAR(slope, (f(s + 1e-6) - f(s - 1e-6)) / 2e-6, 1e-6) << text << " at " << s;
    }
  }
}

TEST(Expression, GradientsGoWhereLoadsRead) {
  const Tables tables;
  const expression::Programs& programs =
      expression::programs_of(parsed("s + slope[h] * (j - i) + rel[h, j] * rel[h, j]"));
  std::vector<double> slope(2), rel(6);
  double* const gradients[] = {slope.data(), rel.data()};
  expression::add_gradients(programs, tables.tensors, {0.0, 0, 1, 5, 2}, 2.0, gradients);
  EXPECT_EQ(slope, (std::vector<double>{0.0, -6.0}));
  EXPECT_EQ(rel, (std::vector<double>{0.0, 0.0, 0.0, 0.0, 0.0, 24.0}));
}

TEST(Expression, ErrorsNameTheColumn) {
  EXPECT_TRUE(holds(refusal("s + q"),
                    "at column 4, 'q' is not known; allowed: s, b, h, i, j, "
                    "slope, rel"));
  EXPECT_TRUE(holds(refusal("s +"), "at column 3, cannot use the end of the text"));
  EXPECT_TRUE(holds(refusal("s + slope[s]"), "at column 10, an index must be an integer"));
  EXPECT_TRUE(holds(refusal("s", ExpressionKind::mask), "'s' is not known"));
  EXPECT_TRUE(holds(refusal("i", ExpressionKind::mask), "a mask must be a condition"));
  EXPECT_TRUE(holds(refusal("2 s"), "at column 2, cannot use 's'"));
  EXPECT_TRUE(holds(refusal(std::string(300, '-') + "s"), "nested too deeply"));
  std::string deep = "s";
  for (int n = 0; n < 300; ++n) {
    deep = "exp(" + deep + ")";
  }
  EXPECT_TRUE(holds(refusal(deep), "nested too deeply"));
}

TEST(Expression, FactsDecideWhatAKernelDoes) {
  const auto facts = [](const char* text) { return expression::programs_of(parsed(text)).facts; };
  EXPECT_EQ(facts("s + slope[h] * (j - i)").form, expression::ScoreForm::sloped);
  EXPECT_TRUE(facts("s + slope[h] * (j - i)").is_affine);
  EXPECT_EQ(facts("s + rel[h, i - j]").form, expression::ScoreForm::scaled);
  EXPECT_TRUE(facts("rel[h, i - j] + s").is_affine);
  EXPECT_EQ(facts("2 * s + slope[h] * abs(j - i)").factor, 2.0f);
  EXPECT_FALSE(facts("2 * s").is_affine);
  EXPECT_EQ(facts("50 * tanh(s / 50)").form, expression::ScoreForm::natural);
  EXPECT_EQ(facts("tanh(s / 50) * 50").factor, 50.0f);
  EXPECT_TRUE(facts("50 * tanh(s / 50)").has_bounded_slope);
  EXPECT_FALSE(facts("sqrt(1 + s)").has_bounded_slope);
  EXPECT_FALSE(facts("s + tanh(s)").is_affine);
  EXPECT_FALSE(facts("slope[h] * s").is_affine);
}

TEST(Expression, KernelTextHasNothingOfTheUsers) {
  const expression::Function& function =
      expression::function_of(parsed("trap = slope[h]; s + trap * (j - i)"));
  const std::string text = expression::print_forward_score(function, false) +
                           expression::print_backward_score(function, false, 1);
  EXPECT_FALSE(holds(text, "slope"));
  EXPECT_FALSE(holds(text, "trap"));
  // The softcap's constant is folded: a product and a tanh an element.
  const std::string capped =
      expression::print_forward_score(expression::function_of(parsed("50 * tanh(s / 50)")), false);
  EXPECT_FALSE(holds(capped, "0x1.9p+5"));
  EXPECT_TRUE(holds(capped, "fast_tanh"));
  EXPECT_TRUE(holds(
      expression::print_forward_score(expression::function_of(parsed("50 * tanh(s / 50)")), true),
      "exact_tanh"));
}

}  // namespace
}  // namespace pantile::testing
