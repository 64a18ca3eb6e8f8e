#include "expression/graph.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace pantile::expression {
namespace {

bool is_comparison(Op op) {
  return op == Op::lt || op == Op::le || op == Op::gt || op == Op::ge || op == Op::eq ||
         op == Op::ne;
}

double folded(Op op, double a, double b) {
  const auto whole = [](double x) { return static_cast<std::int64_t>(x); };
  switch (op) {
    case Op::add: return a + b;
    case Op::sub: return a - b;
    case Op::mul: return a * b;
    case Op::div: return a / b;
    case Op::floordiv: return static_cast<double>(floor_div(whole(a), whole(b)));
    case Op::mod: return static_cast<double>(floor_mod(whole(a), whole(b)));
    case Op::min: return b < a ? b : a;
    case Op::max: return b > a ? b : a;
    case Op::lt: return a < b ? 1.0 : 0.0;
    case Op::le: return a <= b ? 1.0 : 0.0;
    case Op::gt: return a > b ? 1.0 : 0.0;
    case Op::ge: return a >= b ? 1.0 : 0.0;
    case Op::eq: return a == b ? 1.0 : 0.0;
    case Op::ne: return a != b ? 1.0 : 0.0;
    case Op::both: return a != 0.0 && b != 0.0 ? 1.0 : 0.0;
    default: return a != 0.0 || b != 0.0 ? 1.0 : 0.0;
  }
}

double folded(Op op, double x) {
  switch (op) {
    case Op::negate: return x == 0.0 ? 1.0 : 0.0;
    case Op::neg: return -x;
    case Op::abs: return std::fabs(x);
    case Op::exp: return std::exp(x);
    case Op::log: return std::log(x);
    case Op::tanh: return std::tanh(x);
    case Op::sqrt: return std::sqrt(x);
    default: return x;
  }
}

// Integers are those of 32 bits.
bool fits(Kind kind, double value) {
  return kind != Kind::integer || (value >= -2147483648.0 && value <= 2147483647.0);
}

}  // namespace

bool Node::operator==(const Node& other) const {
  // The bits of values: 0 and -0 differ, NaN equals itself.
  return op == other.op && kind == other.kind && number == other.number &&
         arg_count == other.arg_count && std::equal(args, args + kMaxArgs, other.args) &&
         std::signbit(value) == std::signbit(other.value) &&
         (value == other.value || (value != value && other.value != other.value));
}

int Graph::intern(const Node& node) {
  const auto found = std::find(nodes_.begin(), nodes_.end(), node);
  if (found != nodes_.end()) {
    return static_cast<int>(found - nodes_.begin());
  }
  nodes_.push_back(node);
  return static_cast<int>(nodes_.size()) - 1;
}

int Graph::real(double value) {
  Node node;
  node.value = value;
  return intern(node);
}

int Graph::integer(std::int64_t value) {
  Node node;
  node.kind = Kind::integer;
  node.value = static_cast<double>(value);
  return intern(node);
}

int Graph::condition(bool value) {
  Node node;
  node.kind = Kind::condition;
  node.value = value ? 1.0 : 0.0;
  return intern(node);
}

int Graph::input(Input which) {
  Node node;
  node.op = Op::input;
  node.kind = which == Input::s ? Kind::real : Kind::integer;
  node.number = static_cast<int>(which);
  return intern(node);
}

int Graph::load(int captured, const int* indices, int count) {
  const CapturedDType dtype = captured_[static_cast<std::size_t>(captured)].dtype;
  Node node;
  node.op = Op::load;
  node.kind = dtype == CapturedDType::boolean ? Kind::condition
              : dtype == CapturedDType::i32   ? Kind::integer
                                              : Kind::real;
  node.number = captured;
  node.arg_count = count;
  std::copy_n(indices, count, node.args);
  return intern(node);
}

bool Graph::is_real_constant(int x, double value) const {
  return is_constant(x) && node(x).kind == Kind::real && node(x).value == value;
}

int Graph::as_real(int x) {
  if (node(x).kind == Kind::real) {
    return x;
  }
  return is_constant(x) ? real(node(x).value) : unary(Op::real, x);
}

int Graph::unary(Op op, int x) {
  const bool keeps_integer = op == Op::neg || op == Op::abs;
  if (op != Op::negate && op != Op::real && !keeps_integer) {
    x = as_real(x);
  }
  const Kind kind = op == Op::negate ? Kind::condition : keeps_integer ? node(x).kind : Kind::real;
  if (is_constant(x) && fits(kind, folded(op, node(x).value))) {
    Node constant;
    constant.kind = kind;
    constant.value = folded(op, node(x).value);
    return intern(constant);
  }
  if ((op == Op::neg || op == Op::negate) && node(x).op == op) {
    return node(x).args[0];
  }
  Node made;
  made.op = op;
  made.kind = kind;
  made.arg_count = 1;
  made.args[0] = x;
  return intern(made);
}

// The operand that the operation leaves as it is, or -1. Products with 0 are 0 only where
// derivatives make them, see derivatives().
int Graph::without_neutral(Op op, int a, int b) {
  const auto is = [this](int x, double value) { return is_constant(x) && node(x).value == value; };
  if ((op == Op::add && is(a, 0.0)) || (op == Op::mul && is(a, 1.0))) {
    return b;
  }
  const bool last = ((op == Op::add || op == Op::sub) && is(b, 0.0)) ||
                    ((op == Op::mul || op == Op::div) && is(b, 1.0));
  return last ? a : -1;
}

