// The variant of a call (pantile/variant.h) from Python: a tuple of tensors, or None, and numbers,
// in the order of pantile._schema.VARIANT.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "expression.h"
#include "pantile/pantile.h"
#include "request.h"

namespace pantile::python {

// Tensors that are null are not part of the variant.
struct VariantArguments {
  nb::object alibi, sinks, bias, dropout_seed;
  nb::object mask, query_ids, key_ids, block_mask, prefixes;
  nb::object captured0, captured1, captured2, captured3, captured4, captured5;  // by expressions
  double softcap = 0.0;
  std::int64_t dropout = 0;
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::int64_t query_offset = 0;
  std::int64_t key_offset = 0;
  std::int64_t mask_block = 0;    // of block_mask
  std::int64_t mask_clauses = 0;  // as Variant::mask_clauses
  std::string score;              // texts of expressions; empty: none
  std::string mask_expression;
  std::string captured_names;  // of the tensors: "a,b|c" are two of the score and one of the mask
};

template <class Value>
struct VariantField {
  const char* name;
  Value VariantArguments::* member;
};
template <class Value>
VariantField(const char*, Value VariantArguments::*) -> VariantField<Value>;

inline constexpr std::tuple kVariantFields{
    VariantField{"alibi", &VariantArguments::alibi},
    VariantField{"sinks", &VariantArguments::sinks},
    VariantField{"bias", &VariantArguments::bias},
    VariantField{"dropout_seed", &VariantArguments::dropout_seed},
    VariantField{"mask", &VariantArguments::mask},
    VariantField{"query_ids", &VariantArguments::query_ids},
    VariantField{"key_ids", &VariantArguments::key_ids},
    VariantField{"block_mask", &VariantArguments::block_mask},
    VariantField{"prefixes", &VariantArguments::prefixes},
    VariantField{"captured0", &VariantArguments::captured0},
    VariantField{"captured1", &VariantArguments::captured1},
    VariantField{"captured2", &VariantArguments::captured2},
    VariantField{"captured3", &VariantArguments::captured3},
    VariantField{"captured4", &VariantArguments::captured4},
    VariantField{"captured5", &VariantArguments::captured5},
    VariantField{"softcap", &VariantArguments::softcap},
    VariantField{"dropout", &VariantArguments::dropout},
    VariantField{"batch_offset", &VariantArguments::batch_offset},
    VariantField{"head_offset", &VariantArguments::head_offset},
    VariantField{"query_offset", &VariantArguments::query_offset},
    VariantField{"key_offset", &VariantArguments::key_offset},
    VariantField{"mask_block", &VariantArguments::mask_block},
    VariantField{"mask_clauses", &VariantArguments::mask_clauses},
    VariantField{"score", &VariantArguments::score},
    VariantField{"mask_expression", &VariantArguments::mask_expression},
    VariantField{"captured_names", &VariantArguments::captured_names},
};
inline constexpr std::size_t kVariantFieldCount = std::tuple_size_v<decltype(kVariantFields)>;

inline nb::tuple variant_field_names() {
  nb::list names;
  std::apply([&](const auto&... field) { (names.append(field.name), ...); }, kVariantFields);
  return nb::tuple(names);
}

inline VariantArguments variant_arguments(nb::handle object) {
  const nb::tuple values = nb::cast<nb::tuple>(object);
  if (values.size() != kVariantFieldCount) {
    raise_type_error("a variant has %zu fields; %zu were given", kVariantFieldCount, values.size());
  }
  VariantArguments arguments;
  std::size_t index = 0;
  std::apply(
      [&](const auto&... field) {
        (read_field(values[index++], field.name, &(arguments.*field.member)), ...);
      },
      kVariantFields);
  return arguments;
}

// fp32, [heads_q], or with `by_batch` also [batch, heads_q].
inline const float* read_per_head(nb::handle object, const char* name, const Request& request,
                                  bool* by_batch) {
  const ForwardProblem& problem = request.problem;
  const TensorView view = read_tensor(object, name);
  require_float32(view);
  require_same_device(view, request.q);
  if (by_batch != nullptr && view.rank == 2) {
    *by_batch = true;
    require_shape(view, {problem.batch, problem.heads_q});
  } else {
    require_shape(view, {problem.heads_q});
  }
  if (!view.contiguous()) {
    raise_value_error("%s has strides %s; it must be contiguous", name,
                      shape_text(view.stride, view.rank).c_str());
  }
  return static_cast<const float*>(view.data);
}

// [batch | 1, heads_q | 1, seqlen_q | 1, seqlen_k]. `runs`: the memory is there and will be read.
inline void read_bias(nb::handle object, bool runs, Request* request) {
  ForwardProblem& problem = request->problem;
  const TensorView view = read_tensor(object, "bias");
  require_same_device(view, request->q);
  const bool f32 = view.code == dlpack::kFloat && view.bits == 32;
  if (!f32 && (view.code != request->q.code || view.bits != request->q.bits)) {
    raise_type_error("bias has dtype %s; it must be float32 or the dtype of q, %s",
                     dtype_text(view.code, view.bits).c_str(),
                     dtype_text(request->q.code, request->q.bits).c_str());
  }
  const std::int64_t full[] = {problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k};
  bool fits = view.rank == 4 && view.shape[3] == full[3];
  for (int axis = 0; axis < 3 && fits; ++axis) {
    fits = view.shape[axis] == 1 || view.shape[axis] == full[axis];
  }
  if (!fits) {
    raise_value_error("bias has shape %s; it must be %s, of which the first three may be 1",
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(full, 4).c_str());
  }
  if (runs && view.shape[3] > 1 && view.stride[3] != 1) {
    raise_value_error("bias has strides %s; that along keys must be 1",
                      shape_text(view.stride, 4).c_str());
  }
  const auto stride = [&](int axis) { return view.shape[axis] == 1 ? 0 : view.stride[axis]; };
  problem.variant.has_bias = true;
  problem.variant.bias_dtype = f32 ? DType::f32 : problem.dtype;
  problem.variant.bias = BiasLayout{stride(0), stride(1), stride(2), view.base_align_bytes()};
  request->tensors.variant.bias = view.data;
}

inline void read_dropout_seed(nb::handle object, Request* request) {
  const TensorView view = read_tensor(object, "dropout_seed");
  if (view.code != dlpack::kInt || view.bits != 64) {
    raise_type_error("dropout_seed has dtype %s; it must be int64",
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request->q);
  require_shape(view, {2});
  require_contiguous(view);
  request->tensors.variant.dropout_seed = static_cast<const std::int64_t*>(view.data);
}

// Bool or uint8, [batch | 1, heads_q | 1, rows, columns] of blocks of `block` queries and keys, or
// with 0 of elements, whose rows may be shared.
inline const std::uint8_t* read_mask(nb::handle object, const char* name, std::int64_t block,
                                     bool runs, const Request& request, MaskLayout* layout) {
  const ForwardProblem& problem = request.problem;
  const TensorView view = read_tensor(object, name);
  if (view.bits != 8 || (view.code != dlpack::kBool && view.code != dlpack::kUInt)) {
    raise_type_error("mask has dtype %s; it must be bool",
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request.q);
  if (block < 0 || block > 1 << 20) {
    raise_value_error("block of mask is %lld; it must be 64 or 128", static_cast<long long>(block));
  }
  const std::int64_t size = std::max<std::int64_t>(block, 1);
  const std::int64_t full[] = {problem.batch, problem.heads_q, (problem.seqlen_q + size - 1) / size,
                               (problem.seqlen_k + size - 1) / size};
  bool fits = view.rank == 4 && view.shape[3] == full[3];
  for (int axis = 0; axis < 3 && fits; ++axis) {
    const bool shared = view.shape[axis] == 1 && (axis < 2 || block == 0);
    fits = shared || view.shape[axis] == full[axis];
  }
  if (!fits) {
    raise_value_error("mask has shape %s; it must be %s, of which the first %s may be 1",
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(full, 4).c_str(), block == 0 ? "three" : "two");
  }
  if (runs && view.shape[3] > 1 && view.stride[3] != 1) {
    raise_value_error("mask has strides %s; that along keys must be 1",
                      shape_text(view.stride, 4).c_str());
  }
  const auto stride = [&](int axis) { return view.shape[axis] == 1 ? 0 : view.stride[axis]; };
  *layout = MaskLayout{stride(0), stride(1), stride(2)};
  return static_cast<const std::uint8_t*>(view.data);
}

// int32 [batch | 1, length]; the stride between sequences.
inline const std::int32_t* read_ids(nb::handle object, const char* name, std::int64_t length,
                                    bool runs, const Request& request, std::int64_t* stride) {
  const TensorView view = read_tensor(object, name);
  if (view.code != dlpack::kInt || view.bits != 32) {
    raise_type_error("%s has dtype %s; it must be int32", name,
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request.q);
  const std::int64_t full[] = {request.problem.batch, length};
  if (view.rank != 2 || view.shape[1] != length ||
      (view.shape[0] != 1 && view.shape[0] != full[0])) {
    raise_value_error("%s has shape %s; it must be %s, of which the first may be 1", name,
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(full, 2).c_str());
  }
  if (runs && view.shape[1] > 1 && view.stride[1] != 1) {
    raise_value_error("%s has strides %s; that along the sequence must be 1", name,
                      shape_text(view.stride, 2).c_str());
  }
  *stride = view.shape[0] == 1 ? 0 : view.stride[0];
  return static_cast<const std::int32_t*>(view.data);
}

// int32 [batch | 1].
inline const std::int32_t* read_prefixes(nb::handle object, const Request& request,
                                         std::int64_t* stride) {
  const TensorView view = read_tensor(object, "prefixes");
  if (view.code != dlpack::kInt || view.bits != 32) {
    raise_type_error("prefixes has dtype %s; it must be int32",
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, request.q);
  const std::int64_t batch = request.problem.batch;
  if (view.rank != 1 || (view.shape[0] != 1 && view.shape[0] != batch)) {
    raise_value_error("prefixes has shape %s; it must be [%lld] or [1]",
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      static_cast<long long>(batch));
  }
  *stride = view.shape[0] == 1 ? 0 : view.stride[0];
  return static_cast<const std::int32_t*>(view.data);
}

// All forms of the mask.
inline void read_masks(const VariantArguments& arguments, bool runs, Request* request) {
  ForwardProblem& problem = request->problem;
  Variant& variant = problem.variant;
  VariantTensors& tensors = request->tensors.variant;
  variant.has_block_mask = !arguments.block_mask.is_none();
  variant.has_element_mask = !arguments.mask.is_none();
  variant.has_documents = !arguments.query_ids.is_none() || !arguments.key_ids.is_none();
  variant.has_prefix = !arguments.prefixes.is_none();
  if (variant.has_block_mask) {
    tensors.block_mask = read_mask(arguments.block_mask, "block_mask", arguments.mask_block, runs,
                                   *request, &variant.block_mask);
    variant.mask_block_size = static_cast<int>(arguments.mask_block);
  }
  if (variant.has_element_mask) {
    tensors.mask = read_mask(arguments.mask, "mask", 0, runs, *request, &variant.mask);
  }
  if (variant.has_documents) {
    tensors.query_ids = read_ids(arguments.query_ids, "query_ids", problem.seqlen_q, runs, *request,
                                 &variant.mask_queries);
    tensors.key_ids = read_ids(arguments.key_ids, "key_ids", problem.seqlen_k, runs, *request,
                               &variant.mask_keys);
  }
  if (variant.has_prefix) {
    tensors.prefixes = read_prefixes(arguments.prefixes, *request, &variant.mask_prefixes);
  }
  constexpr std::int64_t kMost = 0xffffffff;  // refused by the rules, and fits the field
  variant.mask_clauses =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(arguments.mask_clauses, 0, kMost));
}

// `object` is None for plain attention.
inline void read_variant(nb::handle object, bool runs, Request* request) {
  if (object.is_none()) {
    return;
  }
  const VariantArguments arguments = variant_arguments(object);
  Variant& variant = request->problem.variant;
  VariantTensors& tensors = request->tensors.variant;
  variant.softcap = static_cast<float>(arguments.softcap);
  variant.has_alibi = !arguments.alibi.is_none();
  if (variant.has_alibi) {
    tensors.alibi_slopes =
        read_per_head(arguments.alibi, "alibi", *request, &variant.alibi_by_batch);
  }
  variant.has_sinks = !arguments.sinks.is_none();
  if (variant.has_sinks) {
    tensors.sinks = read_per_head(arguments.sinks, "sinks", *request, nullptr);
  }
  if (!arguments.bias.is_none()) {
    read_bias(arguments.bias, runs, request);
  }
  read_masks(arguments, runs, request);
  if (!arguments.score.empty() || !arguments.mask_expression.empty()) {
    static_assert(kMaxCaptured == 6);
    read_expressions(arguments.score, arguments.mask_expression, arguments.captured_names,
                     {arguments.captured0, arguments.captured1, arguments.captured2,
                      arguments.captured3, arguments.captured4, arguments.captured5},
                     request);
  }
  constexpr std::int64_t kMost = 1 << 30;  // refused by the rules, and fits the field
  variant.dropout = static_cast<int>(std::clamp<std::int64_t>(arguments.dropout, -kMost, kMost));
  variant.batch_offset = arguments.batch_offset;
  variant.head_offset = arguments.head_offset;
  variant.query_offset = arguments.query_offset;
  variant.key_offset = arguments.key_offset;
  if (!arguments.dropout_seed.is_none() && variant.dropout > 0) {
    read_dropout_seed(arguments.dropout_seed, request);
  }
}

inline float* read_variant_gradient(nb::handle object, const char* name, const Request& request,
                                    std::initializer_list<std::int64_t> shape) {
  const TensorView view = read_tensor(object, name);
  require_float32(view);
  require_same_device(view, request.q);
  require_shape(view, shape);
  require_contiguous(view);
  return static_cast<float*>(view.data);
}

// Where the gradients go; None for those that are not wanted.
inline void take_variant_gradients(nb::handle alibi, nb::handle sinks, nb::handle bias,
                                   const Request& request, BackwardProblem* problem,
                                   BackwardTensors* tensors) {
  const ForwardProblem& forward = problem->forward;
  VariantGradients& gradients = tensors->variant;
  problem->wants_grad_alibi = !alibi.is_none();
  problem->wants_grad_sinks = !sinks.is_none();
  problem->wants_grad_bias = !bias.is_none();
  if (problem->wants_grad_alibi && forward.variant.alibi_by_batch) {
    gradients.alibi_slopes =
        read_variant_gradient(alibi, "grad_alibi", request, {forward.batch, forward.heads_q});
  } else if (problem->wants_grad_alibi) {
    gradients.alibi_slopes = read_variant_gradient(alibi, "grad_alibi", request, {forward.heads_q});
  }
  if (problem->wants_grad_sinks) {
    gradients.sinks = read_variant_gradient(sinks, "grad_sinks", request, {forward.heads_q});
  }
  if (problem->wants_grad_bias) {
    const BiasShape shape = bias_gradient_shape(forward);
    gradients.bias = read_variant_gradient(bias, "grad_bias", request,
                                           {shape.batch, shape.heads, shape.queries, shape.keys});
  }
}

}  // namespace pantile::python
