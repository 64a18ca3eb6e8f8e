// The rules of what changes plain attention (variant.h).
#include <cinttypes>
#include <cmath>
#include <cstdint>

#include "host/rules.h"
#include "host/shape.h"

namespace pantile::host {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;
constexpr int kByteValues = 256;
constexpr std::int64_t kCoordinates = std::int64_t{1} << 32;  // of the dropout generator

Status softcap_rule(const Variant& v) {
  if (!std::isfinite(v.softcap) || v.softcap < 0.0f) {
    return Status::error(kInvalid, "softcap is %g; it must be finite, and positive, or 0 for none",
                         static_cast<double>(v.softcap));
  }
  return Status();
}

Status alibi_rule(const Variant& v) {
  if (v.alibi_by_batch && !v.has_alibi) {
    return Status::error(kInvalid, "alibi_by_batch is true; it must be false without has_alibi");
  }
  return Status();
}

Status bias_stride_rule(const char* axis, std::int64_t stride, std::int64_t size) {
  constexpr std::int64_t kMaxReach = std::int64_t{1} << 58;  // three axes stay within 63 bits
  if (size <= 1) {
    return Status();
  }
  if (stride < 0) {
    return Status::error(kInvalid, "bias: stride along %s is %" PRId64 "; it must be 0 or more",
                         axis, stride);
  }
  if (stride > kMaxReach / (size - 1)) {
    return Status::error(kInvalid,
                         "bias: stride along %s is %" PRId64 "; with %" PRId64
                         " elements on that axis the tensor spans more than 2^58 elements",
                         axis, stride, size);
  }
  return Status();
}

Status bias_rule(const ForwardProblem& p) {
  const Variant& v = p.variant;
  if (!v.has_bias) {
    return Status();
  }
  if (v.bias_dtype != DType::f32 && v.bias_dtype != p.dtype) {
    return Status::error(kInvalid, "bias_dtype is %s; it must be f32 or the dtype of q, %s",
                         dtype_name(v.bias_dtype), dtype_name(p.dtype));
  }
  const int align = v.bias.base_align_bytes;
  const int bytes = dtype_bytes(v.bias_dtype);
  if (align < bytes || (align & (align - 1)) != 0) {
    return Status::error(kInvalid,
                         "bias.base_align_bytes is %d; it must be a power of two of at least %d",
                         align, bytes);
  }
  return first_error({
      bias_stride_rule("batch", v.bias.batch, p.batch),
      bias_stride_rule("head", v.bias.head, p.heads_q),
      bias_stride_rule("query", v.bias.query, p.seqlen_q),
  });
}

// Coordinates of the generator have 32 bits.
Status offset_rule(const char* name, std::int64_t offset, std::int64_t length) {
  if (offset < 0 || offset > kCoordinates - length) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be from 0 to %" PRId64, name, offset,
                         kCoordinates - length);
  }
  return Status();
}

Status dropout_rule(const ForwardProblem& p) {
  const Variant& v = p.variant;
  if (v.dropout < 0 || v.dropout >= kByteValues) {
    return Status::error(kInvalid, "dropout is %d; it must be from 0 to %d", v.dropout,
                         kByteValues - 1);
  }
  return first_error({
      offset_rule("batch_offset", v.batch_offset, p.batch),
      offset_rule("head_offset", v.head_offset, p.heads_q),
      offset_rule("query_offset", v.query_offset, p.seqlen_q),
      offset_rule("key_offset", v.key_offset, p.seqlen_k),
  });
}

Status wanted_rule(const char* gradient, bool wanted, const char* tensor, bool has) {
  if (wanted && !has) {
    return Status::error(kInvalid, "%s is true; it must be false without %s", gradient, tensor);
  }
  return Status();
}

bool bias_is_empty(const ForwardProblem& p) {
  return p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
}

