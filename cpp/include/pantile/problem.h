// What is asked: shapes, types, mask and layout of one attention call. No pointers: those are in
// ForwardTensors / BackwardTensors, so a problem can be planned, printed and stored without data.
//
//   O = softmax(Q K^T * scale + mask) V        LSE = log(sum(exp(Q K^T * scale + mask)))
#pragma once

#include <cstdint>
#include <limits>

#include "pantile/dtype.h"
#include "pantile/registry.h"
#include "pantile/variant.h"

namespace pantile {

inline constexpr std::int64_t kUnbounded = -1;
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kAutomaticSplits = 0;
inline constexpr int kMaxSplits = 256;

// Distances in elements between neighbours along each axis. The last axis (dim) has stride 1.
// `batch` is ignored for packed (varlen) tensors. `base_align_bytes` is a power of two that divides
// the address of the first element (what TMA and vector loads need to know before launch).
//
// Strides that are not set are refused along every axis of more than one element.
struct Layout {
  std::int64_t batch = -1;
  std::int64_t seq = -1;
  std::int64_t head = -1;
  int base_align_bytes = 16;
};

// How FP8 attention turns a score into a weight (docs/design/fp8.md). `code` computes the e4m3 code
// of the weight straight from the score: the fastest, and an approximation of exp2 to e4m3's own
// precision (RMS error of the output +4 %). `exp2` rounds the true exponential. `mixed` alternates
// by 8 rows x 16 keys.
enum class Fp8Exp : std::uint8_t { code = 0, mixed, exp2 };

// What FP8 operands are, as run_quantize() writes them (quantize.h), and what becomes of them.
struct Fp8Format {
  DType output = DType::bf16;  // of O: bf16 or f16
  Fp8Exp exp = Fp8Exp::code;
  int block_q = 128;      // query rows that share a scale: 1, 64 or 128
  int block_k = 128;      // keys that share a scale, in K and in V: 64 or 128
  bool smooth_k = false;  // K was quantised less its mean: scale * (Q . mean) is added to LSE
};

// Where the softmax of the forward runs: on vector units, or partly on tensor cores
// (docs/design/flashattention-t.md). `automatic` takes what measured fastest.
enum class SoftmaxUnit : std::uint8_t { automatic = 0, vector, tensor };

// How far a tensor softmax goes.
//   exact       each row has its own reference
//   surrogate   16 rows share one, as in the FlashAttention-T paper; a row that it would cost its
//               accuracy keeps its own
//   fast_scale  the scale is folded into Q, which is rounded once more
enum class SoftmaxMode : std::uint8_t { exact = 0, surrogate, fast_scale };

inline constexpr int kAutomaticShare = -1;

struct SoftmaxOptions {
  SoftmaxUnit unit = SoftmaxUnit::automatic;
  SoftmaxMode mode = SoftmaxMode::exact;  // another one needs unit = tensor
  // Share of the scores that tensor products scale, in quarters: 0, 1, 2 or 4. More than 0 needs
  // unit = tensor. Taken by keys, or with 2 quarters and split_rows by tiles of 16 rows.
  int tensor_quarters = kAutomaticShare;
  bool split_rows = false;
  // Base-2 logits. A row's reference follows its maximum when it grew by more than
  // rescale_threshold; 0: after every key tile. P at the maximum is 2^p_max_offset (0: or
  // what the backend finds better for many f16 keys). 0 to 15 together. A row may lie
  // min_exponent_log2 (-126 to 0) below a shared reference.
  float rescale_threshold = 8.0f;
  float p_max_offset = 0.0f;
  float min_exponent_log2 = -100.0f;
  // Whether the LSE must be that of the fp32 weights. If not, an automatic choice may deliver the
  // LSE of the weights as they were rounded for P V: enough for the backward.
  bool exact_lse = true;
};

struct ForwardProblem {
  DType dtype = DType::bf16;    // of Q, K, V and, except for e4m3 and output_f32, of O
  std::int64_t batch = 0;       // sequences
  std::int64_t heads_q = 0;     // query heads, a multiple of heads_k
  std::int64_t heads_k = 0;     // key/value heads
  std::int64_t seqlen_q = 0;    // rows per sequence; for packed Q the longest sequence's
  std::int64_t seqlen_k = 0;    // keys per sequence; for packed K, V the longest sequence's
  std::int64_t head_dim = 0;    // of Q and K, 1..kMaxHeadDim
  std::int64_t head_dim_v = 0;  // of V and O, 1..kMaxHeadDim

