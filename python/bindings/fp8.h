// FP8 for Python: quantising, and attention on what came of it. The eight operands travel as one
// tuple, in the order of kOperandNames.
#pragma once

#include <cstdint>
#include <cstring>

#include "call.h"
#include "outputs.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "request.h"
#include "runs.h"
#include "tensor_view.h"

namespace pantile::python {

enum OperandIndex {
  kCodesQ,
  kCodesK,
  kCodesV,
  kScaleQ,
  kScaleKv,
  kNonfiniteV,
  kQDotMean,
  kMeanK,
  kOperandCount
};
inline constexpr const char* kOperandNames[kOperandCount] = {
    "codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", "nonfinite_v", "q_dot_mean", "mean_k",
};

// Element type, element count of each operand.
struct OperandForm {
  std::uint8_t code, bits;
  std::int64_t elements;
};

inline OperandForm operand_form(int index, const QuantizedSizes& sizes) {
  switch (index) {
    case kCodesQ: return {dlpack::kFloat8E4M3FN, 8, sizes.codes_q};
    case kCodesK: return {dlpack::kFloat8E4M3FN, 8, sizes.codes_k};
    case kCodesV: return {dlpack::kFloat8E4M3FN, 8, sizes.codes_v};
    case kScaleQ: return {dlpack::kFloat, 32, sizes.scale_q};
    case kScaleKv: return {dlpack::kFloat, 32, sizes.scale_kv};
    case kNonfiniteV: return {dlpack::kInt, 32, sizes.nonfinite_v};
    case kQDotMean: return {dlpack::kFloat, 32, sizes.q_dot_mean};
    default: return {dlpack::kFloat, 32, sizes.mean_k};
  }
}

// The address of an operand of the right form; null when it has no elements.
inline void* read_operand(const nb::tuple& operands, int index, const QuantizedSizes& sizes,
                          Device device) {
  const TensorView view =
      read_tensor(operands[static_cast<std::size_t>(index)], kOperandNames[index]);
  const OperandForm form = operand_form(index, sizes);
  if (view.code != form.code || view.bits != form.bits) {
    raise_type_error("%s has dtype %s; it must be %s", view.name,
                     dtype_text(view.code, view.bits).c_str(),
                     dtype_text(form.code, form.bits).c_str());
  }
  std::int64_t elements = 1;
  for (int axis = 0; axis < std::min(view.rank, kMaxRank); ++axis) {
    elements *= view.shape[axis];
  }
  if (elements != form.elements || !view.contiguous()) {
    raise_value_error("%s has shape %s, strides %s; it must be contiguous, of %lld elements",
                      view.name, shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(view.stride, std::min(view.rank, kMaxRank)).c_str(),
                      static_cast<long long>(form.elements));
  }
  const Device own = parse_device(view);
  if (own.type != device.type || own.index != device.index) {
    raise_value_error("%s is on %s; it must be on the device of q", view.name,
                      device_text(view.device_type, view.device_index).c_str());
  }
  return elements == 0 ? nullptr : view.data;
}

inline Fp8Format fp8_format(int block_q, int block_k, bool smooth_k) {
  Fp8Format format;
  format.block_q = block_q;
  format.block_k = block_k;
  format.smooth_k = smooth_k;
  return format;
}

inline Fp8Exp parse_exp(const char* text) {
  for (const Fp8Exp exp : {Fp8Exp::code, Fp8Exp::mixed, Fp8Exp::exp2}) {
    if (std::strcmp(fp8_exp_name(exp), text) == 0) {
      return exp;
    }
  }
  raise_value_error("fp8_exp is '%s'; it must be one of code, mixed, exp2", text);
}

// Float [batch, heads_k], contiguous; None without codes to scale.
inline const float* read_descale(nb::handle object, const char* name, const Request& request) {
  if (object.is_none()) {
    return nullptr;
  }
  const TensorView view = read_tensor(object, name);
  require_float32(view);
  require_same_device(view, request.q);
  require_shape(view, {request.problem.batch, request.problem.heads_k});
  require_contiguous(view);
  return static_cast<const float*>(view.data);
}

// The problem of quantising the request's q, k and v.
inline QuantizeProblem quantize_problem(const Request& request, const Fp8Format& format,
                                        bool hadamard) {
  QuantizeProblem problem;
  problem.forward = request.problem;
  problem.forward.dtype = DType::e4m3;
  problem.forward.fp8 = format;
  problem.dtype = request.problem.dtype;
  problem.q = request.problem.q;
  problem.k = request.problem.k;
  problem.v = request.problem.v;
  problem.hadamard = hadamard;
  return problem;
}

inline unsigned quantize(nb::handle q, nb::handle k, nb::handle v, nb::handle descale_q,
                         nb::handle descale_k, nb::handle descale_v, nb::tuple operands,
                         const Call& call, int block_q, int block_k, bool hadamard, bool smooth_k) {
  const Request request = read_request(q, k, v, call, true);
  QuantizeProblem problem =
      quantize_problem(request, fp8_format(block_q, block_k, smooth_k), hadamard);
  const QuantizedSizes sizes = quantized_sizes(problem.forward);
  void* written[kOperandCount];
  for (int index = 0; index < kOperandCount; ++index) {
    written[index] = read_operand(operands, index, sizes, request.device);
  }
  QuantizeTensors tensors;
  tensors.q = request.q.data;
  tensors.k = request.k.data;
  tensors.v = request.v.data;
  tensors.descale_q = read_descale(descale_q, "descale_q", request);
  tensors.descale_k = read_descale(descale_k, "descale_k", request);
  tensors.descale_v = read_descale(descale_v, "descale_v", request);
  tensors.cu_seqlens_q = request.tensors.cu_seqlens_q;
  tensors.cu_seqlens_k = request.tensors.cu_seqlens_k;
  tensors.seqused_q = request.tensors.seqused_q;
  tensors.seqused_k = request.tensors.seqused_k;
  tensors.codes_q = written[kCodesQ];
  tensors.codes_k = written[kCodesK];
  tensors.codes_v = written[kCodesV];
  tensors.scale_q = static_cast<float*>(written[kScaleQ]);
  tensors.scale_kv = static_cast<float*>(written[kScaleKv]);
  tensors.nonfinite_v = static_cast<std::uint32_t*>(written[kNonfiniteV]);
  tensors.q_dot_mean = static_cast<float*>(written[kQDotMean]);
  tensors.mean_k = static_cast<float*>(written[kMeanK]);
  return plan_and_run<QuantizePlan>(request, &problem, tensors, Pass::quantize,
                                    {{&request.q, &problem.q, kCopyQ},
                                     {&request.k, &problem.k, kCopyK},
                                     {&request.v, &problem.v, kCopyV}});
}

// Writes what the first five operands stand for into q, k and v. Copy bits say that no kernel
// writes tensors of these layouts.
inline unsigned dequantize(nb::handle q, nb::handle k, nb::handle v, nb::tuple operands,
                           const Call& call, int block_q, int block_k, bool hadamard,
                           bool keep_rotation) {
  const Request request = read_request(q, k, v, call, true);
  QuantizeProblem problem =
      quantize_problem(request, fp8_format(block_q, block_k, false), hadamard);
  problem.dequantize = true;
  problem.keep_rotation = keep_rotation;
  const QuantizedSizes sizes = quantized_sizes(problem.forward);
  const auto read = [&](int index) { return read_operand(operands, index, sizes, request.device); };
  QuantizeTensors tensors;
  tensors.restored_q = request.q.data;
  tensors.restored_k = request.k.data;
  tensors.restored_v = request.v.data;
  tensors.cu_seqlens_q = request.tensors.cu_seqlens_q;
  tensors.cu_seqlens_k = request.tensors.cu_seqlens_k;
  tensors.seqused_q = request.tensors.seqused_q;
  tensors.seqused_k = request.tensors.seqused_k;
  tensors.codes_q = read(kCodesQ);
  tensors.codes_k = read(kCodesK);
  tensors.codes_v = read(kCodesV);
  tensors.scale_q = static_cast<float*>(read(kScaleQ));
  tensors.scale_kv = static_cast<float*>(read(kScaleKv));
  return plan_and_run<QuantizePlan>(request, &problem, tensors, Pass::quantize,
                                    {{&request.q, &problem.q, kCopyQ},
                                     {&request.k, &problem.k, kCopyK},
                                     {&request.v, &problem.v, kCopyV}});
}

// What neither the operands nor the call show.
struct Fp8Shape {
  std::int64_t head_dim;
  std::int64_t keys;  // of a sequence; packed: in all
  Fp8Format format;
};

// A request whose q, k and v are operands. `output` is o, or a tensor like it.
inline Request fp8_request(const TensorView& output, const nb::tuple& operands,
                           const Fp8Shape& shape, const Call& call) {
  Request request;
  request.q = output;
  request.device = parse_device(output);
  read_options(call, &request);
  ForwardProblem& problem = request.problem;
  const int heads = request.packed ? 1 : 2;  // axis
  require_rank(
      output, heads + 2,
      request.packed ? "[total_q, heads_q, head_dim_v]" : "[batch, seqlen_q, heads_q, head_dim_v]");
  problem.dtype = DType::e4m3;
  problem.fp8 = shape.format;
  problem.fp8.output = parse_dtype(output, false);
  problem.heads_q = output.shape[heads];
  problem.head_dim = shape.head_dim;
  problem.head_dim_v = output.shape[heads + 1];
  const TensorView codes =
      read_tensor(operands[static_cast<std::size_t>(kCodesK)], kOperandNames[kCodesK]);
  require_rank(codes, 3, "[heads_k, rows, channels]");
  problem.heads_k = codes.shape[0];
  if (request.packed) {
    std::int64_t bounds = 0;
    request.tensors.cu_seqlens_q = read_lengths(call.cu_seqlens_q, "cu_seqlens_q", output, &bounds);
    request.tensors.cu_seqlens_k = read_lengths(call.cu_seqlens_k, "cu_seqlens_k", output, &bounds);
    problem.packed_q = problem.packed_k = true;
    problem.batch = bounds - 1;
    problem.seqlen_q = call.max_seqlen_q;
    problem.seqlen_k = call.max_seqlen_k;
    problem.total_q = output.shape[0];
    problem.total_k = shape.keys;
  } else {
    problem.batch = output.shape[0];
    problem.seqlen_q = output.shape[1];
    problem.seqlen_k = shape.keys;
    problem.total_q = problem.batch * problem.seqlen_q;
    problem.total_k = problem.batch * problem.seqlen_k;
  }
  read_used_lengths(call, &request);
  problem.scale = call.scale_for(problem.head_dim);
  problem.o = layout_of(output);
  return request;
}

inline void forward_fp8(nb::tuple operands, nb::handle o, nb::handle lse, std::int64_t head_dim,
                        std::int64_t keys, const Call& call, int block_q, int block_k,
                        bool smooth_k, const char* exp) {
  const TensorView output = read_tensor(o, "o");
  require_contiguous(output);
  Fp8Shape shape{head_dim, keys, fp8_format(block_q, block_k, smooth_k)};
  shape.format.exp = parse_exp(exp);
  Request request = fp8_request(output, operands, shape, call);
  const QuantizedSizes sizes = quantized_sizes(request.problem);
  ForwardTensors& tensors = request.tensors;
  const auto read = [&](int index) { return read_operand(operands, index, sizes, request.device); };
  tensors.q = read(kCodesQ);
  tensors.k = read(kCodesK);
  tensors.v = read(kCodesV);
  tensors.fp8.scale_q = static_cast<const float*>(read(kScaleQ));
  tensors.fp8.scale_kv = static_cast<const float*>(read(kScaleKv));
  tensors.fp8.nonfinite_v = static_cast<const std::uint32_t*>(read(kNonfiniteV));
  tensors.fp8.q_dot_mean = static_cast<const float*>(read(kQDotMean));
  tensors.o = output.data;
  request.problem.wants_lse = !lse.is_none();
  if (request.problem.wants_lse) {
    const TensorView rows = read_tensor(lse, "lse");
    require_lse(rows, request);
    require_contiguous(rows);
    tensors.lse = static_cast<float*>(rows.data);
  }
  plan_and_run<ForwardPlan>(request, &request.problem, tensors, Pass::forward, {});
}

// Of contiguous tensors.
inline void set_gradient_layouts(BackwardProblem* problem) {
  const ForwardProblem& forward = problem->forward;
  const std::int64_t rows = forward.packed_q ? forward.total_q : forward.seqlen_q;
  const std::int64_t keys = forward.packed_k ? forward.total_k : forward.seqlen_k;
  problem->grad_o = contiguous_layout(rows, forward.heads_q, forward.head_dim_v);
  problem->grad_q = contiguous_layout(rows, forward.heads_q, forward.head_dim);
  problem->grad_k = contiguous_layout(keys, forward.heads_k, forward.head_dim);
  problem->grad_v = contiguous_layout(keys, forward.heads_k, forward.head_dim_v);
}

// The operands of which a backward makes use; it knows the non-finite V by their O.
inline ForwardTensors read_backward_operands(const nb::tuple& operands, const Request& request) {
  const QuantizedSizes sizes = quantized_sizes(request.problem);
  const auto read = [&](int index) { return read_operand(operands, index, sizes, request.device); };
  ForwardTensors inputs = request.tensors;
  inputs.q = read(kCodesQ);
  inputs.k = read(kCodesK);
  inputs.v = read(kCodesV);
  inputs.fp8.scale_q = static_cast<const float*>(read(kScaleQ));
  inputs.fp8.scale_kv = static_cast<const float*>(read(kScaleKv));
  inputs.fp8.q_dot_mean = static_cast<const float*>(read(kQDotMean));
  return inputs;
}

// Of attention on FP8 operands, in the dtype of O. Nothing runs without gradients to write: then it
// only raises where no kernel serves the problem.
inline void backward_fp8(nb::tuple operands, nb::handle grad_o, nb::handle grad_lse, nb::handle o,
                         nb::handle lse, nb::handle grads, std::int64_t head_dim, std::int64_t keys,
                         const Call& call, int block_q, int block_k, bool smooth_k,
                         bool deterministic) {
  const TensorView output = read_tensor(o, "o");
  require_contiguous(output);
  const Fp8Shape shape{head_dim, keys, fp8_format(block_q, block_k, smooth_k)};
  Request request = fp8_request(output, operands, shape, call);
  BackwardProblem problem;
  BackwardTensors tensors;
  problem.deterministic = deterministic;
  if (grads.is_none()) {
    problem.forward = request.problem;
    set_gradient_layouts(&problem);
    raise_unless_served<BackwardPlan>(request, problem);
    return;
  }
  request.tensors = read_backward_operands(operands, request);
  const TensorView rows = read_tensor(lse, "lse");
  const TensorView above = read_tensor(grad_o, "grad_o");
  take_saved(output, above, rows, request, &problem, &tensors);
  require_contiguous(rows);
  require_contiguous(above);
  problem.has_grad_lse = !grad_lse.is_none();
  if (problem.has_grad_lse) {
    const TensorView view = read_tensor(grad_lse, "grad_lse");
    require_lse(view, request);
    require_contiguous(view);
    tensors.grad_lse = static_cast<const float*>(view.data);
  }
  const auto written = nb::cast<nb::tuple>(grads);
  take_gradients(read_tensor(written[0], "grad_q"), read_tensor(written[1], "grad_k"),
                 read_tensor(written[2], "grad_v"), request, &problem, &tensors);
  plan_and_run<BackwardPlan>(request, &problem, tensors, Pass::backward, {});
}

// The problem of writing the numbers of what `quantizing` makes, in the dtype of O.
inline QuantizeProblem dequantize_problem(const QuantizeProblem& quantizing) {
  const ForwardProblem& forward = quantizing.forward;
  QuantizeProblem problem = quantizing;
  problem.forward.fp8.smooth_k = false;
  problem.dequantize = problem.keep_rotation = true;
  problem.dtype = forward.fp8.output;
  const std::int64_t rows = forward.packed_q ? forward.total_q : forward.seqlen_q;
  const std::int64_t keys = forward.packed_k ? forward.total_k : forward.seqlen_k;
  problem.q = contiguous_layout(rows, forward.heads_q, forward.head_dim);
  problem.k = contiguous_layout(keys, forward.heads_k, forward.head_dim);
  problem.v = contiguous_layout(keys, forward.heads_k, forward.head_dim_v);
  return problem;
}

// Quantising q, k and v, the attention that follows, and the numbers for its backward, as
// (quantize, forward, dequantize).
inline nb::tuple explain_fp8(nb::handle q, nb::handle k, nb::handle v, const Call& call,
                             int block_q, int block_k, bool hadamard, bool smooth_k,
                             const char* exp) {
  const Request request = read_request(q, k, v, call, true);
  Fp8Format format = fp8_format(block_q, block_k, smooth_k);
  format.exp = parse_exp(exp);
  format.output = request.problem.dtype == DType::f16 ? DType::f16 : DType::bf16;
  QuantizeProblem quantizing = quantize_problem(request, format, hadamard);
  ForwardProblem forward = quantizing.forward;
  QuantizeProblem numbers = dequantize_problem(quantizing);
  const nb::dict first = explain_pass<QuantizePlan>(request, &quantizing,
                                                    {{&request.q, &quantizing.q, kCopyQ},
                                                     {&request.k, &quantizing.k, kCopyK},
                                                     {&request.v, &quantizing.v, kCopyV}});
  const nb::dict second = explain_pass<ForwardPlan>(request, &forward, {});
  const nb::dict third = explain_pass<QuantizePlan>(request, &numbers, {});
  return nb::make_tuple(first, second, third);
}

// The backward that works on what quantising q, k and v makes.
inline nb::dict explain_backward_fp8(nb::handle q, nb::handle k, nb::handle v, const Call& call,
                                     int block_q, int block_k, bool smooth_k, bool deterministic) {
  const Request request = read_request(q, k, v, call, true);
  Fp8Format format = fp8_format(block_q, block_k, smooth_k);
  format.output = request.problem.dtype == DType::f16 ? DType::f16 : DType::bf16;
  BackwardProblem problem;
  problem.forward = quantize_problem(request, format, false).forward;
  problem.deterministic = deterministic;
  set_gradient_layouts(&problem);
  return explain_pass<BackwardPlan>(request, &problem, {});
}

inline void bind_fp8(nb::module_& module) {
  using namespace nb::literals;
  module.def("quantize", &quantize, "q"_a, "k"_a, "v"_a, "descale_q"_a.none(), "descale_k"_a.none(),
             "descale_v"_a.none(), "operands"_a, "call"_a, "block_q"_a, "block_k"_a, "hadamard"_a,
             "smooth_k"_a);
  module.def("dequantize", &dequantize, "q"_a, "k"_a, "v"_a, "operands"_a, "call"_a, "block_q"_a,
             "block_k"_a, "hadamard"_a, "keep_rotation"_a);
  module.def("forward_fp8", &forward_fp8, "operands"_a, "o"_a, "lse"_a.none(), "head_dim"_a,
             "keys"_a, "call"_a, "block_q"_a, "block_k"_a, "smooth_k"_a, "exp"_a);
  module.def("explain_fp8", &explain_fp8, "q"_a, "k"_a, "v"_a, "call"_a, "block_q"_a, "block_k"_a,
             "hadamard"_a, "smooth_k"_a, "exp"_a);
  module.def("backward_fp8", &backward_fp8, "operands"_a, "grad_o"_a, "grad_lse"_a.none(), "o"_a,
             "lse"_a, "grads"_a.none(), "head_dim"_a, "keys"_a, "call"_a, "block_q"_a, "block_k"_a,
             "smooth_k"_a, "deterministic"_a);
  module.def("explain_backward_fp8", &explain_backward_fp8, "q"_a, "k"_a, "v"_a, "call"_a,
             "block_q"_a, "block_k"_a, "smooth_k"_a, "deterministic"_a);
}

}  // namespace pantile::python
