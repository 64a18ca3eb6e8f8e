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

// A mask beside the window: a pair is visible when both show it. It has up to four forms, each at
// most once:
//   blocks     one byte for block_size queries x block_size keys, not 0: visible.
//              [batch, heads_q, ceil(seqlen_q / block_size), ceil(seqlen_k / block_size)]
//   elements   one byte for each pair, not 0: visible. [batch, heads_q, seqlen_q, seqlen_k]
//   documents  ids, int32, of queries [batch, seqlen_q] and of keys [batch, seqlen_k]: visible
//              where they are equal, in any order
//   prefix     int32 [batch]: all queries see so many keys, and of those behind the ones up to
//              their own position, j <= i + Sk - Sq or, with a shift of the mask, i + shift
// They are combined as clauses: a pair is visible where all forms of some clause show it. In their
// place there may be a condition of the user (expression.h).
enum MaskForm : std::uint32_t {
  kMaskBlocks = 1,
  kMaskElements = 2,
  kMaskDocuments = 4,
  kMaskPrefix = 8,
};
inline constexpr int kMaskForms = 4;
inline constexpr int kMostMaskClauses = 6;  // none of which holds another one

// Distances in elements; 0 along an axis that shares the mask. `query` is between rows of blocks or
// of bytes. Keys are contiguous.
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

  // The forms of the mask.
  bool has_block_mask = false;
  bool has_element_mask = false;
  bool has_documents = false;
  bool has_prefix = false;
  int mask_block_size = 0;  // of blocks: 64 or 128; else 0
  MaskLayout block_mask;
  MaskLayout mask;                 // of elements
  std::int64_t mask_queries = 0;   // these two: between the ids, of queries and of keys, of two
  std::int64_t mask_keys = 0;      // sequences
  std::int64_t mask_prefixes = 0;  // between the prefixes of two sequences: 0 or 1
  // Clauses of kMaskForms bits each, from the lowest, 0 behind the last; 0: one of all forms.
  std::uint32_t mask_clauses = 0;

  Expression score = Expression::none;
  Expression mask_expression = Expression::none;
};

constexpr std::uint32_t mask_forms(const Variant& variant) {
  return (variant.has_block_mask ? kMaskBlocks : 0u) |
         (variant.has_element_mask ? kMaskElements : 0u) |
         (variant.has_documents ? kMaskDocuments : 0u) | (variant.has_prefix ? kMaskPrefix : 0u);
}

// Never 0 where there is a mask.
constexpr std::uint32_t mask_clauses(const Variant& variant) {
  return variant.mask_clauses != 0 ? variant.mask_clauses : mask_forms(variant);
}

struct VariantTensors {
  const float* alibi_slopes = nullptr;  // null unless has_alibi
  const float* sinks = nullptr;         // null unless has_sinks
  const void* bias = nullptr;           // null unless has_bias
  const std::int64_t* dropout_seed =
      nullptr;                               // {seed, offset}, on the device; null without dropout
  const std::uint8_t* block_mask = nullptr;  // null unless has_block_mask
  const std::uint8_t* mask = nullptr;        // of elements; null unless has_element_mask
  const std::int32_t* query_ids = nullptr;   // null unless has_documents
  const std::int32_t* key_ids = nullptr;     // null unless has_documents
  const std::int32_t* prefixes = nullptr;    // null unless has_prefix
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
