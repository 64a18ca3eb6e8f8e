// An expression at one pair, in double: what the reference backend does, and rare cases elsewhere.
#pragma once

#include "expression/program.h"

namespace pantile::expression {

struct Place {
  double s = 0.0;
  int batch = 0, head = 0, row = 0, key = 0;
};

// A captured tensor's element at its indices, which are moved into the tensor.
std::int64_t offset_of(const CapturedTensor& tensor, const std::int64_t* indices, int axes);

// Of a gradient, which is contiguous in the tensor's shape.
std::int64_t gradient_offset(const CapturedTensor& tensor, const std::int64_t* indices, int axes);

// The value of a score, or 1 or 0 of a mask.
double evaluate(const Programs& programs, const CapturedTensor* captured, const Place& place);

// The derivative of a score by s.
double evaluate_slope(const Programs& programs, const CapturedTensor* captured, const Place& place);

// Adds `ds` times the derivatives by the tensors to their gradients; null where none is wanted.
void add_gradients(const Programs& programs, const CapturedTensor* captured, const Place& place,
                   double ds, double* const* gradients);

}  // namespace pantile::expression
