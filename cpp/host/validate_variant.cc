// The rules of what changes plain attention (variant.h).
#include <cinttypes>
#include <cmath>
#include <cstdint>

#include "expression/graph.h"
#include "host/rules.h"
#include "host/shape.h"
#include "pantile/expression.h"

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

Status stride_rule(const char* name, const char* axis, std::int64_t stride, std::int64_t size) {
  constexpr std::int64_t kMaxReach = std::int64_t{1} << 58;  // three axes stay within 63 bits
  if (size <= 1) {
    return Status();
  }
  if (stride < 0) {
    return Status::error(kInvalid, "%s: stride along %s is %" PRId64 "; it must be 0 or more", name,
                         axis, stride);
  }
  if (stride > kMaxReach / (size - 1)) {
    return Status::error(kInvalid,
                         "%s: stride along %s is %" PRId64 "; with %" PRId64
                         " elements on that axis the tensor spans more than 2^58 elements",
                         name, axis, stride, size);
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
      stride_rule("bias", "batch", v.bias.batch, p.batch),
      stride_rule("bias", "head", v.bias.head, p.heads_q),
      stride_rule("bias", "query", v.bias.query, p.seqlen_q),
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

// Every form in some clause, and nothing else in any.
Status clauses_rule(const Variant& v) {
  constexpr std::uint32_t kForm = (1u << kMaskForms) - 1;
  std::uint32_t found = 0;
  int count = 0;
  bool ended = false;
  for (std::uint32_t rest = v.mask_clauses; rest != 0; rest >>= kMaskForms) {
    ended = ended || (rest & kForm) == 0;
    found |= rest & kForm;
    ++count;
  }
  if (v.mask_clauses != 0 && (ended || count > kMostMaskClauses || found != mask_forms(v))) {
    return Status::error(kInvalid,
                         "mask_clauses is 0x%x; it must be 0, or up to %d clauses of 4 bits that "
                         "name the forms of the mask, 0x%x",
                         v.mask_clauses, kMostMaskClauses, mask_forms(v));
  }
  return Status();
}

Status mask_rule(const ForwardProblem& p) {
  const Variant& v = p.variant;
  if (v.mask_expression != Expression::none && mask_forms(v) != 0) {
    return Status::error(
        kInvalid,
        "mask_expression is set beside another mask, of forms 0x%x; at most one of "
        "these may be there",
        mask_forms(v));
  }
  if (v.has_block_mask ? v.mask_block_size != 64 && v.mask_block_size != 128
                       : v.mask_block_size != 0) {
    return Status::error(kInvalid, "mask_block_size is %d; it must be %s", v.mask_block_size,
                         v.has_block_mask ? "64 or 128" : "0 without has_block_mask");
  }
  const Status clauses = clauses_rule(v);
  if (!clauses.ok() || mask_forms(v) == 0) {
    return clauses;
  }
  return first_error({
      stride_rule("block_mask", "batch", v.block_mask.batch, p.batch),
      stride_rule("block_mask", "head", v.block_mask.head, p.heads_q),
      stride_rule("block_mask", "query", v.block_mask.query, p.seqlen_q),
      stride_rule("mask", "batch", v.mask.batch, p.batch),
      stride_rule("mask", "head", v.mask.head, p.heads_q),
      stride_rule("mask", "query", v.mask.query, p.seqlen_q),
      stride_rule("mask_queries", "batch", v.mask_queries, p.batch),
      stride_rule("mask_keys", "batch", v.mask_keys, p.batch),
      stride_rule("mask_prefixes", "batch", v.mask_prefixes, p.batch),
  });
}

Status expression_rule(const char* name, Expression expression, ExpressionKind kind) {
  if (expression != Expression::none && !expression::is_known(expression, kind)) {
    return Status::error(
        kInvalid, "%s is %d; it must be what parse_expression() gave for a %s, or none", name,
        static_cast<int>(expression), kind == ExpressionKind::score ? "score" : "mask");
  }
  return Status();
}

bool is_real(CapturedDType dtype) {
  return dtype != CapturedDType::i32 && dtype != CapturedDType::boolean;
}

Status captured_rule(const BackwardProblem& p) {
  const Expression score = p.forward.variant.score;
  const int count = captured_count(score);
  if (p.wants_grad_captured >> count != 0) {
    return Status::error(kInvalid,
                         "wants_grad_captured is %#x; the score captures %d tensors, and there is "
                         "no bit for others",
                         static_cast<unsigned>(p.wants_grad_captured), count);
  }
  for (int i = 0; i < count; ++i) {
    const expression::Captured& tensor =
        expression::function_of(score).graph.captured()[static_cast<std::size_t>(i)];
    if ((p.wants_grad_captured >> i & 1u) != 0 && !is_real(tensor.dtype)) {
      return Status::error(
          kInvalid,
          "wants_grad_captured asks for that of tensor %d, which holds integers or "
          "conditions and has none",
          i);
    }
  }
  if (p.grad_captured_elements < 0 ||
      (p.grad_captured_elements > 0) != (p.wants_grad_captured != 0)) {
    return Status::error(kInvalid,
                         "grad_captured_elements is %" PRId64
                         "; it must be the number of elements of the tensors whose gradients are "
                         "wanted, %s",
                         p.grad_captured_elements,
                         p.wants_grad_captured != 0 ? "more than 0" : "0 without any");
  }
  return Status();
}

Status wanted_rule(const char* gradient, bool wanted, const char* tensor, bool has) {
  if (wanted && !has) {
    return Status::error(kInvalid, "%s is true; it must be false without %s", gradient, tensor);
  }
  return Status();
}

bool pairs_are_empty(const ForwardProblem& p) {
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

Status captured_pointers(const char* name, Expression expression, const CapturedTensor* tensors) {
  const int count = captured_count(expression);
  if (count > 0 && tensors == nullptr) {
    return Status::error(kInvalid, "%s is null; it must hold the %d tensors of the expression",
                         name, count);
  }
  for (int i = 0; i < count; ++i) {
    const expression::Captured& captured =
        expression::function_of(expression).graph.captured()[static_cast<std::size_t>(i)];
    for (int axis = 0; axis < kMaxCapturedAxes; ++axis) {
      const std::int64_t size = tensors[i].size[axis];
      if (size < 1 || size > std::int64_t{1} << 31 || (axis >= captured.axes && size != 1)) {
        return Status::error(
            kInvalid, "%s, tensor %d: its size along axis %d is %" PRId64 "; it must be %s", name,
            i, axis, size, axis >= captured.axes ? "1 behind its last axis" : "1 to 2^31");
      }
    }
    if (tensors[i].data == nullptr) {
      return Status::error(kInvalid, "%s, tensor %d: its address is null", name, i);
    }
  }
  return Status();
}

Status mask_pointers(const ForwardProblem& p, const VariantTensors& t) {
  const Variant& v = p.variant;
  const bool no_pairs = pairs_are_empty(p);
  constexpr int kId = sizeof(std::int32_t);
  return first_error({
      array_pointer("block_mask", t.block_mask, v.has_block_mask, "has_block_mask", no_pairs, 1),
      array_pointer("mask", t.mask, v.has_element_mask, "has_element_mask", no_pairs, 1),
      array_pointer("query_ids", t.query_ids, v.has_documents, "has_documents", no_pairs, kId),
      array_pointer("key_ids", t.key_ids, v.has_documents, "has_documents", no_pairs, kId),
      array_pointer("prefixes", t.prefixes, v.has_prefix, "has_prefix", no_pairs, kId),
  });
}

}  // namespace

Status variant_rule(const ForwardProblem& p) {
  const int captured = captured_count(p.variant.score) + captured_count(p.variant.mask_expression);
  if (captured > kMaxCaptured) {
    return Status::error(
        kInvalid, "score and mask_expression capture %d tensors; together they may capture %d",
        captured, kMaxCaptured);
  }
  return first_error(
      {softcap_rule(p.variant), alibi_rule(p.variant), bias_rule(p), dropout_rule(p),
       expression_rule("score", p.variant.score, ExpressionKind::score),
       expression_rule("mask_expression", p.variant.mask_expression, ExpressionKind::mask),
       mask_rule(p)});
}

Status variant_gradients_rule(const BackwardProblem& p) {
  const Variant& v = p.forward.variant;
  return first_error({
      wanted_rule("wants_grad_alibi", p.wants_grad_alibi, "has_alibi", v.has_alibi),
      wanted_rule("wants_grad_sinks", p.wants_grad_sinks, "has_sinks", v.has_sinks),
      wanted_rule("wants_grad_bias", p.wants_grad_bias, "has_bias", v.has_bias),
      captured_rule(p),
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
      array_pointer("bias", t.bias, v.has_bias, "has_bias", pairs_are_empty(p),
                    v.has_bias ? v.bias.base_align_bytes : 1),
      aligned_to("dropout_seed", t.dropout_seed, sizeof(std::int64_t)),
      mask_pointers(p, t),
      captured_pointers("score_captured", v.score, t.score_captured),
      captured_pointers("mask_captured", v.mask_expression, t.mask_captured),
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
  if (p.wants_grad_captured != 0 && g.captured == nullptr) {
    return Status::error(kInvalid, "grad_captured is null; wants_grad_captured is %#x",
                         static_cast<unsigned>(p.wants_grad_captured));
  }
  for (int i = 0; i < kMaxCaptured && p.wants_grad_captured != 0; ++i) {
    const bool wanted = (p.wants_grad_captured >> i & 1u) != 0;
    const Status status = array_pointer("grad_captured", wanted ? g.captured[i] : nullptr, wanted,
                                        "wants_grad_captured", false, kFloat);
    if (!status.ok()) {
      return status;
    }
  }
  return first_error({
      array_pointer("grad_alibi_slopes", g.alibi_slopes, p.wants_grad_alibi, "wants_grad_alibi",
                    no_slopes, kFloat),
      array_pointer("grad_sinks", g.sinks, p.wants_grad_sinks, "wants_grad_sinks", no_heads,
                    kFloat),
      array_pointer("grad_bias", g.bias, p.wants_grad_bias, "wants_grad_bias",
                    bias_gradient_shape(f).count() == 0, kFloat),
  });
}

namespace {

// Strides of what is absent, or has one entry, are 0.
void canonical_mask(const ForwardProblem& p, Variant* v) {
  const auto layout = [&p](bool has, MaskLayout* mask) {
    if (!has || p.batch == 1) {
      mask->batch = 0;
    }
    if (!has || p.heads_q == 1) {
      mask->head = 0;
    }
    if (!has) {
      mask->query = 0;
    }
  };
  layout(v->has_block_mask, &v->block_mask);
  layout(v->has_element_mask, &v->mask);
  if (!v->has_documents || p.batch == 1) {
    v->mask_queries = v->mask_keys = 0;
  }
  if (!v->has_prefix || p.batch == 1) {
    v->mask_prefixes = 0;
  }
  if (v->mask_clauses == mask_forms(*v)) {
    v->mask_clauses = 0;
  }
}

}  // namespace

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
  canonical_mask(p, &v);
  if (v.dropout == 0) {
    v.batch_offset = v.head_offset = v.query_offset = v.key_offset = 0;
  }
  return v;
}

}  // namespace pantile::host
