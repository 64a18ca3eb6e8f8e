// What the texts of kernels with hooks say of expressions and masks of tensors, on both GPU
// families. Apart from what launchers include, because every .cu would read <string>. No CUDA
// headers.
#pragma once

#include <cstdint>
#include <string>

#include "pantile/problem.h"

namespace pantile::common {

// The structs of the expressions in namespace attn, or nothing without any. `exact`: of functions
// that have a fast form. `gradients`: of what the score captures, as
// BackwardProblem::wants_grad_captured.
std::string forward_expressions(Expression score, Expression mask, bool exact);
std::string backward_expressions(Expression score, Expression mask, bool exact,
                                 std::uint32_t gradients);

// "attn::StoredMask<3, false>", of a problem with such a mask.
std::string stored_mask_type(std::uint32_t forms, bool clauses);

}  // namespace pantile::common
