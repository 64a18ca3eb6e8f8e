// Inference: attention over a cache of keys and values, and what is appended to it.
//
//   KvProblem problem;                     /* shapes, types, strides; no lengths */
//   plan_append(problem, device, {}, &append);  plan_decode(problem, device, {}, &decode);
//   every step, once for all layers:       run_schedule(decode, tensors, schedule, stream);
//   every layer:                           run_append(append, tensors, stream);
//                                          run_decode(decode, tensors, workspace, stream);
//
// A plan depends on capacities only: lengths and block tables are read on the device, so that a
// CUDA graph captured at one length serves every other.
//
// Sequence b has `lengths[b]` slots of the cache in use before the step, and new[b] keys that this
// step appends at slots lengths[b], lengths[b] + 1, ...; new[b] is seqlen_new, with packed_new
// cu_seqlens_new[b + 1] - cu_seqlens_new[b]. Decode reads keys leftpad[b] <= j < Sk of sequence b:
//
//   Sk = min(lengths[b] + new[b], capacity)
//
// Query i of the sequence's Sq (seqlen_q, or of cu_seqlens_q) sees key j when
//
//   i + (Sk - Sq) - window_left <= j <= i + (Sk - Sq) + window_right     (kUnbounded lifts a side)
//
// and with a tree mask, of the last Sq keys, those alone whose bit is set. O and LSE are those of
// attention.h: O = softmax(scale * Q K^T + mask) V, LSE its natural logarithm; a query that sees no
// key gets O = 0 and LSE = -inf, with a sink LSE = sink. Slots of other numbers and pages that are
// not named are never read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "pantile/attention.h"
#include "pantile/device.h"
#include "pantile/dtype.h"
#include "pantile/export.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile {

inline constexpr int kMaxKvHeadDim = 576;   // of Q and K: 512 + 64 of a latent cache
inline constexpr int kMaxTreeQueries = 64;  // queries of a sequence under a tree mask
inline constexpr int kSplitGranule = 64;    // keys: split_keys is a multiple of it

// What an element of the cache is.
//   plain   the dtype of Q
//   e4m3    8-bit floats, times a scale
//   int8    -127 .. 127, times a scale
enum class CacheFormat : std::uint8_t { plain = 0, e4m3, int8 };

// What shares a scale of an 8-bit cache (fp32; a code times its scale is the number).
//   none    no scale: 1 (e4m3 only)
//   head    [batch, heads_k], given by the caller; strides of 0 share one, down to one for a tensor
//   token   one for each slot and key head, beside the cache; written by append
enum class CacheScale : std::uint8_t { none = 0, head, token };

// Where the keys of a sequence are cut into parts that are computed apart and merged in the order
// of the keys.
//   automatic  where the device is used best
//   invariant  by the sequence's own Sk alone (core/kv_split.h): the bits of a sequence are the
//   same
//              alone, in every batch, at every place in it
//   fixed      at multiples of split_keys, counted from slot 0: the bits of a query are the same in
//              every call in which it sees the same keys, however many queries it comes with
enum class KvSplit : std::uint8_t { automatic = 0, invariant, fixed };

// Distances in elements. The last axis (dim) has stride 1. A page, or with page_size 0 a row of a
// dense cache, is a `block`; NHD and HND, or K and V of one tensor, are strides.
struct CacheLayout {
  std::int64_t block = -1;
  std::int64_t slot = -1;
  std::int64_t head = -1;
  int base_align_bytes = 16;  // a power of two that divides the address of the first element
};

// Distances in floats between scales: CacheScale::head uses block as the distance between sequences
// of the call, and head; 0 shares.
struct ScaleLayout {
  std::int64_t block = 0;
  std::int64_t slot = 0;
  std::int64_t head = 0;
};

struct KvProblem {
  DType dtype = DType::bf16;    // of Q, new K and V, a plain cache and, unless output_f32, of O
  std::int64_t batch = 0;       // sequences of this call
  std::int64_t heads_q = 0;     // a multiple of heads_k
  std::int64_t heads_k = 0;     //
  std::int64_t head_dim = 0;    // of Q and K, 1..kMaxKvHeadDim
  std::int64_t head_dim_v = 0;  // of V and O, 1..kMaxHeadDim
  // V is the first head_dim_v channels of K (a latent cache, MLA): the cache of V, its layout and
  // scale, and new V are not read; head_dim_v <= head_dim.
  bool v_in_k = false;

