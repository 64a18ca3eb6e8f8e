// Rules that validate.cc, validate_tensors.cc and validate_fp8.cc share.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "host/shape.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::host {

inline constexpr std::int64_t kMaxLength = (std::int64_t{1} << 29) - 1;  // core/geometry.h
// Of sequences, rows and work ids, which are int32.
inline constexpr std::int64_t kMaxCount = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kMaxReach = std::int64_t{1} << 60;  // elements; bytes fit 63 bits

Status between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high);

// Keys in ranges or pages (validate_keys.cc).
Status key_places_rule(const ForwardProblem& problem);
Status pages_rule(const ForwardProblem& problem);
Status key_statistics_rule(const BackwardProblem& problem);

// The first error of a list, or ok.
Status first_error(std::initializer_list<Status> list);

inline constexpr const char* kTensorAxes[kAxes] = {"batch", "seq", "head"};

// Alignment and strides of a tensor that is read; of one that is written, also that it does not
// overlap itself.
Status input_layout(const char* name, const Layout& layout, const TensorShape& shape, DType dtype,
                    const char* const* axis_names = kTensorAxes);
Status output_layout(const char* name, const Layout& layout, const TensorShape& shape, DType dtype,
                     const char* const* axis_names = kTensorAxes);

Status tensor_pointer(const char* name, const void* pointer, const Layout& layout, bool empty);
// `wanted` is the value of the field `because`.
Status optional_pointer(const char* name, const void* pointer, bool wanted, const char* because);
Status sequence_pointers(const ForwardProblem& problem, const ForwardTensors& tensors);

// What dtype e4m3 adds to a forward problem and its tensors; ok for the other dtypes.
Status fp8_rule(const ForwardProblem& problem);
// The backward does not read nonfinite_v.
Status fp8_pointers(const ForwardProblem& problem, const Fp8Tensors& tensors, bool is_backward);

// What changes plain attention (variant.h), its tensors and their gradients.
Status variant_rule(const ForwardProblem& problem);
Status variant_gradients_rule(const BackwardProblem& problem);
Status variant_pointers(const ForwardProblem& problem, const VariantTensors& tensors);
Status variant_gradient_pointers(const BackwardProblem& problem, const VariantGradients& gradients);

}  // namespace pantile::host