  // Packed sequences (varlen). Tensors are [total, heads, dim] and cu_seqlens[b]..cu_seqlens[b+1]
  // are the rows of sequence b. Q and K may be packed independently.
  bool packed_q = false;
  bool packed_k = false;
  std::int64_t total_q = 0;  // rows of packed Q; batch * seqlen_q otherwise
  std::int64_t total_k = 0;  // rows of packed K; batch * seqlen_k otherwise
  // Only the first seqused_q[b] rows, or seqused_k[b] keys, of sequence b exist. The others are not
  // read; outputs there are those of a row or key that nothing attends to: O = 0, LSE = -inf,
  // gradients 0.
  bool has_seqused_q = false;
  bool has_seqused_k = false;

  // Keys that do not lie one sequence after the other. Both forms need has_seqused_k: seqused_k[b]
  // is the number of keys of sequence b, at most seqlen_k.
  //
  // has_k_begin: packed K and V (packed_k), without cu_seqlens_k. The keys of sequence b are the
  // rows from k_begin[b] on. Ranges may overlap and leave rows out: the gradients of a row that
  // several sequences see are summed, and those of a row that none sees are 0.
  bool has_k_begin = false;
  // page_size > 0: paged K and V, [pages, page_size, heads_k, dim], not packed; `batch` of their
  // layouts is the distance of pages. Key j of sequence b is slot j % page_size of the page
  // block_table[b][j / page_size]. Slots from seqused_k[b] on take no part, and entries behind the
  // last page of a sequence are not read. Forward only.
  std::int64_t page_size = 0;
  std::int64_t pages = 0;
  std::int64_t max_pages = 0;     // columns of block_table; seqlen_k <= max_pages * page_size
  std::int64_t table_stride = 0;  // elements between its rows

  // Row i of a sequence with Sq rows and Sk keys sees key j when
  //   i + shift - window_left <= j <= i + shift + window_right;   kUnbounded lifts a side.
  // Causal is window_right = 0. The shift is Sk - Sq, bottom-right aligned, or with has_mask_shift
  // mask_shift[b], from -(2^29 - 1) to 2^29 - 1.
  bool has_mask_shift = false;
  std::int64_t window_left = kUnbounded;
  std::int64_t window_right = kUnbounded;

  // Multiplies Q K^T; must be finite. Not a number until it is set: no value is right for all.
  float scale = std::numeric_limits<float>::quiet_NaN();
  Float32Precision float32_precision = Float32Precision::highest;  // read when dtype is f32
  SoftmaxOptions softmax;

  bool wants_lse = true;  // LSE fp32: [batch, heads_q, seqlen_q], packed: [heads_q, total_q]

  // Forward only. Raises each entry of max_logit, fp32 [batch, heads_q], to the largest scaled
  // score of that sequence and head, or to NaN where a row's LSE is: the caller sets -inf before
  // the first of the runs that share it. GPU kernels then follow the running maximum of every row
  // closely, which costs a few percent.
  bool wants_max_logit = false;
  // Forward only. O is fp32, as accumulated: normalised like any O, but not rounded to `dtype`, for
  // partial results that will be merged by their LSE.
  bool output_f32 = false;
  // Forward only, for the backward of 16-bit attention: writes o_low, 8 more bits of O than `dtype`
  // holds (core/low_bits.h), so that delta = rowsum(dO * O) is not that of a rounded O
  // (docs/numerics.md). dtype must be f16 or bf16, and output_f32 false. o_low is contiguous,
  // [batch, seqlen_q, heads_q, head_dim_v] or packed [total_q, heads_q, head_dim_v], whatever the
  // layout of o, and its address a multiple of 16 bytes. Rows that see no key, or that no sequence
  // uses, have unspecified low bits, which no backward looks at: O = 0 has none.
  bool wants_o_low = false;
  // Forward only. Into how many parts the keys of each sequence are cut, at whole tiles. The parts
  // are attended to by blocks of their own, and their fp32 results merged in ascending order: for
  // few queries over many keys, which would occupy few multiprocessors (docs/design/split.md). 1:
  // not cut. kAutomaticSplits: the plan decides by a model of the time. Up to kMaxSplits.
  int num_splits = 1;

