// What the dispatcher and the kernels agree on: one call's tensors and tiling, the scratch memory
// of a thread, and the table of entry points that each instruction set exports.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dropout.h"
#include "core/geometry.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "expression/instruction.h"
#include "pantile/device.h"
#include "pantile/dtype.h"
#include "pantile/problem.h"

namespace pantile::cpu {

// Rows and keys per tile. All are multiples of every register block's rows (6, 8, 12) and of every
// vector width (4, 8, 16 floats). They also fix the order of sums, so they must not depend on the
// number of threads.
inline constexpr int kForwardRows = 48;
inline constexpr int kForwardKeys = 96;
inline constexpr int kBackwardRows = 96;
inline constexpr int kBackwardKeys = 48;
inline constexpr int kColumnPad = 16;  // rows of tiles in scratch memory are whole vectors

// Sequences, or ranges of rows that begin anywhere in one packed tensor: the range of sequence b
// begins at row begins[b] and has seqused[b] rows.
struct Side : core::SequenceSide {
  const std::int32_t* begins = nullptr;
};

PANTILE_HD constexpr core::Sequence locate(const Side& side, int batch) {
  core::Sequence sequence = core::locate_sequence(side, batch);
  if (side.begins != nullptr) {
    sequence.row = side.begins[batch];
    sequence.offset = sequence.row * side.seq_stride;
  }
  return sequence;
}

// Rows of a sequence: the first `length` take part, `room` are there to be written.
struct Extent {
  int length;
  int room;
};

PANTILE_HD constexpr Extent extent_of(const Side& side, int batch) {
  const int length = core::max_of(locate(side, batch).length, 0);
  if (side.seqused == nullptr || side.begins != nullptr) {
    return Extent{length, length};
  }
  Side whole = side;
  whole.seqused = nullptr;
  const int room = core::max_of(locate(whole, batch).length, 0);
  return Extent{core::clamp(length, 0, room), room};
}

// Where the slots of paged keys lie; `table` is null when keys are not in pages. The batch stride
// of their operands is the distance of pages.
struct PageTable {
  const std::int32_t* table = nullptr;
  std::int64_t stride = 0;  // between rows of the table
  int page_size = 1;

  // Elements from the tensor's first one to key `key` of a sequence.
  PANTILE_HD constexpr std::int64_t offset(const Side& side, int batch, int key) const {
    return table[batch * stride + key / page_size] * side.batch_stride +
           key % page_size * side.seq_stride;
  }
};

// One of q, k, v, o and their gradients.
struct Operand {
  void* data = nullptr;
  Side side;
  std::int64_t head_stride = 0;  // elements
};

// LSE and dLSE: float [batch, heads_q, seqlen_q], packed [heads_q, total_q].
struct RowValues {
  float* data = nullptr;
  std::int64_t batch_stride = 0;  // elements; 0 when packed
  std::int64_t head_stride = 0;   // elements
};

// The mask beside the window.
struct MaskJob {
  std::uint32_t clauses = 0;  // as Variant::mask_clauses; 0: no mask
  const std::uint8_t* blocks = nullptr;
  const std::uint8_t* elements = nullptr;
  MaskLayout block_layout, element_layout;
  int block = 1;  // queries and keys of a block
  const std::int32_t* query_ids = nullptr;
  const std::int32_t* key_ids = nullptr;
  std::int64_t batch_queries = 0, batch_keys = 0;
  const std::int32_t* prefixes = nullptr;
  std::int64_t batch_prefixes = 0;
  bool has_expression = false;  // in place of clauses
  expression::Program program;
  const CapturedTensor* captured = nullptr;

