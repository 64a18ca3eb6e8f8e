// The words of an expression's text, one at a time.
#pragma once

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace pantile::expression {

// What stops the parser; caught in parse_expression().
struct Problem {
  std::size_t column;
  std::string text;
};

enum class Token : std::uint8_t { end, number, name, sign };

class Lexer {
 public:
  explicit Lexer(const char* text) : text_(text) {}

 protected:
  [[noreturn]] void fail(const std::string& text) const { fail_at(start_, text); }
  [[noreturn]] static void fail_at(std::size_t column, const std::string& text) {
    throw Problem{column, text};
  }

  std::string shown() const {
    return token_ == Token::end ? "the end of the text" : "'" + word_ + "'";
  }

  void advance() {
    while (std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
      ++at_;
    }
    start_ = at_;
    const char first = text_[at_];
    if (first == '\0') {
      token_ = Token::end;
      word_.clear();
    } else if (std::isdigit(static_cast<unsigned char>(first)) != 0 ||
               (first == '.' && std::isdigit(static_cast<unsigned char>(text_[at_ + 1])) != 0)) {
      read_number();
    } else if (std::isalpha(static_cast<unsigned char>(first)) != 0 || first == '_') {
      while (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_') {
        ++at_;
      }
      token_ = Token::name;
      word_.assign(text_ + start_, at_ - start_);
    } else {
      read_sign();
    }
  }

  void read_number() {
    char* end = nullptr;
    number_ = std::strtod(text_ + start_, &end);
    at_ = static_cast<std::size_t>(end - text_);
    word_.assign(text_ + start_, at_ - start_);
    token_ = Token::number;
    is_integer_ = word_.find_first_not_of("0123456789") == std::string::npos;
    const bool joined =
        std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_';
    const bool hex = word_.find_first_of("xX") != std::string::npos;
    if (joined || (hex && word_.find('p') == std::string::npos)) {
      fail("cannot read the number " + word_);
    }
    if (is_integer_ && number_ > 2147483647.0) {
      fail(word_ + " has more than 32 bits; write it with a point");
    }
  }

  void read_sign() {
    static constexpr const char* kSigns[] = {"//", "<=", ">=", "==", "!=", "**"};
    std::size_t length = 1;
    for (const char* sign : kSigns) {
      if (std::strncmp(text_ + at_, sign, 2) == 0) {
        length = 2;
      }
    }
    at_ += length;
    token_ = Token::sign;
    word_.assign(text_ + start_, length);
  }

  bool is(const char* word) const {
    return (token_ == Token::sign || token_ == Token::name) && word_ == word;
  }
  bool take(const char* word) {
    if (!is(word)) {
      return false;
    }
    advance();
    return true;
  }
  void expect(const char* word) {
    if (!take(word)) {
      fail("expected '" + std::string(word) + "' before " + shown());
    }
  }

  const char* const text_;
  std::size_t at_ = 0, start_ = 0;  // behind the word at hand, and its first column
  Token token_ = Token::end;
  std::string word_;
  double number_ = 0.0;
  bool is_integer_ = false;
};

}  // namespace pantile::expression
