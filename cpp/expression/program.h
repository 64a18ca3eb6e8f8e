// Programs of an expression (instruction.h), and their making.
#pragma once

#include <cstdint>
#include <vector>

#include "expression/graph.h"

namespace pantile::expression {

struct Code {
  std::vector<Instruction> once, each;
  std::vector<std::uint8_t> results;
  int slots = 0;
  Program view() const;
};

// How a GPU kernel leaves the scores behind an expression (print.h): found once, when it is parsed.
enum class ScoreForm : std::uint8_t { scaled, sloped, natural };
struct Facts {
  ScoreForm form = ScoreForm::natural;
  float factor = 1.0f;
  bool is_large = false;
  bool is_affine = false;
  bool has_bounded_slope = false;
  float grad_factor = 1.0f;
};

// All that the CPU needs of one expression. `slope` is the derivative of a score by s.
struct Programs {
  Code value;            // of a score or a mask
  Code value_and_slope;  // these: of a score
  Code gradients;
  std::vector<Addend> addends;
  Facts facts;  // of a score
};

// False where it needs more than kMaxSlots.
bool make_programs(const Function& function, Programs* programs);

const Programs& programs_of(Expression expression);

}  // namespace pantile::expression
