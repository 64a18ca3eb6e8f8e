// Scores and masks of the user's own, as text: an expression of
//
//   s        the score: scale * q . k and what softcap, ALiBi and bias made of it; not in a mask
//   b h i j  numbers of the sequence, the query head, the query and the key, from 0; i and j count
//            from the start of their sequence
//   names    captured tensors, indexed by integers: slope[h], table[h, i - j]
//
// with numbers, + - * / // %, comparisons, `and or not` (& | ~), `x if c else y`, where(c, x, y),
// min, max, exp, log, tanh, sqrt, abs, inf, True and False. Names may be given to parts:
//
//   d = max(i - j, 0); s + table[h, d]
//
// A score is a number, a mask a condition: true shows the pair. Integers have 32 bits and wrap; /
// makes real numbers, // and % round down and give 0 for a divisor of 0. An index outside of its
// axis reads the nearest element there is: an expression is also evaluated at pairs that a mask
// hides.
#pragma once

#include "pantile/export.h"
#include "pantile/status.h"
#include "pantile/variant.h"

namespace pantile {

enum class ExpressionKind : std::uint8_t { score, mask };

// What a name of the text stands for.
struct CapturedType {
  const char* name = nullptr;  // letters, digits and _; not one of the words above
  CapturedDType dtype = CapturedDType::f32;
  int axes = 1;  // 1 to kMaxCapturedAxes
};

// A handle of the expression in `text`, whose tensors are `captured`, in this order in
// VariantTensors. Equal functions, however they are written, have one handle, for the life of the
// process. An error names the column, from 0. Safe from any thread.
PANTILE_API Status parse_expression(ExpressionKind kind, const char* text,
                                    const CapturedType* captured, int captured_count,
                                    Expression* expression);

// How many tensors an expression captures; 0 for Expression::none.
PANTILE_API int captured_count(Expression expression);

}  // namespace pantile
