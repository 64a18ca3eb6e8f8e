#include "expression/print.h"

#include <string>
#include <utility>
#include <vector>

#include "expression/printer.h"

namespace pantile::expression {
namespace {

using std::string;

constexpr int kSmallElements = 6;  // operations an element

// The loop over a fragment: `last` stores what came of an element.
string element_loop(const Printer& printer, const string& last) {
  return printer.line_text() +
         "#pragma unroll\n    for (int e = 0; e < kCount; ++e) {\n"
         "      [[maybe_unused]] const int r = row_of(e), c = column_of(e);\n" +
         printer.element_text() + "      " + last + "\n    }\n";
}

// ---- forward

string forward_struct(const char* name, const Printer& printer, const string& traits,
                      const string& rest) {
  return string("struct ") + name + " : SomeVariant {\n" + traits +
         "  const VariantParams* p;\n  int line0, column0;\n  float unit;\n" + printer.members() +
         "\n  PANTILE_DEVICE void begin(const VariantParams& params, const FragmentPlace& at) {\n"
         "    p = &params;\n    line0 = at.row;\n    unit = params.score_unit;\n"
         "    [[maybe_unused]] const int b = at.batch, h = at.head;\n" +
         printer.head_text() +
         "  }\n  PANTILE_DEVICE void fetch(const VariantParams&, int key) { column0 = key; }\n" +
         rest + "};\n";
}

string score_function(const string& body) {
  return "  template <int kCount>\n  PANTILE_DEVICE void score(float (&S)[kCount]) const {\n" +
         body + "  }\n";
}

// A root that is a positive constant times something: the constant is left to the exponent.
std::pair<int, double> without_factor(const Graph& graph, int root) {
  const Node& node = graph.node(root);
  for (int i = 0; i < 2; ++i) {
    const int factor = node.args[i];
    if (node.op == Op::mul && graph.is_constant(factor) && graph.node(factor).value > 0.0 &&
        graph.node(factor).value < 1e30) {
      return {node.args[1 - i], graph.node(factor).value};
    }
  }
  return {root, 1.0};
}

struct Choice {
  ScoreForm form = ScoreForm::natural;
  double factor = 1.0;
  int value = 0;  // the term that is added to s, or -1; natural: what is computed
};

Choice choose(Printer& printer) {
  Choice choice;
  const auto linear = printer.of_score(printer.root());
  Graph& graph = printer.graph();
  if (linear && graph.is_constant(linear->k) && graph.node(linear->k).value > 0.0) {
    choice.factor = graph.node(linear->k).value;
    choice.value = linear->term;
    const int slope = linear->term < 0 ? -1 : printer.column_slope(linear->term);
    const bool sloped = slope >= 0 && printer.level(slope) <= Printer::Level::head;
    choice.form = sloped ? ScoreForm::sloped : ScoreForm::scaled;
    return choice;
  }
  const auto [value, factor] = without_factor(graph, printer.root());
  choice.value = value;
  choice.factor = factor;
  return choice;
}

// ---- backward

int slope_of(Graph& graph, int root) {
  for (const auto& [x, derivative] : graph.derivatives(root)) {
    if (graph.node(x).op == Op::input) {
      return derivative;
    }
  }
  return graph.real(0.0);
}

// Whether a value is finite wherever s is.
bool is_bounded(const Graph& graph, int root) {
  for (const int x : order_of(graph, {root})) {
    const Op op = graph.node(x).op;
    const bool constant_divisor = op == Op::div && graph.is_constant(graph.node(x).args[1]);
    if ((op == Op::div && !constant_divisor) || op == Op::exp || op == Op::log || op == Op::sqrt ||
        op == Op::load) {
      return false;
    }
  }
  return true;
}

string backward_begin(const Printer& printer, const string& more) {
  return "  PANTILE_DEVICE void begin(const VariantParams& params, int batch, int head) {\n"
         "    [[maybe_unused]] const VariantParams* const p = &params;\n"
         "    [[maybe_unused]] const int b = batch, h = head;\n    unit = params.score_unit;\n" +
         printer.head_text() + more + "  }\n";
}

// The opening of a function of a fragment: its parameters come behind the place.
string backward_function(const string& head) {
  return head +
         " {\n    [[maybe_unused]] const VariantParams* const p = &params;\n"
         "    [[maybe_unused]] const int line0 = at.key, column0 = at.row;\n";
}

constexpr const char* kPlace = "(const VariantParams& params, const TransposedPlace& at, ";

// The gradients of captured tensors. Those of a score that is not affine may read the raw scores.
struct GradientText {
  string members, begin, functions;
};

string offset_text(const Node& load, int captured, const std::vector<string>& indices) {
  string text = "gradient_offset(p->captured[" + std::to_string(captured) + "]";
  for (int i = 0; i < load.arg_count; ++i) {
    text += ", " + indices[static_cast<std::size_t>(i)];
  }
  return text + ")";
}

GradientText print_gradients(Printer& printer, std::uint32_t wanted, bool affine) {
  GradientText text;
  string notes, finish;
  Graph& graph = printer.graph();
  int sums = 0;
  for (const auto& [x, derivative] : graph.derivatives(printer.root())) {
    const Node load = graph.node(x);
    if (load.op != Op::load || (wanted >> load.number & 1u) == 0) {
      continue;
    }
    const string to = "p->grad_captured[" + std::to_string(load.number) + "]";
    std::vector<string> indices;
    if (printer.level(x) <= Printer::Level::head) {
      for (int i = 0; i < load.arg_count; ++i) {
        indices.push_back(printer.of_head(load.args[i]));
      }
      const string sum = "sum" + std::to_string(sums++);
      text.members += "  float " + sum + ";\n";
      text.begin += "    " + sum + " = 0.0f;\n";
      notes += "    " + sum + " = fmaf(dS, " + printer.element(derivative) + ", " + sum + ");\n";
      finish += "    add_warp_sum(" + to + " + " + offset_text(load, load.number, indices) + ", " +
                sum + " * p->keep_scale);\n    " + sum + " = 0.0f;\n";
      continue;
    }
    for (int i = 0; i < load.arg_count; ++i) {
      indices.push_back(printer.element(load.args[i]));
    }
    notes += "    add_nonzero(" + to + " + " + offset_text(load, load.number, indices) +
             ", dS * (" + printer.element(derivative) + ") * p->keep_scale);\n";
  }
  text.functions =
      backward_function(affine ? string("  PANTILE_DEVICE void note") + kPlace + "int e, float dS)"
                               : string("  template <int kCount>\n  PANTILE_DEVICE void note") +
                                     kPlace + "int e, float dS, const float (&S)[kCount])") +
      "    [[maybe_unused]] const int r = row_of(e), c = column_of(e);\n" + printer.line_text() +
      printer.element_text() + notes +
      "  }\n  PANTILE_DEVICE void finish(const VariantParams& params) {\n"
      "    [[maybe_unused]] const VariantParams* const p = &params;\n" +
      finish + "  }\n";
  return text;
}

}  // namespace

Facts facts_of(const Function& score) {
  Facts facts;
  Printer forward(score, Columns::keys, false, 0);
  const Choice choice = choose(forward);
  facts.form = choice.form;
  facts.factor = static_cast<float>(choice.factor);
  if (choice.value >= 0) {
    static_cast<void>(forward.element(choice.value));
  }
  facts.is_large = forward.loads_elements() || forward.element_count() > kSmallElements;
  Printer backward(score, Columns::queries, false, 0);
  const auto linear = backward.of_score(backward.root());
  Graph& graph = backward.graph();
  facts.is_affine = linear && graph.is_real_constant(linear->k, 1.0);
  facts.grad_factor = static_cast<float>(without_factor(graph, backward.root()).second);
  facts.has_bounded_slope = is_bounded(graph, slope_of(graph, backward.root()));
  return facts;
}

string print_forward_score(const Function& score, bool exact) {
  Printer printer(score, Columns::keys, exact, 0);
  const Choice choice = choose(printer);
  string functions;
  if (choice.form == ScoreForm::sloped) {
    const string slope = printer.of_head(printer.column_slope(choice.value));
    const string first = printer.at_first_column(choice.value, "0");
    const string second = printer.at_first_column(choice.value, "1");
    functions = "  PANTILE_DEVICE SlopedLogits logits(float base2) const {\n" +
                printer.line_text() + "    return SlopedLogits{base2, " + slope +
                " * core::kLog2E, {" + first + " * core::kLog2E, " + second +
                " * core::kLog2E}};\n  }\n";
  } else if (choice.form == ScoreForm::scaled && choice.value >= 0) {
    const Graph& graph = printer.graph();
    const auto linear = printer.of_score(printer.root());
    const string factor = printer.member(
        "float", graph.is_real_constant(linear->k, 1.0)
                     ? "__fdividef(1.0f, unit)"
                     : "__fdividef(1.0f, " + printer.literal(linear->k) + " * unit)");
    const string value = printer.element(choice.value);
    functions =
        score_function(element_loop(printer, "S[e] = fmaf(" + value + ", " + factor + ", S[e]);"));
  } else if (choice.form == ScoreForm::natural) {
    const string value = printer.element(choice.value);
    functions = score_function(element_loop(printer, "S[e] = " + value + ";"));
  }
  const string traits = string("  static constexpr bool kAdds = ") +
                        (choice.form == ScoreForm::sloped ? "true" : "false") + ";\n";
  return forward_struct("UserScore", printer, traits, functions);
}

string print_backward_score(const Function& score, bool exact, std::uint32_t gradients) {
  Printer printer(score, Columns::queries, exact, 0);
  Graph& graph = printer.graph();
  const auto linear = printer.of_score(printer.root());
  const bool affine = linear && graph.is_real_constant(linear->k, 1.0);
  string functions;
  if (affine) {
    const string value = linear->term < 0 ? string() : printer.element(linear->term);
    functions =
        backward_function(string("  template <int kCount>\n  PANTILE_DEVICE void add") + kPlace +
                          "float (&S)[kCount]) const") +
        (value.empty() ? string()
                       : element_loop(printer, "S[e] = fmaf(" + value + ", core::kLog2E, S[e]);")) +
        "  }\n";
  } else {
    const string left = printer.element(without_factor(graph, printer.root()).first);
    const string right = printer.element(slope_of(graph, printer.root()));
    functions = backward_function(string("  template <int kCount>\n  PANTILE_DEVICE void weigh") +
                                  kPlace + "float (&S)[kCount], float (&values)[kCount]) const") +
                element_loop(printer, "values[e] = " + left + ", S[e] = " + right + ";") + "  }\n";
  }
  printer.clear_function();
  GradientText gradient;
  if (gradients != 0) {
    gradient = print_gradients(printer, gradients, affine);
  }
  return "struct UserScore {\n  float unit;\n" + printer.members() + gradient.members +
         backward_begin(printer, gradient.begin) + functions + gradient.functions + "};\n";
}

string print_forward_mask(const Function& mask, int first_captured) {
  Printer printer(mask, Columns::keys, false, first_captured);
  const string shown = printer.element(printer.root());
  const string functions =
      score_function(element_loop(printer, "S[e] = " + shown + " ? S[e] : -core::kInfinity;")) +
      "  static PANTILE_DEVICE bool visible(const VariantParams& params, int batch, int head, int "
      "row, int key) {\n"
      "    UserMask one;\n"
      "    one.begin(params, FragmentPlace{batch, head, row, 0, 0, 0});\n"
      "    one.fetch(params, key);\n"
      "    float S[1] = {0.0f};\n"
      "    one.score(S);\n"
      "    return S[0] == 0.0f;\n  }\n";
  return forward_struct("UserMask", printer, "  static constexpr bool kMasks = true;\n", functions);
}

string print_backward_mask(const Function& mask, int first_captured) {
  Printer printer(mask, Columns::queries, false, first_captured);
  const string shown = printer.element(printer.root());
  const string functions =
      backward_function(string("  template <int kCount>\n  PANTILE_DEVICE void hide") + kPlace +
                        "float (&S)[kCount], float hidden) const") +
      element_loop(printer, "S[e] = " + shown + " ? S[e] : hidden;") + "  }\n";
  return "struct UserMask {\n  float unit;\n" + printer.members() + backward_begin(printer, "") +
         functions + "};\n";
}

}  // namespace pantile::expression
