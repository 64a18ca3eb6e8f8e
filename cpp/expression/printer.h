// Writes the statements of a fragment's function, see print.h. A value is written where it changes:
//
//   constant  in place
//   head      once a head, as a member
//   line      once a line and step, in an array of two
//   linear    in the column, without s: its value at the thread's first column, likewise, and a
//             multiply-add with the constant that the column is
//   of s      k * s + t with a k of the head: a multiply-add of the raw score, the scale folded in
//   k pair      everything else, once an element
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "expression/graph.h"

namespace pantile::expression {

enum class Columns : std::uint8_t { keys, queries };

class Printer {
 public:
  Printer(const Function& function, Columns columns, bool exact, int first_captured)
      : graph_(function.graph),
        root_(function.root),
        columns_(columns),
        exact_(exact),
        first_captured_(first_captured) {}

  Graph& graph() { return graph_; }
  int root() const { return root_; }

  enum class Level : std::uint8_t { constant, head, line, pair };
  Level level(int x);
  bool needs_s(int x);

  // x = k * s + term; term is -1 where there is none.
  struct OfScore {
    int k, term;
  };
  std::optional<OfScore> of_score(int x);

  // d x / d column where x is linear in the column and needs no s, else -1; at most of a line.
  int column_slope(int x);

  // The names of values where an element is at hand: its line is [r], its column c.
  std::string element(int x);
  // At the thread's first column, of line r ("0", "1" or "r").
  std::string at_first_column(int x, const std::string& r);
  // Of values of a head.
  std::string of_head(int x);
  // A member for `text`, written once a head.
  std::string member(const std::string& type, const std::string& text);

  // What was written: declarations of members, and the statements of each place.
  const std::string& members() const { return members_; }
  const std::string& head_text() const { return head_; }
  const std::string& line_text() const { return line_; }
  const std::string& element_text() const { return element_; }
  int element_count() const { return element_count_; }
  bool loads_elements() const { return loads_elements_; }
  // For another function of the same members.
  void clear_function();

  std::string literal(int x) const;
  std::string load_text(const Node& node, const std::vector<std::string>& indices);

 private:
  std::string operation(const Node& node, const std::vector<std::string>& a);
  std::string compared(int x);
  std::string line_array(int x);
  bool is_column(int x) const;
  const char* type_of(int x) const;

  Graph graph_;
  const int root_;
  const Columns columns_;
  const bool exact_;
  const int first_captured_;
  std::map<int, Level> levels_;
  std::map<int, bool> needs_s_;
  std::map<int, int> slopes_;
  std::map<int, std::string> heads_, lines_, elements_;
  std::map<std::string, std::string> member_names_;
  std::string members_, head_, line_, element_;
  int element_count_ = 0;
  bool loads_elements_ = false;
};

}  // namespace pantile::expression
