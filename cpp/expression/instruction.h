// An expression as a list of operations on vectors, for the CPU backend: no compiler is needed at
// run time. An operation reads and writes slots, each of which holds a value for every lane. Plain
// arrays: code for one instruction set may need no function of the standard library.
#pragma once

#include <cstdint>

#include "pantile/variant.h"

namespace pantile::expression {

enum class Op : std::uint8_t {
  constant,  // value
  input,     // number: an Input
  load,      // number: a captured tensor; args: its indices
  add,
  sub,
  mul,
  div,
  floordiv,  // of integers, rounded down; 0 for a divisor of 0
  mod,       // of integers, with the sign of the divisor; 0 for a divisor of 0
  min,
  max,
  lt,
  le,
  gt,
  ge,
  eq,
  ne,
  both,
  either,
  negate,  // of a condition: not
  neg,
  abs,
  exp,
  log,
  tanh,
  sqrt,
  real,   // of an integer
  where,  // args: condition, then, else
};

enum class Kind : std::uint8_t { condition, integer, real };
enum class Input : std::uint8_t { s, b, h, i, j };

// floor(a / b) and a - b * floor(a / b); 0 where b is 0.
constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  if (b == 0) {
    return 0;
  }
  const std::int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
constexpr std::int64_t floor_mod(std::int64_t a, std::int64_t b) {
  return b == 0 ? 0 : a - b * floor_div(a, b);
}

inline constexpr int kMaxArgs = kMaxCapturedAxes;
inline constexpr int kMaxSlots = 160;

struct Programs;  // program.h

struct Instruction {
  Op op = Op::constant;
  Kind operands = Kind::real;  // of the last operand; of a constant, its own
  std::uint8_t to = 0;
  std::uint8_t from[kMaxArgs] = {0, 0, 0, 0};
  std::uint8_t count = 0;  // of from
  std::uint8_t number = 0;
  CapturedDType dtype = CapturedDType::f32;  // of a load
  double value = 0.0;
};

struct Program {
  const Instruction* once = nullptr;  // what depends on the sequence and the head only
  int once_count = 0;
  const Instruction* each = nullptr;  // the rest
  int each_count = 0;
  const std::uint8_t* results = nullptr;  // slots of the roots
  int result_count = 0;
};

// What a load of a captured tensor adds to its gradient: dS times the derivative, at the indices.
struct Addend {
  std::uint8_t captured;
  std::uint8_t axes;
  std::uint8_t derivative;  // these two: among the results of the program
  std::uint8_t index[kMaxArgs];
};

}  // namespace pantile::expression
