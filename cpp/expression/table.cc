// The table of all expressions that the process knows.
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "expression/parser.h"
#include "expression/print.h"
#include "expression/program.h"

namespace pantile {
namespace {

using expression::Captured;
using expression::Function;
using expression::kMaxNodes;
using expression::Problem;
using expression::Programs;

constexpr std::size_t kMaxText = 16384;
constexpr std::size_t kMaxName = 64;

const char* kind_name(ExpressionKind kind) {
  return kind == ExpressionKind::score ? "score" : "mask";
}

struct Table {
  std::mutex mutex;
  std::vector<std::unique_ptr<const Function>> functions;
  std::vector<std::unique_ptr<const Programs>> programs;  // of the functions
  std::map<std::string, Expression> by_text;              // of texts as they were written
  std::map<std::string, Expression> by_graph;
};

// Never destroyed: kernels may run while the process ends.
Table& table() {
  static Table* const all = new Table;
  return *all;
}

constexpr std::size_t kMostTexts = 65536;

Status captured_rule(const CapturedType* captured, int count) {
  constexpr StatusCode kInvalid = StatusCode::invalid_argument;
  if (count < 0 || count > kMaxCaptured) {
    return Status::error(kInvalid, "%d tensors are captured; at most %d are allowed", count,
                         kMaxCaptured);
  }
  for (int i = 0; i < count; ++i) {
    const std::string name = captured[i].name == nullptr ? "" : captured[i].name;
    bool good = !name.empty() && name.size() <= kMaxName && !expression::is_word(name) &&
                std::isdigit(static_cast<unsigned char>(name[0])) == 0;
    for (const char letter : name) {
      good = good && (std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_');
    }
    for (int other = 0; other < i; ++other) {
      good = good && name != captured[other].name;
    }
    if (!good) {
      return Status::error(kInvalid,
                           "a captured tensor is called '%.64s'; its name must consist of letters, "
                           "digits and _, and be no other name of the expression",
                           name.c_str());
    }
    if (captured[i].axes < 1 || captured[i].axes > kMaxCapturedAxes) {
      return Status::error(kInvalid, "%s has %d axes; it must have 1 to %d", name.c_str(),
                           captured[i].axes, kMaxCapturedAxes);
    }
  }
  return Status();
}

std::string text_key(ExpressionKind kind, const char* text, const CapturedType* captured,
                     int count) {
  std::string key = kind_name(kind);
  for (int i = 0; i < count; ++i) {
    key += std::string(" ") + captured[i].name + ":" +
           std::to_string(static_cast<int>(captured[i].dtype)) + "," +
           std::to_string(captured[i].axes);
  }
  return key + "\n" + text;
}

Status parse(ExpressionKind kind, const char* text, const CapturedType* captured, int count,
             std::unique_ptr<const Function>* function) {
  std::vector<Captured> tensors;
  for (int i = 0; i < count; ++i) {
    tensors.push_back(Captured{captured[i].name, captured[i].dtype, captured[i].axes});
  }
  try {
    *function =
        std::make_unique<const Function>(expression::parse_text(kind, text, std::move(tensors)));
  } catch (const Problem& problem) {
    const std::string cut = std::strlen(text) > 120 ? std::string(text, 117) + "..." : text;
    return Status::error(StatusCode::invalid_argument, "%s is \"%s\": at column %zu, %s",
                         kind_name(kind), cut.c_str(), problem.column, problem.text.c_str());
  }
  const std::size_t nodes = (*function)->graph.nodes().size();
  if (nodes > kMaxNodes) {
    return Status::error(StatusCode::invalid_argument,
                         "%s has %zu different operations; at most %d are allowed", kind_name(kind),
                         nodes, kMaxNodes);
  }
  return Status();
}

}  // namespace

Status parse_expression(ExpressionKind kind, const char* text, const CapturedType* captured,
                        int count, Expression* expression) {
  *expression = Expression::none;
  const Status status = captured_rule(captured, count);
  if (!status.ok()) {
    return status;
  }
  if (text == nullptr || std::strlen(text) > kMaxText) {
    return Status::error(StatusCode::invalid_argument,
                         "%s is %s; it must be a text of at most %zu bytes", kind_name(kind),
                         text == nullptr ? "null" : "longer", kMaxText);
  }
  const std::string key = text_key(kind, text, captured, count);
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (const auto known = all.by_text.find(key); known != all.by_text.end()) {
    *expression = known->second;
    return Status();
  }
  std::unique_ptr<const Function> function;
  const Status parsed = parse(kind, text, captured, count, &function);
  if (!parsed.ok()) {
    return parsed;
  }
  const std::string graph = kind_name(kind) + text_of(function->graph, function->root);
  const auto same = all.by_graph.find(graph);
  if (same != all.by_graph.end()) {
    *expression = same->second;
  } else {
    auto programs = std::make_unique<Programs>();
    if (!make_programs(*function, programs.get())) {
      return Status::error(StatusCode::invalid_argument,
                           "%s is too large: more than %d values are needed at a time",
                           kind_name(kind), expression::kMaxSlots);
    }
    if (kind == ExpressionKind::score) {
      programs->facts = facts_of(*function);
    }
    all.functions.push_back(std::move(function));
    all.programs.push_back(std::move(programs));
    *expression = static_cast<Expression>(all.functions.size());
    all.by_graph.emplace(graph, *expression);
  }
  if (all.by_text.size() < kMostTexts) {
    all.by_text.emplace(key, *expression);
  }
  return Status();
}

// 0 for a number that is no handle, which the rules of a problem refuse.
int captured_count(Expression expression) {
  const bool known = expression::is_known(expression, ExpressionKind::score) ||
                     expression::is_known(expression, ExpressionKind::mask);
  return known ? static_cast<int>(expression::function_of(expression).graph.captured().size()) : 0;
}

namespace expression {

const Function& function_of(Expression expression) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return *all.functions[static_cast<std::size_t>(expression) - 1];
}

bool is_known(Expression expression, ExpressionKind kind) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto number = static_cast<std::int64_t>(expression);
  return number >= 1 && number <= static_cast<std::int64_t>(all.functions.size()) &&
         all.functions[static_cast<std::size_t>(number) - 1]->kind == kind;
}

const Programs& programs_of(Expression expression) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return *all.programs[static_cast<std::size_t>(expression) - 1];
}

}  // namespace expression
}  // namespace pantile