int Graph::fold_binary(Op op, Kind kind, int a, int b) {
  if (is_constant(a) && is_constant(b)) {
    const double value = folded(op, node(a).value, node(b).value);
    if (fits(kind, value)) {
      Node constant;
      constant.kind = kind;
      constant.value = value;
      return intern(constant);
    }
  }
  return -1;
}

int Graph::binary(Op op, int a, int b) {
  const bool is_logical = op == Op::both || op == Op::either;
  if (!is_logical && (op == Op::div || node(a).kind == Kind::real || node(b).kind == Kind::real)) {
    a = as_real(a);
    b = as_real(b);
  }
  const Kind kind = is_logical || is_comparison(op) ? Kind::condition : node(a).kind;
  const int constant = fold_binary(op, kind, a, b);
  if (constant >= 0) {
    return constant;
  }
  if (!is_logical) {
    const int same = without_neutral(op, a, b);
    if (same >= 0) {
      return same;
    }
  }
  if ((op == Op::min || op == Op::max || is_logical) && a == b) {
    return a;
  }
  if (op == Op::mul && is_constant(b)) {
    std::swap(a, b);
  }
  if (const int product = joined_factor(op, a, b); product >= 0) {
    return product;
  }
  Node made;
  made.op = op;
  made.kind = kind;
  made.arg_count = 2;
  made.args[0] = a;
  made.args[1] = b;
  return intern(made);
}

// Of real numbers: one constant for c * (d * x), c * (x / d) and (c * x) / d; else -1. Constants
// stand before what they multiply.
int Graph::joined_factor(Op op, int a, int b) {
  const Node left = node(a), right = node(b);
  if (left.kind != Kind::real || (op != Op::mul && op != Op::div)) {
    return -1;
  }
  if (op == Op::mul && is_constant(a)) {
    if (right.op == Op::mul && is_constant(right.args[0])) {
      return binary(Op::mul, real(left.value * node(right.args[0]).value), right.args[1]);
    }
    if (right.op == Op::div && is_constant(right.args[1])) {
      return binary(Op::mul, real(left.value / node(right.args[1]).value), right.args[0]);
    }
  }
  if (op == Op::div && is_constant(b) && left.op == Op::mul && is_constant(left.args[0])) {
    return binary(Op::mul, real(node(left.args[0]).value / right.value), left.args[1]);
  }
  return -1;
}

int Graph::where(int condition, int yes, int no) {
  if (node(yes).kind == Kind::real || node(no).kind == Kind::real) {
    yes = as_real(yes);
    no = as_real(no);
  }
  if (is_constant(condition)) {
    return node(condition).value != 0.0 ? yes : no;
  }
  if (yes == no) {
    return yes;
  }
  Node made;
  made.op = Op::where;
  made.kind = node(yes).kind;
  made.arg_count = 3;
  made.args[0] = condition;
  made.args[1] = yes;
  made.args[2] = no;
  return intern(made);
}

std::vector<int> order_of(const Graph& graph, const std::vector<int>& roots) {
  std::vector<bool> wanted(graph.nodes().size(), false);
  for (const int root : roots) {
    wanted[static_cast<std::size_t>(root)] = true;
  }
  std::vector<int> order;
  for (int x = static_cast<int>(graph.nodes().size()) - 1; x >= 0; --x) {
    if (wanted[static_cast<std::size_t>(x)]) {
      order.push_back(x);
      for (int i = 0; i < graph.node(x).arg_count; ++i) {
        wanted[static_cast<std::size_t>(graph.node(x).args[i])] = true;
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

namespace {

// Depth first, operands in order. The depth is bounded: so is that of the parser.
int copy_into(const Graph& from, int x, std::vector<int>* copies, std::vector<Node>* nodes) {
  if (const int copy = (*copies)[static_cast<std::size_t>(x)]; copy >= 0) {
    return copy;
  }
  Node node = from.node(x);
  for (int i = 0; i < node.arg_count; ++i) {
    node.args[i] = copy_into(from, from.node(x).args[i], copies, nodes);
  }
  nodes->push_back(node);
  (*copies)[static_cast<std::size_t>(x)] = static_cast<int>(nodes->size()) - 1;
  return (*copies)[static_cast<std::size_t>(x)];
}

}  // namespace

Graph canonical(const Graph& graph, int* root) {
  std::vector<int> copies(graph.nodes().size(), -1);
  std::vector<Node> nodes;
  Graph result(graph.captured());
  *root = copy_into(graph, *root, &copies, &nodes);
  result.adopt(std::move(nodes));
  return result;
}

std::string text_of(const Graph& graph, int root) {
  std::string text;
  for (const int x : order_of(graph, {root})) {
    const Node& node = graph.node(x);
    char line[160];
    std::snprintf(line, sizeof line, "%d=%d.%d.%d(%d,%d,%d,%d)%a\n", x, static_cast<int>(node.op),
                  static_cast<int>(node.kind), node.number, node.args[0], node.args[1],
                  node.args[2], node.args[3], node.value);
    text += line;
  }
  for (const Captured& captured : graph.captured()) {
    text += std::to_string(static_cast<int>(captured.dtype)) + ":" + std::to_string(captured.axes) +
            ";";
  }
  return text;
}

}  // namespace pantile::expression