  std::int64_t seqlen_q = 0;    // queries per sequence; packed: of the longest
  bool packed_q = false;        // Q and O are [total_q, heads_q, dim], with cu_seqlens_q
  std::int64_t total_q = 0;     // rows of packed Q; batch * seqlen_q, or 0, otherwise
  std::int64_t seqlen_new = 0;  // new keys per sequence; packed: of the longest. 0: none
  bool packed_new = false;      // new K and V are [total_new, heads_k, dim], with cu_seqlens_new
  std::int64_t total_new = 0;   // rows of packed new K; batch * seqlen_new, or 0, otherwise

  // The cache: `blocks` pages of page_size slots, named by rows of block_table; or, with
  // page_size 0, `blocks` rows of block_slots slots.
  std::int64_t blocks = 0;
  std::int64_t page_size = 0;
  std::int64_t block_slots = 0;   // dense only
  std::int64_t table_rows = 0;    // of block_table; paged only
  std::int64_t table_pages = 0;   // entries of a row; capacity = table_pages * page_size
  std::int64_t table_stride = 0;  // entries between rows
  // Sequence b uses row cache_index[b], not b, of block_table or of the dense cache. Rows may be
  // named more than once if nothing is appended.
  bool has_cache_index = false;
  bool has_leftpad = false;  // slots below leftpad[b] hold no keys; lengths[b] counts them

  CacheFormat format = CacheFormat::plain;
  CacheScale scale_kind = CacheScale::none;  // of K and of V
  ScaleLayout scale_k, scale_v;

  std::int64_t window_left = kUnbounded;
  std::int64_t window_right = kUnbounded;  // 0: causal
  bool has_tree_mask = false;  // seqlen_q <= 64, no window_left; window_right is not read
  bool has_sinks = false;      // fp32 [heads_q], not scaled: one more weight per row
  float softcap = 0.0f;        // 0: none; score = softcap * tanh(score / softcap)
  float scale = std::numeric_limits<float>::quiet_NaN();  // multiplies Q K^T; must be set

  KvSplit split = KvSplit::automatic;
  std::int64_t split_keys = 0;  // KvSplit::fixed: a positive multiple of kSplitGranule; else 0

  bool wants_lse = false;   // fp32 [batch, heads_q, seqlen_q], packed [heads_q, total_q]
  bool output_f32 = false;  // O is not rounded, for results that will be merged by LSE

  // Append only. The first rotary_dim channels of new K are rotated by position
  // lengths[b] + i - leftpad[b], and with rotates_q also those of Q, which goes to q_rotated:
  // decode reads that in place of q. Channel c is paired with c + rotary_dim / 2, or interleaved:
  // 2c with 2c + 1. With v_in_k the LAST rotary_dim channels. Rows of cos and sin are positions.
  std::int64_t rotary_dim = 0;  // 0: none; even, at most head_dim
  bool rotary_interleaved = false;
  bool rotates_q = false;
  DType rotary_dtype = DType::f32;    // of cos and sin: f32 or dtype
  std::int64_t rotary_positions = 0;  // rows of cos and sin; positions outside use the nearest
  std::int64_t rotary_stride = 0;     // elements between rows of cos and of sin

  Layout q, o, k_new, v_new, q_rotated;  // as in ForwardProblem; q_rotated shaped like q
  CacheLayout k, v;
};

constexpr std::int64_t capacity(const KvProblem& problem) {
  return problem.page_size > 0 ? problem.table_pages * problem.page_size : problem.block_slots;
}

constexpr DType output_dtype(const KvProblem& problem) {
  return problem.output_f32 ? DType::f32 : problem.dtype;
}

// One struct for all runs; each reads what the comment names. Null where the problem says so.
struct KvTensors {
  const void* q = nullptr;  // decode; append with rotates_q. [batch, seqlen_q, heads_q, head_dim]
  void* o = nullptr;        // decode. [batch, seqlen_q, heads_q, head_dim_v]
  float* lse = nullptr;     // decode; null unless wants_lse

  void* k = nullptr;         // the cache; decode reads, append writes
  void* v = nullptr;         // null with v_in_k
  float* scale_k = nullptr;  // null with CacheScale::none; append writes with CacheScale::token
  float* scale_v = nullptr;

