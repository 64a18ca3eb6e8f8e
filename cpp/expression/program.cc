#include "expression/program.h"

#include <algorithm>

namespace pantile::expression {
namespace {

bool depends_on_pair(const Node& node) {
  return node.op == Op::input && node.number != static_cast<int>(Input::b) &&
         node.number != static_cast<int>(Input::h);
}

// Gives slots to nodes in order. A slot is free again after the last operation that reads it; those
// of values that are computed once are never.
class Compiler {
 public:
  Compiler(const Graph& graph, const std::vector<int>& roots)
      : graph_(graph), roots_(roots), order_(order_of(graph, roots)) {}

  bool run(Code* code) {
    const std::size_t count = graph_.nodes().size();
    std::vector<bool> varies(count, false);
    std::vector<int> last(count, -1);  // position of the last reader
    for (std::size_t at = 0; at < order_.size(); ++at) {
      const Node& node = graph_.node(order_[at]);
      bool any = depends_on_pair(node);
      for (int i = 0; i < node.arg_count; ++i) {
        any = any || varies[index(node.args[i])];
        last[index(node.args[i])] = static_cast<int>(at);
      }
      varies[index(order_[at])] = any;
    }
    for (const int root : roots_) {
      last[index(root)] = static_cast<int>(order_.size());
    }
    std::vector<int> slot(count, -1);
    for (const bool pass : {false, true}) {
      for (std::size_t at = 0; at < order_.size(); ++at) {
        const int x = order_[at];
        if (varies[index(x)] == pass) {
          emit(x, pass, static_cast<int>(at), varies, last, &slot, code);
        }
      }
    }
    for (const int root : roots_) {
      code->results.push_back(static_cast<std::uint8_t>(slot[index(root)]));
    }
    code->slots = used_;
    return used_ <= kMaxSlots;
  }

 private:
  static std::size_t index(int x) { return static_cast<std::size_t>(x); }

  void emit(int x, bool varies, int at, const std::vector<bool>& all_vary,
            const std::vector<int>& last, std::vector<int>* slot, Code* code) {
    const Node& node = graph_.node(x);
    Instruction made;
    made.op = node.op;
    made.operands =
        node.arg_count > 0 ? graph_.node(node.args[node.arg_count - 1]).kind : node.kind;
    made.count = static_cast<std::uint8_t>(node.arg_count);
    made.number = static_cast<std::uint8_t>(node.number);
    made.value = node.value;
    if (node.op == Op::load) {
      made.dtype = graph_.captured()[index(node.number)].dtype;
    }
    for (int i = 0; i < node.arg_count; ++i) {
      made.from[i] = static_cast<std::uint8_t>((*slot)[index(node.args[i])]);
    }
    for (int i = 0; i < node.arg_count; ++i) {  // an operation may write where it reads
      const int arg = node.args[i];
      const bool again = std::find(node.args, node.args + i, arg) != node.args + i;
      if (!again && varies && all_vary[index(arg)] && last[index(arg)] == at) {
        free_.push_back((*slot)[index(arg)]);
      }
    }
    int to = used_;
    if (free_.empty() || !varies) {
      ++used_;
    } else {
      to = free_.back();
      free_.pop_back();
    }
    (*slot)[index(x)] = to;
    made.to = static_cast<std::uint8_t>(to);
    (varies ? code->each : code->once).push_back(made);
  }

  const Graph& graph_;
  const std::vector<int>& roots_;
  const std::vector<int> order_;
  std::vector<int> free_;
  int used_ = 0;
};

}  // namespace

Program Code::view() const {
  return Program{once.data(),    static_cast<int>(once.size()),
                 each.data(),    static_cast<int>(each.size()),
                 results.data(), static_cast<int>(results.size())};
}

bool make_programs(const Function& function, Programs* programs) {
  Graph graph = function.graph;
  const int root = function.root;
  if (!Compiler(graph, {root}).run(&programs->value)) {
    return false;
  }
  if (function.kind == ExpressionKind::mask) {
    return true;
  }
  int slope = graph.real(0.0);
  std::vector<int> roots;
  const auto result_of = [&roots](int x) {
    const auto found = std::find(roots.begin(), roots.end(), x);
    const auto number = static_cast<std::uint8_t>(found - roots.begin());
    if (found == roots.end()) {
      roots.push_back(x);
    }
    return number;
  };
  for (const auto& [x, derivative] : graph.derivatives(root)) {
    const Node node = graph.node(x);
    if (node.op == Op::input) {
      slope = derivative;
      continue;
    }
    Addend addend{};
    addend.captured = static_cast<std::uint8_t>(node.number);
    addend.axes = static_cast<std::uint8_t>(node.arg_count);
    addend.derivative = result_of(derivative);
    for (int i = 0; i < node.arg_count; ++i) {
      addend.index[i] = result_of(node.args[i]);
    }
    programs->addends.push_back(addend);
  }
  return Compiler(graph, {root, slope}).run(&programs->value_and_slope) &&
         Compiler(graph, roots).run(&programs->gradients);
}

}  // namespace pantile::expression
