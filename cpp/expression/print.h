// An expression as C++ for kernels that are compiled at run time: hooks of attn/variant.cuh and
// attn/variant_grad.cuh, for a thread that holds two lines of a tile of scores. In the forward
// lines are queries and columns keys; in the backward, whose scores are transposed, the other way
// round. Columns are constants counted from the thread's first.
//
// Nothing of the user's text gets there: everything is written from the graph, and tensors have
// numbers for names. Equal functions have equal text.
#pragma once

#include <string>

#include "expression/program.h"

namespace pantile::expression {

// ScoreForm: how the forward's hook leaves its scores.
//   scaled   as they were, with terms that need no s added to them: `factor` times as many logits
//            in a unit as before
//   sloped   the same with a term that is linear in the key, which is left to the exponent
//            (SlopedLogits)
//   natural  others: `factor` natural logits in a unit
// Whether it needs more registers than a softcap: `is_large`. Affine scores are s + something
// without s: in the backward, what is left of the row's LSE stays in s. Others have `grad_factor`
// natural logits in a unit of their value; has_bounded_slope: and finite slopes.
Facts facts_of(const Function& score);

// `exact`: tanh with an error of 2^-22 in place of 2^-11.
// struct UserScore.
std::string print_forward_score(const Function& score, bool exact);

// The same for a backward, with the gradients of the captured tensors whose bit is set; only affine
// scores have those.
std::string print_backward_score(const Function& score, bool exact, std::uint32_t gradients);

// struct UserMask. Its tensors follow `first_captured` others.
std::string print_forward_mask(const Function& mask, int first_captured);
std::string print_backward_mask(const Function& mask, int first_captured);

}  // namespace pantile::expression