Status aligned_to(const char* name, const void* pointer, int align) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(align) != 0) {
    return Status::error(kInvalid, "%s is at %p; its address must be a multiple of %d bytes", name,
                         pointer, align);
  }
  return Status();
}

// An array that may have no elements, and may be null then.
Status array_pointer(const char* name, const void* pointer, bool wanted, const char* because,
                     bool empty, int align) {
  Status status;
  if (!wanted || !empty) {
    status = optional_pointer(name, pointer, wanted, because);
  }
  return status.ok() ? aligned_to(name, pointer, align) : status;
}

}  // namespace

Status variant_rule(const ForwardProblem& p) {
  return first_error(
      {softcap_rule(p.variant), alibi_rule(p.variant), bias_rule(p), dropout_rule(p)});
}

Status variant_gradients_rule(const BackwardProblem& p) {
  const Variant& v = p.forward.variant;
  return first_error({
      wanted_rule("wants_grad_alibi", p.wants_grad_alibi, "has_alibi", v.has_alibi),
      wanted_rule("wants_grad_sinks", p.wants_grad_sinks, "has_sinks", v.has_sinks),
      wanted_rule("wants_grad_bias", p.wants_grad_bias, "has_bias", v.has_bias),
  });
}

Status variant_pointers(const ForwardProblem& p, const VariantTensors& t) {
  const Variant& v = p.variant;
  const bool no_heads = p.heads_q == 0;
  const bool no_slopes = no_heads || (v.alibi_by_batch && p.batch == 0);
  constexpr int kFloat = sizeof(float);
  Status status = first_error({
      array_pointer("alibi_slopes", t.alibi_slopes, v.has_alibi, "has_alibi", no_slopes, kFloat),
      array_pointer("sinks", t.sinks, v.has_sinks, "has_sinks", no_heads, kFloat),
      array_pointer("bias", t.bias, v.has_bias, "has_bias", bias_is_empty(p),
                    v.has_bias ? v.bias.base_align_bytes : 1),
      aligned_to("dropout_seed", t.dropout_seed, sizeof(std::int64_t)),
  });
  if (!status.ok()) {
    return status;
  }
  if ((v.dropout > 0) != (t.dropout_seed != nullptr)) {
    return Status::error(kInvalid, "dropout_seed is %s; it must be %s because dropout is %d",
                         t.dropout_seed == nullptr ? "null" : "set", v.dropout > 0 ? "set" : "null",
                         v.dropout);
  }
  return status;
}

Status variant_gradient_pointers(const BackwardProblem& p, const VariantGradients& g) {
  const ForwardProblem& f = p.forward;
  const bool no_heads = f.heads_q == 0;
  const bool no_slopes = no_heads || (f.variant.alibi_by_batch && f.batch == 0);
  constexpr int kFloat = sizeof(float);
  return first_error({
      array_pointer("grad_alibi_slopes", g.alibi_slopes, p.wants_grad_alibi, "wants_grad_alibi",
                    no_slopes, kFloat),
      array_pointer("grad_sinks", g.sinks, p.wants_grad_sinks, "wants_grad_sinks", no_heads,
                    kFloat),
      array_pointer("grad_bias", g.bias, p.wants_grad_bias, "wants_grad_bias",
                    bias_gradient_shape(f).count() == 0, kFloat),
  });
}

Variant canonical_variant(const ForwardProblem& p) {
  Variant v = p.variant;
  if (p.batch == 1) {
    v.alibi_by_batch = false;
    v.bias.batch = 0;
  }
  if (p.heads_q == 1) {
    v.bias.head = 0;
  }
  if (p.seqlen_q == 1) {
    v.bias.query = 0;
  }
  if (!v.has_bias) {
    v.bias = BiasLayout();
    v.bias_dtype = Variant().bias_dtype;
  }
  if (v.dropout == 0) {
    v.batch_offset = v.head_offset = v.query_offset = v.key_offset = 0;
  }
  return v;
}

}  // namespace pantile::host
