#include "expression/parser.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace pantile::expression {
namespace {

constexpr int kMaxDepth = 100;  // of brackets and operands in each other

struct Function1 {
  const char* name;
  Op op;
};
constexpr Function1 kFunctions[] = {{"exp", Op::exp},   {"log", Op::log},    {"tanh", Op::tanh},
                                    {"sqrt", Op::sqrt}, {"abs", Op::abs},    {"min", Op::min},
                                    {"max", Op::max},   {"where", Op::where}};
constexpr const char* kInputs[] = {"s", "b", "h", "i", "j"};
constexpr const char* kWords[] = {"and", "or", "not", "if", "else", "True", "False", "inf"};

// Recursive descent, with Python's precedence of operators.
class Parser : Lexer {
 public:
  Parser(ExpressionKind kind, const char* text, std::vector<Captured> captured)
      : Lexer(text), kind_(kind), graph_(std::move(captured)) {}

  Function run() {
    advance();
    int value = statement();
    while (value < 0) {  // a part that got a name
      value = statement();
    }
    if (token_ != Token::end) {
      fail("cannot use " + shown());
    }
    const bool is_condition = graph_.node(value).kind == Kind::condition;
    if (kind_ == ExpressionKind::mask && !is_condition) {
      fail_at(0, "it is a number; a mask must be a condition, true where the pair is visible");
    }
    if (kind_ == ExpressionKind::score) {
      if (is_condition) {
        fail_at(0, "it is a condition; a score must be a number");
      }
      value = graph_.as_real(value);
    }
    Graph graph = canonical(graph_, &value);
    return Function{std::move(graph), value, kind_};
  }

 private:
  // ---- kinds

  Kind kind_of(int x) const { return graph_.node(x).kind; }
  int number_at(std::size_t column, int x) const {
    if (kind_of(x) == Kind::condition) {
      fail_at(column,
              "a condition stands where a number must be; where(condition, x, y) makes one");
    }
    return x;
  }
  int condition_at(std::size_t column, int x) const {
    if (kind_of(x) != Kind::condition) {
      fail_at(column, "a number stands where a condition must be");
    }
    return x;
  }
  int integer_at(std::size_t column, int x, const char* what) const {
    if (kind_of(x) != Kind::integer) {
      fail_at(column, std::string(what) + " must be an integer");
    }
    return x;
  }
  int checked(int x) const {
    if (graph_.nodes().size() > 4 * kMaxNodes) {
      fail("it has too many operations; at most " + std::to_string(kMaxNodes) + " are allowed");
    }
    return x;
  }

  // ---- grammar

  // `name = expression ;`, for which it returns -1, or the last expression.
  int statement() {
    if (token_ == Token::name && !is_word(word_)) {
      std::size_t next = at_;
      while (std::isspace(static_cast<unsigned char>(text_[next])) != 0) {
        ++next;
      }
      if (text_[next] == '=' && text_[next + 1] != '=') {
        const std::string name = word_;
        if (is_captured(name) >= 0) {
          fail("'" + name + "' is a captured tensor");
        }
        advance();
        advance();
        const int value = expression();
        expect(";");
        names_[name] = value;
        return -1;
      }
    }
    return expression();
  }

  int expression() {
    if (++depth_ > kMaxDepth) {
      fail("it is nested too deeply; at most " + std::to_string(kMaxDepth) + " levels are allowed");
    }
    const std::size_t column = start_;
    int value = either();
    if (take("if")) {
      const std::size_t at = start_;
      const int condition = condition_at(at, either());
      expect("else");
      const std::size_t second = start_;
      value = choice(condition, column, value, second, expression());
    }
    --depth_;
    return checked(value);
  }

  int choice(int condition, std::size_t column_a, int a, std::size_t column_b, int b) {
    if ((kind_of(a) == Kind::condition) != (kind_of(b) == Kind::condition)) {
      number_at(column_a, a);
      number_at(column_b, b);
    }
    return graph_.where(condition, a, b);
  }

  int either() {
    const std::size_t column = start_;
    int value = both();
    while (take("or")) {
      const std::size_t second = start_;
      const int other = both();
      value = graph_.binary(Op::either, condition_at(column, value), condition_at(second, other));
    }
    return value;
  }

