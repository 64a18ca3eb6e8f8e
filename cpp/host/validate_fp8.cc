// The rules of FP8 operands: as attention reads them and as they are made.
#include <cstdint>

#include "host/rules.h"
#include "host/validate.h"

namespace pantile::host {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

Status output_rule(const Fp8Format& format) {
  if (format.output == DType::bf16 || format.output == DType::f16) {
    return Status();
  }
  return Status::error(kInvalid, "fp8.output is %s (%d); it must be bf16 (2) or f16 (1)",
                       dtype_name(format.output), static_cast<int>(format.output));
}

Status exp_rule(const Fp8Format& format) {
  switch (format.exp) {
    case Fp8Exp::code:
    case Fp8Exp::mixed:
    case Fp8Exp::exp2: return Status();
  }
  return Status::error(kInvalid, "fp8.exp is %d; it must be code (0), mixed (1) or exp2 (2)",
                       static_cast<int>(format.exp));
}

Status block_rules(const Fp8Format& format) {
  if (format.block_q != 1 && format.block_q != 64 && format.block_q != 128) {
    return Status::error(kInvalid, "fp8.block_q is %d; it must be 1, 64 or 128", format.block_q);
  }
  if (format.block_k != 64 && format.block_k != 128) {
    return Status::error(kInvalid, "fp8.block_k is %d; it must be 64 or 128", format.block_k);
  }
  return Status();
}

Status scale_sign_rule(const ForwardProblem& p) {
  if (p.scale < 0.0f) {
    return Status::error(kInvalid, "scale is %g; with FP8 operands it must be 0 or more",
                         static_cast<double>(p.scale));
  }
  return Status();
}

Status pointer_there(const char* name, const void* pointer, bool empty) {
  if (pointer == nullptr && !empty) {
    return Status::error(kInvalid, "%s is null; it must point to the tensor", name);
  }
  return Status();
}

Status input_dtype_rule(const QuantizeProblem& p) {
  switch (p.dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16: return Status();
    case DType::e4m3: break;
    default:
      return Status::error(kInvalid,
                           "dtype is %d; it must be f32 (0), f16 (1), bf16 (2) or e4m3 (3)",
                           static_cast<int>(p.dtype));
  }
  if (p.dequantize) {
    return Status::error(kInvalid, "dtype is e4m3; with dequantize it must be f32, f16 or bf16");
  }
  if (p.hadamard || p.forward.fp8.smooth_k) {
    return Status::error(kInvalid, "%s is true; it must be false for inputs of dtype e4m3",
                         p.hadamard ? "hadamard" : "forward.fp8.smooth_k");
  }
  return Status();
}

}  // namespace

Status fp8_rule(const ForwardProblem& p) {
  if (p.dtype != DType::e4m3) {
    return Status();
  }
  return first_error({
      output_rule(p.fp8),
      exp_rule(p.fp8),
      block_rules(p.fp8),
      scale_sign_rule(p),
  });
}

Status fp8_pointers(const ForwardProblem& p, const Fp8Tensors& t, bool is_backward) {
  if (p.dtype != DType::e4m3) {
    return Status();
  }
  const bool no_rows = query_shape(p, p.head_dim).empty();
  const bool no_keys = key_shape(p, p.head_dim).empty();
  return first_error({
      pointer_there("fp8.scale_q", t.scale_q, no_rows),
      pointer_there("fp8.scale_kv", t.scale_kv, no_keys),
      pointer_there("fp8.nonfinite_v", t.nonfinite_v, no_keys || is_backward),
      no_rows ? Status()
              : optional_pointer("fp8.q_dot_mean", t.q_dot_mean, p.fp8.smooth_k, "fp8.smooth_k"),
  });
}

Status validate(const QuantizeProblem& p) {
  if (p.forward.dtype != DType::e4m3) {
    return Status::error(kInvalid, "forward.dtype is %s (%d); it must be e4m3 (3)",
                         dtype_name(p.forward.dtype), static_cast<int>(p.forward.dtype));
  }
  if (p.keep_rotation && !p.dequantize) {
    return Status::error(kInvalid, "keep_rotation is true; it must be false without dequantize");
  }
  const ForwardProblem forward = operands_only(p);
  Status status = validate(forward);
  if (!status.ok()) {
    return status;
  }
  const TensorShape rows = query_shape(forward, forward.head_dim);
  const TensorShape keys = key_shape(forward, forward.head_dim);
  return first_error({
      input_dtype_rule(p),
      input_layout("q", p.q, rows, p.dtype),
      input_layout("k", p.k, keys, p.dtype),
      input_layout("v", p.v, key_shape(forward, forward.head_dim_v), p.dtype),
  });
}

namespace {

// The tensors that are quantised, or those that dequantize writes.
Status number_pointers(const QuantizeProblem& p, const QuantizeTensors& t, bool no_rows,
                       bool no_keys) {
  if (p.dequantize) {
    return first_error({
        tensor_pointer("restored_q", t.restored_q, p.q, no_rows),
        tensor_pointer("restored_k", t.restored_k, p.k, no_keys),
        tensor_pointer("restored_v", t.restored_v, p.v, no_keys),
    });
  }
  const bool ready = p.dtype == DType::e4m3;
  return first_error({
      tensor_pointer("q", t.q, p.q, no_rows),
      tensor_pointer("k", t.k, p.k, no_keys),
      tensor_pointer("v", t.v, p.v, no_keys),
      no_rows ? Status() : optional_pointer("descale_q", t.descale_q, ready, "dtype == e4m3"),
      no_keys ? Status() : optional_pointer("descale_k", t.descale_k, ready, "dtype == e4m3"),
      no_keys ? Status() : optional_pointer("descale_v", t.descale_v, ready, "dtype == e4m3"),
  });
}

// What only one of the two ways needs.
Status side_pointers(const QuantizeProblem& p, const QuantizeTensors& t, bool no_rows,
                     bool no_keys) {
  if (p.dequantize) {
    return first_error({
        pointer_there("scale_q", t.scale_q, no_rows),
        pointer_there("scale_kv", t.scale_kv, no_keys),
    });
  }
  const Fp8Tensors scales{t.scale_q, t.scale_kv, t.nonfinite_v, t.q_dot_mean};
  return first_error({
      fp8_pointers(p.forward, scales, false),
      no_keys
          ? Status()
          : optional_pointer("mean_k", t.mean_k, p.forward.fp8.smooth_k, "forward.fp8.smooth_k"),
  });
}

}  // namespace

Status validate_tensors(const QuantizeProblem& p, const QuantizeTensors& t) {
  const ForwardProblem& forward = p.forward;
  const bool no_rows = query_shape(forward, forward.head_dim).empty();
  const bool no_keys = key_shape(forward, forward.head_dim).empty();
  ForwardTensors sequences;
  sequences.cu_seqlens_q = t.cu_seqlens_q;
  sequences.cu_seqlens_k = t.cu_seqlens_k;
  sequences.seqused_q = t.seqused_q;
  sequences.seqused_k = t.seqused_k;
  return first_error({
      number_pointers(p, t, no_rows, no_keys),
      sequence_pointers(forward, sequences),
      tensor_pointer("codes_q", t.codes_q, forward.q, no_rows),
      tensor_pointer("codes_k", t.codes_k, forward.k, no_keys),
      tensor_pointer("codes_v", t.codes_v, forward.v, no_keys),
      side_pointers(p, t, no_rows, no_keys),
  });
}

}  // namespace pantile::host