  constexpr bool any() const { return clauses != 0 || has_expression; }
};

// A score of the user's own. The programs are empty without one.
struct ScoreJob {
  bool exists = false;
  expression::Program value;
  expression::Program value_and_slope;
  expression::Program gradients;
  const expression::Addend* addends = nullptr;
  int addend_count = 0;
  const CapturedTensor* captured = nullptr;
};

// What changes plain attention (pantile/variant.h).
struct VariantJob {
  bool any_score = false;         // softcap, ALiBi, bias or an expression
  float softcap = 0.0f;           // 0: none
  const float* slopes = nullptr;  // of ALiBi, or null
  std::int64_t slope_batch_stride = 0;
  const float* sinks = nullptr;
  DType bias_dtype = DType::f32;
  const void* bias = nullptr;
  std::int64_t bias_batch = 0, bias_head = 0, bias_query = 0;  // elements
  int dropped = 0;                                             // of 256
  core::PhiloxKey key{};
  std::uint32_t batch_offset = 0, head_offset = 0, query_offset = 0, key_offset = 0;
  MaskJob mask;
  ScoreJob score;
  const expression::Programs* score_programs = nullptr;  // these two: for the reference
  const expression::Programs* mask_programs = nullptr;
};

// The parts that both passes share.
struct Job {
  DType dtype = DType::f32;
  int batch = 0;
  int dim = 0;    // of Q and K
  int dim_v = 0;  // of V and O
  core::Heads heads{1, 1};
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  const std::int32_t* mask_shift = nullptr;  // [batch], or null: aligned to the bottom right
  float scale = 0.0f;
  Operand q, k, v, o;
  PageTable pages;  // of k and v
  VariantJob variant;
};

struct ForwardJob : Job {
  DType output_dtype = DType::f32;  // of O
  RowValues lse;
  Operand o_low;               // int8, contiguous, like o; data may be null
  float* max_logit = nullptr;  // [batch, heads_q], or null; raised by many threads
  int item_rows = 0;           // a multiple of kForwardRows
  core::TileOrder order;       // tiles of item_rows rows
};

// FP8 operands in the forms of pantile/quantize.h: q, k and v hold codes. `dtype` is that of O.
struct Fp8ForwardJob : ForwardJob {
  Fp8Format format;
  Fp8Tensors tensors;
  std::int64_t blocks_q = 0, blocks_k = 0;  // of 128 rows, of one head
};

struct BackwardJob : Job {
  Operand grad_o, grad_q, grad_k, grad_v;
  RowValues lse, grad_lse;
  Operand o_low;              // int8, contiguous, like o; data may be null
  core::TileOrder row_order;  // tiles of kBackwardRows rows
  core::TileOrder key_order;  // tiles of item_keys keys; ascending, see `turns`
  int item_keys = 0;          // a multiple of kBackwardKeys

  // Ranges of keys may overlap: sequences are then worked on one after the other, `first_batch` is
  // the one whose items run, and their dK and dV are summed here, [heads_k][total_k][dim] and
  // [dim_v]. Null when no two sequences share keys.
  int first_batch = 0;
  std::int64_t total_k = 0;
  float* shared_grad_k = nullptr;
  float* shared_grad_v = nullptr;
  double* shared_sums = nullptr;  // the reference's, of dK and then of dV