  int both() {
    const std::size_t column = start_;
    int value = negation();
    while (take("and")) {
      const std::size_t second = start_;
      const int other = negation();
      value = graph_.binary(Op::both, condition_at(column, value), condition_at(second, other));
    }
    return value;
  }

  int negation() {
    if (take("not")) {
      if (++depth_ > kMaxDepth) {
        fail("it is nested too deeply");
      }
      const std::size_t column = start_;
      const int value = negation();
      --depth_;
      return graph_.unary(Op::negate, condition_at(column, value));
    }
    return comparison();
  }

  // a < b < c is a < b and b < c.
  int comparison() {
    static constexpr std::pair<const char*, Op> kSigns[] = {{"<", Op::lt},  {"<=", Op::le},
                                                            {">", Op::gt},  {">=", Op::ge},
                                                            {"==", Op::eq}, {"!=", Op::ne}};
    std::size_t column = start_;
    int left = alternatives();
    int result = -1;
    for (bool found = true; found;) {
      found = false;
      for (const auto& [sign, op] : kSigns) {
        if (!found && is(sign)) {
          advance();
          const std::size_t second = start_;
          const int right = alternatives();
          const int one = graph_.binary(op, number_at(column, left), number_at(second, right));
          result = result < 0 ? one : graph_.binary(Op::both, result, one);
          left = right;
          column = second;
          found = true;
        }
      }
    }
    return result < 0 ? left : result;
  }

  int alternatives() {
    const std::size_t column = start_;
    int value = conjunction();
    while (take("|")) {
      const std::size_t second = start_;
      const int other = conjunction();
      value = graph_.binary(Op::either, condition_at(column, value), condition_at(second, other));
    }
    return value;
  }

  int conjunction() {
    const std::size_t column = start_;
    int value = sum();
    while (take("&")) {
      const std::size_t second = start_;
      const int other = sum();
      value = graph_.binary(Op::both, condition_at(column, value), condition_at(second, other));
    }
    return value;
  }

  int sum() {
    const std::size_t column = start_;
    int value = product();
    while (is("+") || is("-")) {
      const Op op = is("+") ? Op::add : Op::sub;
      advance();
      const std::size_t second = start_;
      const int other = product();
      value = graph_.binary(op, number_at(column, value), number_at(second, other));
    }
    return value;
  }

  int product() {
    const std::size_t column = start_;
    int value = factor();
    while (is("*") || is("/") || is("//") || is("%")) {
      const std::string sign = word_;
      advance();
      const std::size_t second = start_;
      const int other = factor();
      number_at(column, value);
      number_at(second, other);
      const bool whole = sign == "//" || sign == "%";
      if (whole) {
        integer_at(column, value, "an operand of // or %");
        integer_at(second, other, "an operand of // or %");
      }
      const Op op = sign == "*"    ? Op::mul
                    : sign == "/"  ? Op::div
                    : sign == "//" ? Op::floordiv
                                   : Op::mod;
      value = graph_.binary(op, value, other);
    }
    return checked(value);
  }

  int factor() {
    if (is("-") || is("+") || is("~")) {
      if (++depth_ > kMaxDepth) {
        fail("it is nested too deeply");
      }
      const std::string sign = word_;
      advance();
      const std::size_t column = start_;
      const int value = factor();
      --depth_;
      if (sign == "~") {
        return graph_.unary(Op::negate, condition_at(column, value));
      }
      number_at(column, value);
      return sign == "-" ? graph_.unary(Op::neg, value) : value;
    }
    return primary();
  }

  int primary() {
    if (token_ == Token::number) {
      const int value =
          is_integer_ ? graph_.integer(static_cast<std::int64_t>(number_)) : graph_.real(number_);
      advance();
      return value;
    }
    if (take("(")) {
      const int value = expression();
      expect(")");
      return value;
    }
    if (token_ != Token::name) {
      fail("cannot use " + shown() + "; " + allowed());
    }
    return named();
  }

