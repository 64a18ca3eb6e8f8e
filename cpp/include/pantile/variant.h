// What a call changes of plain attention. In this order, for the score of query i and key j, head
// h:
//
//   s = scale * q_i . k_j
//   s = softcap * tanh(s / softcap)
//   s = s - alibi_slopes[h] * |i + Sk - Sq - j|
//   s = s + bias[b, h, i, j]
//   s = score(s, b, h, i, j), an expression of the user (expression.h)
//   mask: the window, and with it the mask below
//   P = exp(s) / (sum over visible keys of exp(s) + exp(sinks[h]))
//   P = kept ? P * 256 / (256 - dropped) : 0                                      (dropout)
//   O = P V
//
// LSE is the logarithm of the sum in P's denominator, sink included, before dropout.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"

namespace pantile {

// An additive bias [batch, heads_q, seqlen_q, seqlen_k]. Distances in elements; 0 along an axis
// that shares the bias. Keys are contiguous.
struct BiasLayout {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t query = 0;
  int base_align_bytes = 16;  // a power of two that divides the address
};

// A mask beside the window: a pair is visible when both show it.
//   blocks     one byte for block_size queries x block_size keys, not 0: visible.
//              [batch, heads_q, ceil(seqlen_q / block_size), ceil(seqlen_k / block_size)]
//   elements   one byte for each pair, not 0: visible. [batch, heads_q, seqlen_q, seqlen_k]
//   documents  ids, int32, of queries [batch, seqlen_q] and of keys [batch, seqlen_k]: visible
//              where they are equal, in any order
//   expression a condition of the user (expression.h)
enum class MaskForm : std::uint8_t { none = 0, blocks, elements, documents, expression };

// Distances in elements; 0 along an axis that shares the mask. `query` is between rows of blocks or
// of bytes; documents have neither it nor heads. Keys are contiguous.
struct MaskLayout {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t query = 0;
};

// A score or mask of the user's own, by number: from parse_expression() of expression.h.
enum class Expression : std::int32_t { none = 0 };

inline constexpr int kMaxCaptured = 6;  // tensors of one expression
inline constexpr int kMaxCapturedAxes = 4;

enum class CapturedDType : std::uint8_t { f32 = 0, f16, bf16, i32, boolean };  // boolean: bytes

// A tensor that an expression captures. Distances in elements, any of them 0 or negative.
struct CapturedTensor {
  const void* data = nullptr;
  std::int64_t size[kMaxCapturedAxes] = {1, 1, 1, 1};  // at least 1 along every axis it has
  std::int64_t stride[kMaxCapturedAxes] = {0, 0, 0, 0};
};

constexpr std::int64_t captured_elements(const CapturedTensor& tensor) {
  return tensor.size[0] * tensor.size[1] * tensor.size[2] * tensor.size[3];
}

// Off, all of it, by default: plain attention.
struct Variant {
  float softcap = 0.0f;    // 0: none; else positive
  bool has_alibi = false;  // fp32 slopes [heads_q], or [batch, heads_q] with:
  bool alibi_by_batch = false;
  bool has_sinks = false;  // fp32 [heads_q]; not scaled
  bool has_bias = false;
  DType bias_dtype = DType::bf16;  // f32 or the dtype of Q
  BiasLayout bias;

  // Of 256 equally likely cases, how many remove a weight: 0 (no dropout) to 255. The mask is
  // that of core/dropout.h at (batch_offset + b, head_offset + h, query_offset + i,
  // key_offset + j): ranks that share the work name their part.
  int dropout = 0;
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::int64_t query_offset = 0;
  std::int64_t key_offset = 0;

  // Each form has a flag, and at most one is set.
  bool has_block_mask = false;
  bool has_element_mask = false;
  bool has_documents = false;
  int mask_block_size = 0;     // of blocks: 64 or 128; else 0
  MaskLayout mask;             // of blocks, of bytes, or of the ids of queries
  std::int64_t mask_keys = 0;  // documents: between the ids of keys of two sequences

  Expression score = Expression::none;
  Expression mask_expression = Expression::none;
};

constexpr MaskForm mask_form(const Variant& variant) {
  return variant.has_block_mask                        ? MaskForm::blocks
         : variant.has_element_mask                    ? MaskForm::elements
         : variant.has_documents                       ? MaskForm::documents
         : variant.mask_expression != Expression::none ? MaskForm::expression
                                                       : MaskForm::none;
}

struct VariantTensors {
  const float* alibi_slopes = nullptr;  // null unless has_alibi
  const float* sinks = nullptr;         // null unless has_sinks
  const void* bias = nullptr;           // null unless has_bias
  const std::int64_t* dropout_seed =
      nullptr;                              // {seed, offset}, on the device; null without dropout
  const std::uint8_t* mask = nullptr;       // of blocks or elements; null without them
  const std::int32_t* query_ids = nullptr;  // null unless has_documents
  const std::int32_t* key_ids = nullptr;    // null unless has_documents
  // Of the expressions, as many as they capture; null without any.
  const CapturedTensor* score_captured = nullptr;
  const CapturedTensor* mask_captured = nullptr;
};

// Gradients of the variant's tensors, fp32, in their shapes; null unless wanted. Written whole. A
// bias that an axis shares gets the sum over that axis.
struct VariantGradients {
  float* alibi_slopes = nullptr;
  float* sinks = nullptr;
  float* bias = nullptr;
  // Of the score's captured tensors, contiguous: kMaxCaptured of them, null unless the bit of
  // wants_grad_captured is set. Null when no bit is.
  float* const* captured = nullptr;
};

}  // namespace pantile
