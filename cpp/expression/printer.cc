#include "expression/printer.h"

#include <cmath>
#include <cstdio>

namespace pantile::expression {
namespace {

using std::string;

string numbered(const char* prefix, int x) {
  return prefix + std::to_string(x);
}

bool is_comparison(Op op) {
  return op == Op::lt || op == Op::le || op == Op::gt || op == Op::ge || op == Op::eq ||
         op == Op::ne;
}

const char* sign_of(Op op) {
  switch (op) {
    case Op::add: return " + ";
    case Op::sub: return " - ";
    case Op::mul: return " * ";
    case Op::lt: return " < ";
    case Op::le: return " <= ";
    case Op::gt: return " > ";
    case Op::ge: return " >= ";
    case Op::eq: return " == ";
    case Op::ne: return " != ";
    case Op::both: return " && ";
    default: return " || ";
  }
}

string real_literal(double value) {
  if (std::isinf(value)) {
    return value > 0 ? "core::kInfinity" : "-core::kInfinity";
  }
  char text[64];
  std::snprintf(text, sizeof text, "%af", static_cast<double>(static_cast<float>(value)));
  return text;
}

const char* function_of_reals(Op op, bool exact) {
  switch (op) {
    case Op::min: return "min_of_reals";
    case Op::max: return "max_of_reals";
    case Op::abs: return "fabsf";
    case Op::exp: return "__expf";
    case Op::log: return "__logf";
    case Op::tanh: return exact ? "exact_tanh" : "fast_tanh";
    default: return "fast_sqrt";
  }
}

}  // namespace

bool Printer::is_column(int x) const {
  const Node& node = graph_.node(x);
  const Input column = columns_ == Columns::keys ? Input::j : Input::i;
  return node.op == Op::input && node.number == static_cast<int>(column);
}

const char* Printer::type_of(int x) const {
  const Kind kind = graph_.node(x).kind;
  return kind == Kind::real ? "float" : kind == Kind::integer ? "int" : "bool";
}

Printer::Level Printer::level(int x) {
  if (const auto known = levels_.find(x); known != levels_.end()) {
    return known->second;
  }
  const Node node = graph_.node(x);
  Level result = Level::constant;
  if (node.op == Op::input) {
    const auto which = static_cast<Input>(node.number);
    result = which == Input::b || which == Input::h ? Level::head
             : which == Input::s || is_column(x)    ? Level::pair
                                                    : Level::line;
  } else if (node.op == Op::load) {
    result = Level::head;
  }
  for (int i = 0; i < node.arg_count; ++i) {
    result = std::max(result, level(node.args[i]));
  }
  return levels_[x] = result;
}

bool Printer::needs_s(int x) {
  if (const auto known = needs_s_.find(x); known != needs_s_.end()) {
    return known->second;
  }
  const Node node = graph_.node(x);
  bool result = node.op == Op::input && node.number == static_cast<int>(Input::s);
  for (int i = 0; i < node.arg_count; ++i) {
    result = result || needs_s(node.args[i]);
  }
  return needs_s_[x] = result;
}

std::optional<Printer::OfScore> Printer::of_score(int x) {
  if (!needs_s(x)) {
    return std::nullopt;
  }
  const Node node = graph_.node(x);
  const int a = node.args[0], b = node.args[1];
  if (node.op == Op::input) {
    return OfScore{graph_.real(1.0), -1};
  }
  if (node.op == Op::neg) {
    const auto inner = of_score(a);
    if (!inner) {
      return inner;
    }
    return OfScore{graph_.unary(Op::neg, inner->k),
                   inner->term < 0 ? -1 : graph_.unary(Op::neg, inner->term)};
  }
  if (node.op == Op::add || node.op == Op::sub) {
    const auto left = of_score(a), right = of_score(b);
    if ((needs_s(a) && !left) || (needs_s(b) && !right)) {
      return std::nullopt;
    }
    const int none = -1;
    const auto joined = [&](int p, int q) {
      return q < 0   ? p
             : p < 0 ? (node.op == Op::add ? q : graph_.unary(Op::neg, q))
                     : graph_.binary(node.op, p, q);
    };
    return OfScore{joined(left ? left->k : none, right ? right->k : none),
                   joined(left ? left->term : a, right ? right->term : b)};
  }
  if ((node.op == Op::mul || node.op == Op::div)) {
    const bool first = needs_s(a);
    const int other = first ? b : a;
    if (needs_s(other) || level(other) > Level::head || (node.op == Op::div && !first)) {
      return std::nullopt;
    }
    const auto inner = of_score(first ? a : b);
    if (!inner) {
      return inner;
    }
    return OfScore{graph_.binary(node.op, inner->k, other),
                   inner->term < 0 ? -1 : graph_.binary(node.op, inner->term, other)};
  }
  return std::nullopt;
}

int Printer::column_slope(int x) {
  if (const auto known = slopes_.find(x); known != slopes_.end()) {
    return known->second;
  }
  const Node node = graph_.node(x);
  const int a = node.args[0], b = node.args[1];
  const auto zero = [this](Kind kind) {
    return kind == Kind::real ? graph_.real(0.0) : graph_.integer(0);
  };
  int result = -1;
  if (node.kind == Kind::condition || needs_s(x)) {
    result = -1;
  } else if (level(x) <= Level::line) {
    result = zero(node.kind);
  } else if (is_column(x)) {
    result = graph_.integer(1);
  } else if (node.op == Op::neg || node.op == Op::real) {
    const int inner = column_slope(a);
    result = inner < 0            ? -1
             : node.op == Op::neg ? graph_.unary(Op::neg, inner)
                                  : graph_.as_real(inner);
  } else if (node.op == Op::add || node.op == Op::sub) {
    const int left = column_slope(a), right = column_slope(b);
    result = left < 0 || right < 0 ? -1 : graph_.binary(node.op, left, right);
  } else if (node.op == Op::mul || node.op == Op::div) {
    const bool first = level(a) == Level::pair;
    const int inner = column_slope(first ? a : b);
    const int other = first ? b : a;
    if (inner >= 0 && level(other) <= Level::line && (first || node.op == Op::mul)) {
      result = graph_.binary(node.op, inner, other);
    }
  }
  return slopes_[x] = result;
}

string Printer::literal(int x) const {
  const Node& node = graph_.node(x);
  if (node.kind == Kind::real) {
    return real_literal(node.value);
  }
  if (node.kind == Kind::condition) {
    return node.value != 0.0 ? "true" : "false";
  }
  // The smallest integer has no literal of its own.
  return node.value == -2147483648.0 ? "(-2147483647 - 1)"
                                     : std::to_string(static_cast<long long>(node.value));
}

string Printer::load_text(const Node& node, const std::vector<string>& indices) {
  static constexpr const char* kNames[] = {"load_f32", "load_f16", "load_bf16", "load_i32",
                                           "load_bool"};
  const auto dtype = graph_.captured()[static_cast<std::size_t>(node.number)].dtype;
  string text = string(kNames[static_cast<int>(dtype)]) + "(p->captured[" +
                std::to_string(first_captured_ + node.number) + "]";
  for (const string& index : indices) {
    text += ", " + index;
  }
  return text + ")";
}

string Printer::operation(const Node& node, const std::vector<string>& a) {
  const bool reals =
      node.arg_count > 0 && graph_.node(node.args[node.arg_count - 1]).kind == Kind::real;
  switch (node.op) {
    case Op::load: return load_text(node, a);
    case Op::div: {
      const int divisor = node.args[1];
      return graph_.is_constant(divisor)
                 ? a[0] + " * " + real_literal(1.0 / graph_.node(divisor).value)
                 : "__fdividef(" + a[0] + ", " + a[1] + ")";
    }
    case Op::floordiv: return "floor_div(" + a[0] + ", " + a[1] + ")";
    case Op::mod: return "floor_mod(" + a[0] + ", " + a[1] + ")";
    case Op::negate: return "!" + a[0];
    case Op::neg: return "-" + a[0];
    case Op::real: return "static_cast<float>(" + a[0] + ")";
    case Op::where: return a[0] + " ? " + a[1] + " : " + a[2];
    case Op::min:
    case Op::max:
      if (reals) {
        return string(function_of_reals(node.op, exact_)) + "(" + a[0] + ", " + a[1] + ")";
      }
      return (node.op == Op::min ? "core::min_of(" : "core::max_of(") + a[0] + ", " + a[1] + ")";
    case Op::abs:
      if (!reals) {
        return "core::max_of(" + a[0] + ", -" + a[0] + ")";
      }
      return "fabsf(" + a[0] + ")";
    case Op::exp:
    case Op::log:
    case Op::tanh:
    case Op::sqrt: return string(function_of_reals(node.op, exact_)) + "(" + a[0] + ")";
    default: return a[0] + sign_of(node.op) + a[1];
  }
}

string Printer::member(const string& type, const string& text) {
  const auto known = member_names_.find(text);
  if (known != member_names_.end()) {
    return known->second;
  }
  const string name = numbered("m", static_cast<int>(member_names_.size()));
  members_ += "  " + type + " " + name + ";\n";
  head_ += "    " + name + " = " + text + ";\n";
  return member_names_[text] = name;
}

string Printer::of_head(int x) {
  const Node node = graph_.node(x);
  if (node.op == Op::constant) {
    return literal(x);
  }
  if (node.op == Op::input) {
    return member("int", node.number == static_cast<int>(Input::b) ? "b" : "h");
  }
  if (const auto known = heads_.find(x); known != heads_.end()) {
    return known->second;
  }
  std::vector<string> arguments;
  for (int i = 0; i < node.arg_count; ++i) {
    arguments.push_back(of_head(node.args[i]));
  }
  const string name = member(type_of(x), operation(node, arguments));
  return heads_[x] = name;
}

// An array of two: the value of either line, where pairs are at the first column.
string Printer::line_array(int x) {
  if (const auto known = lines_.find(x); known != lines_.end()) {
    return known->second;
  }
  const Node node = graph_.node(x);
  string values[2];
  for (int r = 0; r < 2; ++r) {
    if (node.op == Op::input) {
      values[r] = is_column(x) ? "column0" : r == 0 ? "line0" : "line0 + 8";
      continue;
    }
    std::vector<string> arguments;
    for (int i = 0; i < node.arg_count; ++i) {
      arguments.push_back(at_first_column(node.args[i], std::to_string(r)));
    }
    values[r] = operation(node, arguments);
  }
  const string name = numbered("l", x);
  line_ += "    const " + string(type_of(x)) + " " + name + "[2] = {" + values[0] + ", " +
           values[1] + "};\n";
  return lines_[x] = name;
}

string Printer::at_first_column(int x, const string& r) {
  return level(x) <= Level::head ? of_head(x) : line_array(x) + "[" + r + "]";
}

// A comparison of integers that are linear in the column: with a constant of the element.
string Printer::compared(int x) {
  const Node node = graph_.node(x);
  const int a = node.args[0], b = node.args[1];
  if (!is_comparison(node.op) || graph_.node(a).kind != Kind::integer || column_slope(a) < 0 ||
      column_slope(b) < 0) {
    return string();
  }
  const int difference = graph_.binary(Op::sub, a, b);
  const int slope = column_slope(difference);
  if (level(difference) != Level::pair || slope < 0 || !graph_.is_constant(slope)) {
    return string();
  }
  return line_array(difference) + "[r] + " + literal(slope) + " * c" + sign_of(node.op) + "0";
}

string Printer::element(int x) {
  if (level(x) <= Level::line) {
    return at_first_column(x, "r");
  }
  if (const auto known = elements_.find(x); known != elements_.end()) {
    return known->second;
  }
  const Node node = graph_.node(x);
  string text = compared(x);
  if (const int slope = text.empty() ? column_slope(x) : -1; slope >= 0) {
    const string first = line_array(x) + "[r]";
    const string by = at_first_column(slope, "r");
    if (node.kind == Kind::integer) {
      text = first + " + " + by + " * c";
    } else {
      text = graph_.is_real_constant(slope, 1.0)
                 ? first + " + static_cast<float>(c)"
                 : "fmaf(" + by + ", static_cast<float>(c), " + first + ")";
    }
  } else if (const auto linear = text.empty() ? of_score(x) : std::nullopt;
             linear && level(linear->k) <= Level::head) {
    const bool one = graph_.is_real_constant(linear->k, 1.0);
    const string k = one ? "unit" : member("float", of_head(linear->k) + " * unit");
    text =
        linear->term < 0 ? "S[e] * " + k : "fmaf(S[e], " + k + ", " + element(linear->term) + ")";
  } else if (text.empty()) {
    std::vector<string> arguments;
    for (int i = 0; i < node.arg_count; ++i) {
      arguments.push_back(element(node.args[i]));
    }
    text = operation(node, arguments);
    loads_elements_ = loads_elements_ || node.op == Op::load;
    element_count_ += node.op == Op::where ? 2 : 1;
  }
  const string name = numbered("e", x);
  element_ += "      const " + string(type_of(x)) + " " + name + "_ = " + text + ";\n";
  return elements_[x] = name + "_";
}

void Printer::clear_function() {
  lines_.clear();
  elements_.clear();
  line_.clear();
  element_.clear();
}

}  // namespace pantile::expression