  int named() {
    const std::string name = word_;
    const std::size_t column = start_;
    for (const Function1& function : kFunctions) {
      if (name == function.name) {
        advance();
        return call(function);
      }
    }
    const int captured = is_captured(name);
    if (captured >= 0) {
      advance();
      return load(captured);
    }
    const int value = constant_or_input(name);
    if (value < 0) {
      fail_at(column, "'" + name + "' is not known; " + allowed());
    }
    advance();
    if (is("[")) {
      fail("only captured tensors can be indexed, '" + name + "' is none");
    }
    if (is("(")) {
      fail("'" + name + "' cannot be called");
    }
    return value;
  }

  int constant_or_input(const std::string& name) {
    if (name == "True" || name == "False") {
      return graph_.condition(name == "True");
    }
    if (name == "inf") {
      return graph_.real(std::numeric_limits<double>::infinity());
    }
    for (std::size_t i = 0; i < std::size(kInputs); ++i) {
      if (name == kInputs[i] && (i > 0 || kind_ == ExpressionKind::score)) {
        return graph_.input(static_cast<Input>(i));
      }
    }
    const auto part = names_.find(name);
    return part == names_.end() ? -1 : part->second;
  }

  int is_captured(const std::string& name) const {
    for (std::size_t i = 0; i < graph_.captured().size(); ++i) {
      if (name == graph_.captured()[i].name) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  int call(const Function1& function) {
    expect("(");
    std::vector<int> arguments;
    std::vector<std::size_t> columns;
    do {
      columns.push_back(start_);
      arguments.push_back(expression());
    } while (take(",") && arguments.size() < 4);
    const bool two = function.op == Op::min || function.op == Op::max;
    const std::size_t count = function.op == Op::where ? 3 : two ? 2 : 1;
    if (arguments.size() != count) {
      fail_at(columns[0], std::string(function.name) + " takes " + std::to_string(count) +
                              " arguments, " + std::to_string(arguments.size()) + " are given");
    }
    expect(")");
    if (function.op == Op::where) {
      condition_at(columns[0], arguments[0]);
      return choice(arguments[0], columns[1], arguments[1], columns[2], arguments[2]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      number_at(columns[i], arguments[i]);
    }
    return two ? graph_.binary(function.op, arguments[0], arguments[1])
               : graph_.unary(function.op, arguments[0]);
  }

  int load(int captured) {
    const Captured& tensor = graph_.captured()[static_cast<std::size_t>(captured)];
    const std::string axes = std::to_string(tensor.axes);
    if (!is("[")) {
      fail("'" + tensor.name + "' is a tensor; it needs " + axes + " indices in [ ]");
    }
    advance();
    int indices[kMaxArgs];
    int count = 0;
    const std::size_t column = start_;
    do {
      const std::size_t at = start_;
      const int index = integer_at(at, expression(), "an index");
      if (count < kMaxArgs) {
        indices[count] = index;
      }
      ++count;
    } while (take(","));
    if (count != tensor.axes) {
      fail_at(column, "'" + tensor.name + "' has " + axes + " axes, and " + std::to_string(count) +
                          " indices are given");
    }
    expect("]");
    return graph_.load(captured, indices, count);
  }

  std::string allowed() const {
    std::string names = kind_ == ExpressionKind::score ? "s, b, h, i, j" : "b, h, i, j";
    for (const Captured& captured : graph_.captured()) {
      names += ", " + captured.name;
    }
    return "allowed: " + names +
           ", numbers, + - * / // %, comparisons, and or not, x if c else y, where min max exp log "
           "tanh sqrt abs";
  }

  const ExpressionKind kind_;
  Graph graph_;
  std::map<std::string, int> names_;  // of parts
  int depth_ = 0;
};

}  // namespace

bool is_word(const std::string& name) {
  for (const char* word : kWords) {
    if (name == word) {
      return true;
    }
  }
  for (const char* word : kInputs) {
    if (name == word) {
      return true;
    }
  }
  for (const Function1& function : kFunctions) {
    if (name == function.name) {
      return true;
    }
  }
  return false;
}

Function parse_text(ExpressionKind kind, const char* text, std::vector<Captured> captured) {
  return Parser(kind, text, std::move(captured)).run();
}

}  // namespace pantile::expression
