// Scores and masks of the user's own (pantile/expression.h) from Python: the texts, the names of
// what they capture, and the tensors.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pantile/expression.h"
#include "planner.h"
#include "request.h"

namespace pantile::python {

// What a tensor may hold. bfloat16 of NumPy comes as uint16, as elsewhere.
inline CapturedDType captured_dtype(const TensorView& view) {
  const bool is_half = view.bits == 16;
  if (view.code == dlpack::kFloat && (view.bits == 32 || is_half)) {
    return is_half ? CapturedDType::f16 : CapturedDType::f32;
  }
  if (is_half && (view.code == dlpack::kBfloat || view.code == dlpack::kUInt)) {
    return CapturedDType::bf16;
  }
  if (view.code == dlpack::kInt && view.bits == 32) {
    return CapturedDType::i32;
  }
  if (view.code == dlpack::kBool) {
    return CapturedDType::boolean;
  }
  raise_type_error("%s has dtype %s; it must be float32, float16, bfloat16, int32 or bool",
                   view.name, dtype_text(view.code, view.bits).c_str());
}

inline CapturedTensor captured_tensor(const TensorView& view) {
  if (view.rank < 1 || view.rank > kMaxCapturedAxes) {
    raise_value_error("%s has %d axes; it must have 1 to %d", view.name, view.rank,
                      kMaxCapturedAxes);
  }
  CapturedTensor tensor;
  tensor.data = view.data;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] < 1) {
      raise_value_error("%s has shape %s; it must have an element at least", view.name,
                        shape_text(view.shape, view.rank).c_str());
    }
    tensor.size[axis] = view.shape[axis];
    tensor.stride[axis] = view.stride[axis];
  }
  return tensor;
}

// "a,b" as its names.
inline std::vector<std::string> split_names(const std::string& text) {
  std::vector<std::string> names;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

// One expression: `names` are its tensors, which are taken from `objects` on. Appends them to the
// request's.
inline Expression read_expression(ExpressionKind kind, const std::string& text,
                                  const std::vector<std::string>& names, const nb::object* objects,
                                  Request* request) {
  std::array<CapturedType, kMaxCaptured> types;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const TensorView view = read_tensor(objects[i], names[i].c_str());
    require_same_device(view, request->q);
    types[i] = CapturedType{names[i].c_str(), captured_dtype(view), view.rank};
    request->captured.push_back(captured_tensor(view));
  }
  Expression expression = Expression::none;
  raise_unless_ok(parse_expression(kind, text.c_str(), types.data(), static_cast<int>(names.size()),
                                   &expression));
  return expression;
}

// `names`: "a,b|c" are two tensors of the score and one of the mask.
inline void read_expressions(const std::string& score, const std::string& mask,
                             const std::string& names, const nb::object (&objects)[kMaxCaptured],
                             Request* request) {
  const std::size_t bar = std::min(names.find('|'), names.size());
  const std::vector<std::string> of_score = split_names(names.substr(0, bar));
  const std::vector<std::string> of_mask =
      split_names(bar < names.size() ? names.substr(bar + 1) : std::string());
  const std::size_t count = of_score.size() + of_mask.size();
  if (count > kMaxCaptured) {
    raise_value_error("score and mask capture %zu tensors; together they may capture %d", count,
                      kMaxCaptured);
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (objects[i].is_none()) {
      raise_value_error("captured%zu is None; captured_names is '%s'", i, names.c_str());
    }
  }
  request->captured.reserve(count);  // what follows points into it
  ForwardProblem& problem = request->problem;
  if (!score.empty()) {
    problem.variant.score =
        read_expression(ExpressionKind::score, score, of_score, objects, request);
    request->tensors.variant.score_captured = request->captured.data();
  }
  if (!mask.empty()) {
    problem.variant.mask_expression =
        read_expression(ExpressionKind::mask, mask, of_mask, objects + of_score.size(), request);
    request->tensors.variant.mask_captured = request->captured.data() + of_score.size();
  }
}

// Whether the text is an expression of tensors with these names, dtypes and numbers of axes; raises
// what is wrong with it. For objects that are made long before a call.
inline void check_expression(
    const std::string& kind, const std::string& text,
    const std::vector<std::tuple<std::string, std::string, int>>& tensors) {
  static constexpr std::pair<const char*, CapturedDType> kTypes[] = {
      {"float32", CapturedDType::f32},
      {"float16", CapturedDType::f16},
      {"bfloat16", CapturedDType::bf16},
      {"int32", CapturedDType::i32},
      {"bool", CapturedDType::boolean}};
  std::vector<CapturedType> types;
  for (const auto& [name, dtype, axes] : tensors) {
    CapturedType type{name.c_str(), CapturedDType::f32, axes};
    bool found = false;
    for (const auto& [known, value] : kTypes) {
      if (dtype == known) {
        type.dtype = value;
        found = true;
      }
    }
    if (!found) {
      raise_type_error("%s has dtype %s; it must be float32, float16, bfloat16, int32 or bool",
                       name.c_str(), dtype.c_str());
    }
    types.push_back(type);
  }
  Expression expression = Expression::none;
  raise_unless_ok(parse_expression(kind == "mask" ? ExpressionKind::mask : ExpressionKind::score,
                                   text.c_str(), types.data(), static_cast<int>(types.size()),
                                   &expression));
}

// Elements of the score's tensors whose bit is set.
inline std::int64_t wanted_elements(const Request& request, std::uint32_t wanted) {
  const int count = captured_count(request.problem.variant.score);
  std::int64_t elements = 0;
  for (int i = 0; i < count; ++i) {
    if ((wanted >> i & 1u) != 0) {
      elements += captured_elements(request.captured[static_cast<std::size_t>(i)]);
    }
  }
  return elements;
}

// fp32 and contiguous in the tensor's shape, None for those that are not wanted.
inline void take_captured_gradients(nb::handle objects, const Request& request,
                                    std::array<float*, kMaxCaptured>* memory,
                                    BackwardProblem* problem, BackwardTensors* tensors) {
  if (objects.is_none()) {
    return;
  }
  const int count = captured_count(request.problem.variant.score);
  int index = 0;
  for (const nb::handle object : nb::cast<nb::tuple>(objects)) {
    if (!object.is_none() && index < count) {
      const CapturedTensor& like = request.captured[static_cast<std::size_t>(index)];
      const TensorView view = read_tensor(object, "grad_captured");
      require_float32(view);
      require_same_device(view, request.q);
      require_contiguous(view);
      std::int64_t elements = 1;
      for (int axis = 0; axis < view.rank; ++axis) {
        elements *= view.shape[axis];
      }
      if (elements != captured_elements(like)) {
        raise_value_error("grad_captured has shape %s; it must be that of tensor %d of the score",
                          shape_text(view.shape, view.rank).c_str(), index);
      }
      (*memory)[static_cast<std::size_t>(index)] = static_cast<float*>(view.data);
      problem->wants_grad_captured |= std::uint32_t{1} << index;
    }
    ++index;
  }
  problem->grad_captured_elements = wanted_elements(request, problem->wants_grad_captured);
  if (problem->wants_grad_captured != 0) {
    tensors->variant.captured = memory->data();
  }
}

}  // namespace pantile::python