  const std::int32_t* lengths = nullptr;         // [batch], before the step
  const std::int32_t* cu_seqlens_q = nullptr;    // [batch + 1], packed_q only
  const std::int32_t* cu_seqlens_new = nullptr;  // [batch + 1], packed_new only
  const std::int32_t* block_table = nullptr;     // [table_rows, table_pages] page numbers
  const std::int32_t* cache_index = nullptr;     // [batch]
  const std::int32_t* leftpad = nullptr;         // [batch]
  // Decode. [batch, seqlen_q] or [total_q], contiguous: bit j of query i: it sees key Sk - Sq + j.
  const std::int64_t* tree_mask = nullptr;
  const float* sinks = nullptr;  // decode

  const void* k_new = nullptr;       // append. [batch, seqlen_new, heads_k, head_dim]
  const void* v_new = nullptr;       // append; null with v_in_k
  const void* rotary_cos = nullptr;  // append. [rotary_positions, rotary_dim / 2]
  const void* rotary_sin = nullptr;
  void* q_rotated = nullptr;  // append with rotates_q: written, all head_dim channels; may be q

  // Decode: what run_schedule wrote for these lengths, DecodePlan::schedule_ints entries, or null:
  // the run then makes it for itself.
  const std::int32_t* schedule = nullptr;
};

struct DecodePlan {
  KvProblem problem;  // canonical
  DeviceProps device;
  const KernelInfo* kernel = nullptr;
  int tile_q = 0;                  // packed rows (query, query head of the group) of a work item
  int tile_k = 0;                  // keys of a step
  int blocks = 0;                  // thread blocks launched; CPU: work items
  std::int64_t schedule_ints = 0;  // int32 entries of a schedule; depends on capacities only
  Workspace workspace;
};

struct AppendPlan {
  KvProblem problem;  // canonical
  DeviceProps device;
  const KernelInfo* kernel = nullptr;
  int blocks = 0;
};

// As plan_forward: validates, then takes the first row of the table that accepts.
PANTILE_API Status plan_decode(const KvProblem& problem, const DeviceProps& device,
                               const PlanOptions& options, DecodePlan* plan);
PANTILE_API Status plan_append(const KvProblem& problem, const DeviceProps& device,
                               const PlanOptions& options, AppendPlan* plan);

// Cuts the sequences into the plan's work. Reads lengths and cu_seqlens only. Layers of one step
// share the schedule. `schedule`: plan.schedule_ints entries; nothing is done when that is 0.
PANTILE_API Status run_schedule(const DecodePlan& plan, const KvTensors& tensors,
                                std::int32_t* schedule, void* stream);
// Reads the cache with the keys of this step in it: run_append comes first.
PANTILE_API Status run_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace,
                              void* stream);
// Writes new keys and values into the cache: rotated, quantised as the format says. A key whose
// slot lies outside of 0 <= slot < capacity, or on a page outside of 0 <= page < blocks, is
// dropped, and nothing else is written. Two sequences of a call must not share the slots that are
// written.
//   head scales   code = round(x / scale), saturated; NaN and Inf become the code NaN of e4m3
//   token scales  scale = (largest |x| of the slot and head) / 448, int8: / 127; NaN where an x is
//                 NaN or Inf; codes as above, 0 where the scale is 0 or NaN
PANTILE_API Status run_append(const AppendPlan& plan, const KvTensors& tensors, void* stream);

// Checks the contents of CPU-resident arrays: lengths + new within the capacity, every page that a
// sequence uses within the cache, rows of cache_index, leftpad, cu_seqlens. Optional: it reads
// them.
PANTILE_API Status check_cache(const KvProblem& problem, const KvTensors& tensors);

PANTILE_API int explain_decode(const KvProblem& problem, const DeviceProps& device,
                               const PlanOptions& options, Verdict* verdicts, int capacity);
PANTILE_API int explain_append(const KvProblem& problem, const DeviceProps& device,
                               const PlanOptions& options, Verdict* verdicts, int capacity);

PANTILE_API const char* cache_format_name(CacheFormat format);
PANTILE_API const char* cache_scale_name(CacheScale scale);
PANTILE_API const char* kv_split_name(KvSplit split);

}  // namespace pantile