  Layout q, k, v, o;  // e4m3: q, k and v are not read, those operands have one form (quantize.h)

  Fp8Format fp8;  // read when dtype is e4m3

  Variant variant;
};

// What belongs to q, k and v of dtype e4m3; forms in quantize.h.
struct Fp8Tensors {
  const float* scale_q = nullptr;
  const float* scale_kv = nullptr;
  const std::uint32_t* nonfinite_v = nullptr;  // not read by the backward
  const float* q_dot_mean = nullptr;           // null unless smooth_k
};

struct ForwardTensors {
  const void* q = nullptr;                     // [batch, seqlen_q, heads_q, head_dim]
  const void* k = nullptr;                     // [batch, seqlen_k, heads_k, head_dim]
  const void* v = nullptr;                     // [batch, seqlen_k, heads_k, head_dim_v]
  void* o = nullptr;                           // [batch, seqlen_q, heads_q, head_dim_v]
  float* lse = nullptr;                        // contiguous; may be null when wants_lse is false
  std::int8_t* o_low = nullptr;                // shape of o, contiguous; null unless wants_o_low
  float* max_logit = nullptr;                  // contiguous; null unless wants_max_logit
  const std::int32_t* cu_seqlens_q = nullptr;  // [batch + 1], packed Q only
  const std::int32_t* cu_seqlens_k = nullptr;  // [batch + 1], packed K only
  const std::int32_t* seqused_q = nullptr;     // [batch]
  const std::int32_t* seqused_k = nullptr;     // [batch]
  const std::int32_t* k_begin = nullptr;       // [batch]; null unless has_k_begin
  const std::int32_t* mask_shift = nullptr;    // [batch]; null unless has_mask_shift
  const std::int32_t* block_table = nullptr;   // [batch, max_pages]; null unless page_size > 0
  Fp8Tensors fp8;                              // dtype e4m3 only
  VariantTensors variant;
};

// The mask of a canonical problem, in which a side that hides nothing is kUnbounded. Under a causal
// mask the last query sees the last key, which a shift changes. A mask expression may hide any
// pair, as a window may.
constexpr MaskKind mask_kind(const ForwardProblem& problem) {
  return problem.variant.mask_expression != Expression::none ? MaskKind::window
         : problem.window_left != kUnbounded                 ? MaskKind::window
         : problem.window_right == kUnbounded                ? MaskKind::full
         : problem.window_right != 0                         ? MaskKind::window
         : problem.has_mask_shift                            ? MaskKind::window
                                                             : MaskKind::causal;
}

// The dtype of O.
constexpr DType output_dtype(const ForwardProblem& problem) {
  return problem.output_f32             ? DType::f32
         : problem.dtype == DType::e4m3 ? problem.fp8.output
                                        : problem.dtype;
}

// Of the gradient of the bias, contiguous: 1 along an axis of stride 0, which shares it.
struct BiasShape {
  std::int64_t batch, heads, queries, keys;
  constexpr std::int64_t count() const { return batch * heads * queries * keys; }
};

constexpr BiasShape bias_gradient_shape(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return BiasShape{bias.batch == 0 ? 1 : problem.batch, bias.head == 0 ? 1 : problem.heads_q,
                   bias.query == 0 ? 1 : problem.seqlen_q, problem.seqlen_k};
}

// Where a deterministic backward of 16-bit attention has its statistics of the keys from: of each
// sequence and key head the bounds from which the integers of dQ get their unit
// (core/integer_unit.h), and the mean of some keys (docs/numerics.md). With those of the whole
// sequence, the backward of a range of rows with the keys that these see has the bits of dQ that
// the backward of the whole sequence has (docs/design/distributed.md).
//   own      the keys of the call
//   given    BackwardTensors::key_statistics, which this call reads
//   written  there, too: this call writes it, from k and v, and does nothing else. Its queries are
//            as many as its keys, without a window; the pointers to them are not looked at.
// Statistics are of one backend and dtype, and of any head dims with equal elements but zeros.
enum class KeyStatistics : std::uint8_t { own = 0, given, written };

// int32 [batch, heads_k, key_statistics_ints()]: the fields of core::KeyBounds but the last, 0,
// whether the mean is large, and as bits of floats the mean. Maxima of disjoint keys unite to the
// larger one, counts and sums of exponents add up, and a mean is that of
// core::key_sample_count(..) keys at the places core::key_sample(..).
inline constexpr int kKeyStatisticsBounds = 8;

constexpr std::int64_t key_statistics_ints(const ForwardProblem& problem) {
  return kKeyStatisticsBounds + problem.head_dim;
}

// Gradients of the forward problem. dLSE is folded into the row term:
//   dS = P * (dO V^T - rowsum(dO * O) + dLSE)
//
// FP8 (forward.dtype e4m3): q, k and v are the operands of the FP8 forward, in blocks of 128 rows,
// and o and lse are its own. dO, P and dS become e4m3, too, and all five products are of e4m3
// numbers (docs/design/fp8-backward.md). o, grad_o and the gradients have the dtype
// forward.fp8.output. grad_q and grad_k are those of Q and K as they were quantised, rotated and
// less its mean, grad_q times and grad_k divided by core::rotation_balance of their Hadamard group:
// scale * dLSE * mean(K) is missing in grad_q.
struct BackwardProblem {
  // wants_lse must be true: the backward recomputes P from LSE. wants_max_logit, wants_o_low and
  // output_f32 must be false: O has the dtype of Q here, or fp8.output.
  ForwardProblem forward;
  bool deterministic = false;  // equal inputs give bit-equal gradients
  bool has_grad_lse = false;
  // The forward's o_low is there; f16 and bf16 only. O, LSE and the keys must then belong to one
  // forward, so that each row of dS sums to its dLSE: what the rounded dS lacks of that is an
  // error, which the Hopper backward takes out of dQ (docs/numerics.md). A backward over some of
  // the keys, with the LSE of all, goes without it.
  bool has_o_low = false;
  KeyStatistics key_statistics = KeyStatistics::own;  // another one needs deterministic
  // Which gradients of the variant's tensors are wanted. That of the bias has the bias's shape,
  // contiguous: [batch | 1, heads_q | 1, seqlen_q | 1, seqlen_k], 1 where its stride is 0.
  bool wants_grad_alibi = false;
  bool wants_grad_sinks = false;
  bool wants_grad_bias = false;
  // Of the tensors that the score captures: a bit for each, and how many elements those have.
  std::uint32_t wants_grad_captured = 0;
  std::int64_t grad_captured_elements = 0;
  Layout grad_o, grad_q, grad_k, grad_v;
};

struct BackwardTensors {
  ForwardTensors forward;              // q, k, v, o and lse as the forward left them
  const void* grad_o = nullptr;        // like o
  const float* grad_lse = nullptr;     // like lse; null unless has_grad_lse
  const std::int8_t* o_low = nullptr;  // beside the o of the same forward; null unless has_o_low
  void* grad_q = nullptr;              // like q
  void* grad_k = nullptr;              // like k
  void* grad_v = nullptr;              // like v
  std::int32_t* key_statistics = nullptr;  // contiguous; null where the problem's are its own
  VariantGradients variant;
};

}  // namespace pantile