  // In the workspace, shared by all threads.
  RowValues delta;  // rowsum(dO * O) - dLSE
  Operand sum_q;    // dQ in f32, not yet scaled
  // Q and dO as operands in f32, or null: packed once for all key tiles, when there is room for it.
  // `finite` says for each row tile whether its rows of Q (bit 0) and dO (bit 1) are, because only
  // then do they serve as both kinds of operand.
  Operand packed_q, packed_grad_o;
  std::uint8_t* finite = nullptr;  // [batch][heads_q][row_tiles]
  // A row tile's dQ is summed over key tiles in ascending order: its turn is the key tile that may
  // add next. Work items are handed out in ascending order, so whoever is waited for is running.
  std::int32_t* turns = nullptr;  // [batch][heads_q][row_tiles]
  int row_tiles = 0;              // of the longest sequence
  // Gradients of the variant's tensors, null unless wanted. Sums that items share are taken from
  // their parts, in the workspace, after the last item.
  VariantGradients variant_gradients;
  bool wants_grad_bias = false;
  double* slope_sums = nullptr;  // [batch][heads_q][key tiles]
  double* sink_sums = nullptr;   // [batch][heads_q][row_tiles]
  int key_tiles = 0;             // of item_keys keys, of the longest sequence
  // Of the gradient of the bias, 1 along an axis that shares it; the last two are the lengths of
  // the longest sequence.
  int bias_batches = 0, bias_heads = 0, bias_rows = 0, bias_keys = 0;
  // Of the gradients of captured tensors: sums of each part of the heads, [captured_parts]
  // [captured_elements] in the workspace; and where a tensor's begin, -1 unless it is wanted.
  double* captured_sums = nullptr;
  int captured_parts = 0;
  std::int64_t captured_elements = 0;
  std::int64_t captured_begin[kMaxCaptured] = {-1, -1, -1, -1, -1, -1};
};

// The gradient of the bias has one work item for a tile of queries and keys of it. All queries that
// share a bias are of one item, which sums them in ascending order.
inline int bias_row_tiles(const BackwardJob& job) {
  return core::ceil_div(job.bias_rows, kBackwardRows);
}
inline int bias_key_tiles(const BackwardJob& job) {
  return core::ceil_div(job.bias_keys, kBackwardKeys);
}

// The mask of a sequence.
PANTILE_HD constexpr core::ShiftedMask mask_of(const Job& job, int batch, int rows, int keys) {
  const core::Mask mask = core::make_mask(rows, keys, job.window_left, job.window_right);
  const int shift = job.mask_shift == nullptr ? mask.shift() : job.mask_shift[batch];
  return core::with_shift(mask, shift);
}

// Rows of the summed dK and dV that one work item rounds.
inline constexpr int kSharedRows = 256;

// Raises an entry of max_logit to that of a row. A row whose sum is NaN makes it NaN for good.
inline void raise_max_logit(float* entry, float row_max, float row_sum) {
  float value = row_sum == row_sum ? row_max : row_sum;
  float before = 0.0f;
  __atomic_load(entry, &before, __ATOMIC_RELAXED);
  while ((value > before || value != value) &&
         !__atomic_compare_exchange(entry, &before, &value, true, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
  }
}

// Cuts a block of memory into aligned arrays. Starting from address 0 it only measures.
class Carver {
 public:
  PANTILE_HD explicit Carver(void* base) : at_(reinterpret_cast<std::uintptr_t>(base)) {}

  template <class T>
  PANTILE_HD T* take(std::int64_t count) {
    constexpr std::uintptr_t kAlign = 64;  // a cache line and the widest vector
    T* array = reinterpret_cast<T*>(at_);
    const std::uintptr_t bytes = static_cast<std::uintptr_t>(count) * sizeof(T);
    at_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  PANTILE_HD std::uintptr_t end() const { return at_; }

 private:
  std::uintptr_t at_;
};

PANTILE_HD int padded(int columns) {
  return core::round_up(columns, kColumnPad);
}

// Random bytes of a tile of either pass, which covers up to two blocks of 16 more along each axis.
inline constexpr std::int64_t kRandomBytes =
    (kForwardRows + 32) * (kForwardKeys + 32);  // the backward's tiles are as large

// Bytes of the pairs that a mask shows of a tile of either pass, and of a vector more.
inline constexpr std::int64_t kShownBytes = kForwardRows * kForwardKeys + 64;

// A thread's own memory.
struct ForwardScratch {
  float* keys;           // K tile, A operand [kForwardKeys][dim]
  float* values;         // V tile, B operand summed over keys [kForwardKeys][dim_v]
  float* queries;        // Q^T, for each row tile a B operand [dim][kForwardRows]
  float* scores;         // S^T, then P^T [kForwardKeys][kForwardRows]
  float* outputs;        // O before normalisation [item_rows][dim_v]
  float* row_max;        // [item_rows]
  float* row_sum;        // [item_rows]
  float* row_factor;     // [kForwardRows]
  std::uint8_t* random;  // [kRandomBytes], with dropout
  std::uint8_t* shown;   // [kShownBytes], with a mask beside the window
  // The same tiles of paged K and V, gathered: [kForwardKeys][dim] and [dim_v], as in the tensors.
  void* paged_keys;
  void* paged_values;
  std::size_t bytes;
};

PANTILE_HD ForwardScratch forward_scratch(const ForwardJob& job, void* base) {
  const std::int64_t dim = padded(job.dim);
  const std::int64_t dim_v = padded(job.dim_v);
  Carver carver(base);
  ForwardScratch scratch{};
  scratch.keys = carver.take<float>(kForwardKeys * dim);
  scratch.values = carver.take<float>(kForwardKeys * dim_v);
  scratch.queries = carver.take<float>(job.item_rows * dim);
  scratch.scores = carver.take<float>(kForwardKeys * kForwardRows);
  scratch.outputs = carver.take<float>(job.item_rows * dim_v);
  scratch.row_max = carver.take<float>(job.item_rows);
  scratch.row_sum = carver.take<float>(job.item_rows);
  scratch.row_factor = carver.take<float>(kForwardRows);
  scratch.random = carver.take<std::uint8_t>(job.variant.dropped > 0 ? kRandomBytes : 0);
  scratch.shown = carver.take<std::uint8_t>(job.variant.mask.any() ? kShownBytes : 0);
  const std::int64_t paged = job.pages.table == nullptr ? 0 : kForwardKeys * dtype_bytes(job.dtype);
  scratch.paged_keys = carver.take<char>(paged * job.dim);
  scratch.paged_values = carver.take<char>(paged * job.dim_v);
  scratch.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return scratch;
}

// The FP8 forward works on kFp8Rows query rows and one scale block of keys at a time.
inline constexpr int kFp8Rows = 96;
inline constexpr int kFp8Keys = 128;  // at most
inline constexpr int kRegisterRows =
    12;  // of the tallest register block: products write whole ones

struct Fp8Scratch {
  float* keys;     // K tile, A operand [keys][dim]
  float* values;   // V^T tile, A operand [dim_v][keys]
  float* queries;  // Q^T, B operand [dim][kFp8Rows]
  float* scores;   // S^T [keys][kFp8Rows]
  float* weights;  // P^T [keys][kFp8Rows], keys in the order of V's columns
  float* part;     // (P V)^T of one tile [dim_v][kFp8Rows]
  float* outputs;  // O^T before normalisation [dim_v][kFp8Rows]
  std::size_t bytes;
};

PANTILE_HD Fp8Scratch fp8_scratch(const Fp8ForwardJob& job, void* base) {
  const std::int64_t rows_v = core::round_up(job.dim_v, kRegisterRows) + kRegisterRows;
  Carver carver(base);
  Fp8Scratch scratch{};
  scratch.keys = carver.take<float>((kFp8Keys + kRegisterRows) * padded(job.dim));
  scratch.values = carver.take<float>(rows_v * kFp8Keys);
  scratch.queries = carver.take<float>(std::int64_t{padded(job.dim)} * kFp8Rows);
  scratch.scores = carver.take<float>((kFp8Keys + kRegisterRows) * kFp8Rows);
  scratch.weights = carver.take<float>(kFp8Keys * kFp8Rows);
  scratch.part = carver.take<float>(rows_v * kFp8Rows);
  scratch.outputs = carver.take<float>(rows_v * kFp8Rows);
  scratch.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return scratch;
}

struct BackwardScratch {
  float* keys;            // K^T, for each subtile a B operand [dim][kBackwardKeys]
  float* keys_summed;     // K, B operand summed over keys [item_keys][dim]
  float* values;          // V^T, for each subtile a B operand [dim_v][kBackwardKeys]
  float* queries;         // Q, A operand [kBackwardRows][dim]
  float* queries_summed;  // Q, B operand summed over rows [kBackwardRows][dim]
  float* grads;           // dO, A operand [kBackwardRows][dim_v]
  float* grads_summed;    // dO, B operand summed over rows [kBackwardRows][dim_v]
  float* scores;          // S, then P [kBackwardRows][kBackwardKeys]
  float* grad_scores;     // dP, then dS [kBackwardRows][kBackwardKeys]
  float* grad_keys;       // dK [item_keys][dim]
  float* grad_values;     // dV [item_keys][dim_v]
  float* grad_queries;    // dQ of a ragged row tile [kBackwardRows][dim]
  float* slopes;          // derivatives of the softcap [kBackwardRows][kBackwardKeys], with one
  float* score_slopes;    // of the score of the user's own [kBackwardRows][kBackwardKeys], with one
  float* score_inputs;    // what it is computed from, likewise, for gradients of captured tensors
  float* grad_bias;       // sums of a tile [kBackwardRows][kBackwardKeys], where they are wanted
  std::uint8_t* random;   // [kRandomBytes] with dropout
  std::uint8_t* shown;    // [kShownBytes], with a mask beside the window
  std::size_t bytes;
};

PANTILE_HD BackwardScratch backward_scratch(const BackwardJob& job, void* base) {
  const std::int64_t dim = padded(job.dim);
  const std::int64_t dim_v = padded(job.dim_v);
  constexpr std::int64_t kScores = kBackwardKeys * kBackwardRows;
  Carver carver(base);
  BackwardScratch scratch{};
  scratch.keys = carver.take<float>(job.item_keys * dim);
  scratch.keys_summed = carver.take<float>(job.item_keys * dim);
  scratch.values = carver.take<float>(job.item_keys * dim_v);
  scratch.queries = carver.take<float>(kBackwardRows * dim);
  scratch.queries_summed = carver.take<float>(kBackwardRows * dim);
  scratch.grads = carver.take<float>(kBackwardRows * dim_v);
  scratch.grads_summed = carver.take<float>(kBackwardRows * dim_v);
  scratch.scores = carver.take<float>(kScores);
  scratch.grad_scores = carver.take<float>(kScores);
  scratch.grad_keys = carver.take<float>(job.item_keys * dim);
  scratch.grad_values = carver.take<float>(job.item_keys * dim_v);
  scratch.grad_queries = carver.take<float>(kBackwardRows * dim);
  scratch.slopes = carver.take<float>(job.variant.softcap > 0.0f ? kScores : 0);
  scratch.score_slopes = carver.take<float>(job.variant.score.exists ? kScores : 0);
  scratch.score_inputs = carver.take<float>(job.captured_parts > 0 ? kScores : 0);
  scratch.grad_bias = carver.take<float>(job.wants_grad_bias ? kScores : 0);
  scratch.random = carver.take<std::uint8_t>(job.variant.dropped > 0 ? kRandomBytes : 0);
  scratch.shown = carver.take<std::uint8_t>(job.variant.mask.any() ? kShownBytes : 0);
  scratch.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return scratch;
}

struct DecodeJob;  // cpu/kv_job.h

// One instruction set's kernels. `item` is a work id of the job's order, `scratch` is the calling
// thread's own memory.
struct KernelTable {
  void (*forward)(const ForwardJob& job, int item, void* scratch);
  void (*prepare_backward)(const BackwardJob& job, int item, void*);  // work ids of row_order
  void (*backward)(const BackwardJob& job, int item, void* scratch);  // of key_order
  // Items: [bias_batches][bias_heads][bias_row_tiles()][bias_key_tiles()].
  void (*bias_gradient)(const BackwardJob& job, int item, void* scratch);
  void (*captured_gradient)(const BackwardJob& job, int item, void* scratch);  // captured_parts
  // Items: [heads_k][kSharedRows rows of total_k].
  void (*write_shared_keys)(const BackwardJob& job, int item, void*);
  void (*forward_fp8)(const Fp8ForwardJob& job, int item, void* scratch);
  void (*decode)(const DecodeJob& job, int item, void* scratch);        // cpu/kv_job.h
  void (*merge_decode)(const DecodeJob& job, int item, void* scratch);  // items of one chunk
};

namespace baseline {
extern const KernelTable kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
#endif

}  // namespace pantile::cpu
