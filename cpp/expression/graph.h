// A score or mask of the user's own as a graph: nodes that are made once, whatever way they are
// written, in an order in which operands come before their users. Text is parsed into it
// (parser.h); C++ (print.h) and programs for the CPU (program.h) are made from it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "expression/instruction.h"
#include "pantile/expression.h"

namespace pantile::expression {

inline constexpr int kMaxNodes = 256;  // of a function; its derivatives are as many again and more

struct Node {
  Op op = Op::constant;
  Kind kind = Kind::real;
  int number = 0;
  int arg_count = 0;
  int args[kMaxArgs] = {0, 0, 0, 0};
  double value = 0.0;

  bool operator==(const Node& other) const;
};

struct Captured {
  std::string name;
  CapturedDType dtype = CapturedDType::f32;
  int axes = 1;
};

class Graph {
 public:
  explicit Graph(std::vector<Captured> captured) : captured_(std::move(captured)) {}

  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& node(int index) const { return nodes_[static_cast<std::size_t>(index)]; }
  const std::vector<Captured>& captured() const { return captured_; }

  // Nodes, folded where operands are constants. Operands have the right kinds; of an integer and a
  // real one, the integer becomes real.
  int real(double value);
  int integer(std::int64_t value);
  int condition(bool value);
  int input(Input which);
  int load(int captured, const int* indices, int count);
  int unary(Op op, int x);
  int binary(Op op, int a, int b);
  int where(int condition, int yes, int no);
  int as_real(int x);

  bool is_constant(int x) const { return node(x).op == Op::constant; }
  bool is_real_constant(int x, double value) const;

  // Of every real input or load that `root` depends on, d root / d it: (node, derivative).
  std::vector<std::pair<int, int>> derivatives(int root);

  // Takes nodes that are in order and different from each other.
  void adopt(std::vector<Node> nodes) { nodes_ = std::move(nodes); }

 private:
  int intern(const Node& node);
  int fold_binary(Op op, Kind kind, int a, int b);
  int without_neutral(Op op, int a, int b);
  int joined_factor(Op op, int a, int b);

  std::vector<Node> nodes_;
  std::vector<Captured> captured_;
};

// The node numbers that some root depends on, in order.
std::vector<int> order_of(const Graph& graph, const std::vector<int>& roots);

// A copy of `graph` with what `root` depends on only, numbered by a walk from it: the same function
// has the same copy, whatever else was parsed. `root` becomes its number there.
Graph canonical(const Graph& graph, int* root);

// One line a node: equal for equal functions.
std::string text_of(const Graph& graph, int root);

// What a known expression is.
struct Function {
  Graph graph;
  int root = 0;
  ExpressionKind kind = ExpressionKind::score;
};

// Whether a handle is one of this kind.
bool is_known(Expression expression, ExpressionKind kind);

// Of a handle from parse_expression; it stays for the life of the process.
const Function& function_of(Expression expression);

}  // namespace pantile::expression
