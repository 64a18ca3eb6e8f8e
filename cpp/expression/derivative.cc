// Derivatives of a graph, by the chain rule from its root to its leaves.
#include <algorithm>
#include <utility>

#include "expression/graph.h"

namespace pantile::expression {
namespace {

// Collects d root / d node in `sums`, -1 where there is none yet.
class Chain {
 public:
  Chain(Graph& graph, int root) : graph_(graph), sums_(graph.nodes().size(), -1) {
    sums_[static_cast<std::size_t>(root)] = graph.real(1.0);
  }

  int sum(int x) const { return sums_[static_cast<std::size_t>(x)]; }

  // What `x` and its derivative `gradient` add to those of its operands.
  void pass_on(int x, int gradient) {
    const Node node = graph_.node(x);  // a copy: the graph grows
    const int a = node.args[0], b = node.args[1], c = node.args[2];
    switch (node.op) {
      case Op::add:
        add(a, gradient);
        add(b, gradient);
        break;
      case Op::sub:
        add(a, gradient);
        add(b, graph_.unary(Op::neg, gradient));
        break;
      case Op::mul:
        add(a, product(gradient, b));
        add(b, product(gradient, a));
        break;
      case Op::div:
        add(a, graph_.binary(Op::div, gradient, b));
        add(b, graph_.unary(Op::neg, graph_.binary(Op::div, product(gradient, x), b)));
        break;
      case Op::min:
      case Op::max: {
        const int first = graph_.binary(node.op == Op::min ? Op::le : Op::ge, a, b);
        add(a, graph_.where(first, gradient, graph_.real(0.0)));
        add(b, graph_.where(first, graph_.real(0.0), gradient));
        break;
      }
      case Op::where:
        add(b, graph_.where(a, gradient, graph_.real(0.0)));
        add(c, graph_.where(a, graph_.real(0.0), gradient));
        break;
      default: add(a, product(gradient, slope(node, x)));
    }
  }

 private:
  // Of a function of one operand whose value is node `x`.
  int slope(const Node& node, int x) {
    const int a = node.args[0];
    const int one = graph_.real(1.0);
    switch (node.op) {
      case Op::exp: return x;
      case Op::log: return graph_.binary(Op::div, one, a);
      case Op::tanh: return graph_.binary(Op::sub, one, product(x, x));
      case Op::sqrt: return graph_.binary(Op::div, graph_.real(0.5), x);
      case Op::abs:
        return graph_.where(graph_.binary(Op::ge, a, graph_.real(0.0)), one, graph_.real(-1.0));
      default: return graph_.real(-1.0);  // neg
    }
  }

  int product(int a, int b) {
    const int zero = graph_.real(0.0);
    return a == zero || b == zero ? zero : graph_.binary(Op::mul, a, b);
  }

  void add(int x, int gradient) {
    if (graph_.node(x).kind == Kind::real && !graph_.is_constant(x)) {
      int& sum = sums_[static_cast<std::size_t>(x)];
      sum = sum < 0 ? gradient : graph_.binary(Op::add, sum, gradient);
    }
  }

  Graph& graph_;
  std::vector<int> sums_;
};

}  // namespace

std::vector<std::pair<int, int>> Graph::derivatives(int root) {
  std::vector<std::pair<int, int>> result;
  const std::vector<int> order = order_of(*this, {root});
  Chain chain(*this, root);
  for (auto x = order.rbegin(); x != order.rend(); ++x) {
    const int gradient = chain.sum(*x);
    if (gradient < 0 || is_real_constant(gradient, 0.0)) {
      continue;
    }
    const Op op = node(*x).op;
    if (op == Op::input || op == Op::load) {
      result.emplace_back(*x, gradient);
    } else if (node(*x).arg_count > 0 && op != Op::real) {
      chain.pass_on(*x, gradient);
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace pantile::expression
