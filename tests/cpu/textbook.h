// Textbook attention in the tensors' own type: every matrix is rounded to it, products are summed
// in f32. Its error against the reference in double is the yardstick of the accuracy contract.
#pragma once

#include "case.h"

namespace pantile::testing {

struct Errors {
  double o = 0.0, lse = 0.0, q = 0.0, k = 0.0, v = 0.0;  // root mean squares
};

// Errors of the textbook's outputs and gradients against the true ones, which are f32.
Errors textbook_errors(const Case& c, const Outputs& outputs, const Gradients& gradients);

}  // namespace pantile::testing
