// Split-KV forwards: where the keys of a sequence are cut, the arrays that describe the parts to an
// ordinary forward, and the weights with which their results are merged. Shared by the host, the
// CPU backend and the kernels of both GPU families (docs/design/split.md).
//
// Each part is a sequence of its own to the forward that attends to it. Part p of sequence b is
// sequence b * parts + p of a packed problem, whose queries are `parts` copies of the sequence's
// and whose keys lie one part behind the other, where they are.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/sequence.h"
#include "core/softmax_state.h"

namespace pantile::core {

// How a part masks what the whole sequence masks.
//   full     no mask: parts have none
//   causal   the keys that every query sees are cut into parts without a mask, the prefix; the
//            others, from the last tile border before the diagonal on, are the tail, a part whose
//            causal mask is aligned to the bottom right like the sequence's
//   shifted  any window: each part shifts it by where it begins
enum class SplitForm : int { full, causal, shifted };

// Parts of the prefix of a causal split into `splits`, and of another one.
PANTILE_HD constexpr int prefix_parts(SplitForm form, int splits) {
  return form == SplitForm::causal ? splits - 1 : splits;
}

// What is cut of one sequence into prefix_parts(), and the tail.
struct KeySplit {
  Span cut;   // keys; empty: no query sees any, or all of them are the tail's
  Span tail;  // empty unless causal
  int parts, tile;
};

template <class AnyMask>
PANTILE_HD constexpr KeySplit split_keys(SplitForm form, const AnyMask& mask, int splits,
                                         int tile) {
  KeySplit split{{0, mask.keys}, {0, 0}, prefix_parts(form, splits), tile};
  if (mask.rows <= 0) {
    split.cut = Span{0, 0};
  } else if (form == SplitForm::causal) {
    const int seen = clamp(mask.keys - mask.rows + 1, 0, mask.keys);  // by the first query
    split.cut.end = seen / tile * tile;
    split.tail = Span{split.cut.end, mask.keys};
  } else if (form == SplitForm::shifted) {
    split.cut = Span{visible_keys(mask, 0).begin, visible_keys(mask, mask.rows - 1).end};
    if (split.cut.empty()) {
      split.cut = Span{0, 0};
    }
  }
  return split;
}

// Keys of a part. Parts ascend, leave nothing out and differ by at most one tile; borders between
// them are multiples of the tile. Where there are fewer tiles than parts some are empty.
PANTILE_HD constexpr Span part_keys(const KeySplit& split, int part) {
  if (split.cut.empty()) {
    return Span{split.cut.begin, split.cut.begin};
  }
  const int first = split.cut.begin / split.tile;
  const std::int64_t tiles = ceil_div(split.cut.end, split.tile) - first;
  const auto border = [&](int number) {
    const int at = (first + static_cast<int>(tiles * number / split.parts)) * split.tile;
    return clamp(at, split.cut.begin, split.cut.end);
  };
  return Span{border(part), border(part + 1)};
}

// No part has more keys, for any tile up to kMostSplitTile and sequences of up to `keys` keys.
inline constexpr int kMostSplitTile = 256;
PANTILE_HD constexpr std::int64_t most_part_keys(std::int64_t keys, int parts) {
  return parts < 1 ? 0 : min_of(keys, keys / parts + 2 * kMostSplitTile);
}
PANTILE_HD constexpr std::int64_t most_tail_keys(std::int64_t keys, std::int64_t rows) {
  return min_of(keys, rows + kMostSplitTile);
}

// One split call: what the two kernels around the forwards read and write. Pointers lie where the
// tensors do.
struct SplitJob {
  SplitForm form = SplitForm::full;
  int splits = 1, tile = 1;
  int batch = 0, heads_q = 0, seqlen_q = 0, seqlen_k = 0;
  int head_dim = 0, head_dim_v = 0;
  int window_left = kNoBound, window_right = kNoBound;
  const std::int32_t* cu_seqlens_q = nullptr;  // of the call, or null
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* seqused_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  const std::int32_t* k_begin = nullptr;
  const std::int32_t* mask_shift = nullptr;
  std::int64_t total_q = 0;
  std::int64_t key_rows = 0;  // dense keys: rows from a sequence to the next one

  // Of the parts: [batch * prefix parts] and, of the begins, one more.
  std::int32_t* q_begin = nullptr;
  std::int32_t* q_used = nullptr;  // null unless seqused_q
  std::int32_t* part_begin = nullptr;
  std::int32_t* part_used = nullptr;
  std::int32_t* part_shift = nullptr;  // null unless shifted
  std::int32_t* tail_begin = nullptr;  // causal only: [batch + 1] and [batch]
  std::int32_t* tail_used = nullptr;
  float* part_max_logit = nullptr;  // [batch * prefix parts][heads_q], or null

  // Copies of Q, rows of [heads_q][head_dim]. `wide`: 16 bytes at a time.
  const void* q = nullptr;
  void* q_parts = nullptr;
  std::int64_t q_batch = 0, q_seq = 0, q_head = 0;  // strides, in elements
  int element_bytes = 2;
  bool wide_q = false;

  // Results of the parts, fp32: O like the copies of Q, LSE [heads_q][their rows]. Those of the
  // tail have the rows of Q, and the shape of `lse`.
  const float* part_o = nullptr;
  const float* part_lse = nullptr;
  const float* tail_o = nullptr;
  const float* tail_lse = nullptr;
  const float* sinks = nullptr;  // [heads_q], or null

  void* o = nullptr;
  std::int64_t o_batch = 0, o_seq = 0, o_head = 0;
  bool wide_o = false;  // four elements at a time
  std::int8_t* o_low = nullptr;
  float* lse = nullptr;
  float* max_logit = nullptr;

  PANTILE_HD constexpr int parts() const { return prefix_parts(form, splits); }
};

// The rows of Q of a sequence: [row, row + capacity), of which `used` exist.
struct SplitRows {
  std::int64_t row;
  int capacity, used;
};

PANTILE_HD constexpr SplitRows split_rows(const SplitJob& job, int batch) {
  SequenceSide side;
  side.max_length = job.seqlen_q;
  side.cu_seqlens = job.cu_seqlens_q;
  const Sequence whole = locate_sequence(side, batch);
  const int used =
      job.seqused_q == nullptr ? whole.length : clamp(job.seqused_q[batch], 0, whole.length);
  return SplitRows{whole.row, whole.length, used};
}

// The sequence of row `row` of Q; rows behind the last sequence are batch's.
PANTILE_HD constexpr int sequence_of_row(const SplitJob& job, std::int64_t row) {
  if (job.cu_seqlens_q == nullptr) {
    return static_cast<int>(row / job.seqlen_q);
  }
  int low = 0;
  int high = job.batch;  // cu_seqlens[high + 1] would be above row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (job.cu_seqlens_q[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The row of part p's copy of row `i` of a sequence: of the copies of Q, O and LSE.
PANTILE_HD constexpr std::int64_t part_row(const SplitJob& job, const SplitRows& rows, int part,
                                           int i) {
  return rows.row * job.parts() + std::int64_t{part} * rows.capacity + i;
}

// Element of `lse` and of the tail's.
PANTILE_HD constexpr std::int64_t lse_index(const SplitJob& job, const SplitRows& rows, int batch,
                                            int head, int i) {
  return job.cu_seqlens_q != nullptr
             ? head * job.total_q + rows.row + i
             : (std::int64_t{batch} * job.heads_q + head) * job.seqlen_q + i;
}

// Writes the arrays' entries of one sequence; those behind the last one with the last sequence.
PANTILE_HD constexpr void place_parts(const SplitJob& job, int batch) {
  const SplitRows rows = split_rows(job, batch);
  SequenceSide side;
  side.max_length = job.seqlen_k;
  side.cu_seqlens = job.cu_seqlens_k;
  side.seqused = job.seqused_k;
  const Sequence sequence = locate_sequence(side, batch);
  const std::int64_t first = job.k_begin != nullptr        ? job.k_begin[batch]
                             : job.cu_seqlens_k != nullptr ? sequence.row
                                                           : batch * job.key_rows;
  const Mask mask{rows.used, sequence.length, job.window_left, job.window_right};
  const int shift = job.mask_shift != nullptr ? job.mask_shift[batch] : mask.shift();
  const KeySplit split = split_keys(job.form, with_shift(mask, shift), job.splits, job.tile);
  const bool is_last = batch == job.batch - 1;
  const std::int64_t end = first + sequence.length;
  const int parts = job.parts();
  for (int part = 0; part < parts; ++part) {
    const std::int64_t at = std::int64_t{batch} * parts + part;
    const Span keys = part_keys(split, part);
    job.q_begin[at] = static_cast<std::int32_t>(part_row(job, rows, part, 0));
    job.part_begin[at] = static_cast<std::int32_t>(first + keys.begin);
    job.part_used[at] = keys.size();
    if (job.q_used != nullptr) {
      job.q_used[at] = rows.used;
    }
    if (job.part_shift != nullptr) {
      job.part_shift[at] = shift - keys.begin;
    }
  }
  if (is_last && parts > 0) {
    job.q_begin[std::int64_t{job.batch} * parts] =
        static_cast<std::int32_t>((rows.row + rows.capacity) * parts);
    job.part_begin[std::int64_t{job.batch} * parts] = static_cast<std::int32_t>(end);
  }
  if (job.tail_begin != nullptr) {
    job.tail_begin[batch] = static_cast<std::int32_t>(first + split.tail.begin);
    job.tail_used[batch] = split.tail.size();
    if (is_last) {
      job.tail_begin[job.batch] = static_cast<std::int32_t>(end);
    }
  }
}

// LSE of part `part` of a row, the tail last; -inf for one without keys.
PANTILE_HD constexpr float part_lse(const SplitJob& job, const SplitRows& rows, int batch, int head,
                                    int i, int part) {
  const int parts = job.parts();
  return part < parts ? job.part_lse[head * (job.total_q * parts) + part_row(job, rows, part, i)]
                      : job.tail_lse[lse_index(job, rows, batch, head, i)];
}

// The same of O: the row's head_dim_v numbers.
PANTILE_HD constexpr const float* part_output(const SplitJob& job, const SplitRows& rows, int head,
                                              int i, int part) {
  const int parts = job.parts();
  const std::int64_t row = part < parts ? part_row(job, rows, part, i) : rows.row + i;
  return (part < parts ? job.part_o : job.tail_o) +
         (row * job.heads_q + head) * std::int64_t{job.head_dim_v};
}

// Merges rows by their LSE, in the order in which parts are added:
//   LSE = log(sum(exp(LSE_p)))      O = sum(exp(LSE_p - reference) O_p) / sum(exp(LSE_p - ...))
// `reference` is the largest LSE, so that nothing overflows; a NaN among them makes the sum NaN.
struct PartSum {
  float reference, sum;
};

PANTILE_HD constexpr float larger(float a, float b) {
  return b > a ? b : a;  // a where b is NaN
}

PANTILE_HD_ANY_CALLABLE
template <class Exp2>
PANTILE_HD constexpr float part_weight(float lse, float reference, Exp2 exp2) {
  return exp2((lse - softmax_shift(reference)) * kLog2E);
}

PANTILE_HD_ANY_CALLABLE
template <class Log2>
PANTILE_HD constexpr float merged_lse(const PartSum& all, Log2 log2) {
  return all.sum == 0.0f ? -kInfinity : softmax_shift(all.reference) + log2(all.sum) * kLn2;
}

// ---- how many parts --------------------------------------------------------------------------

// What the model of the time knows. Clocks are those of a multiprocessor (CPU: of a core).
struct SplitModel {
  std::int64_t query_tiles;  // of all heads and sequences
  std::int64_t key_tiles;    // that one of them visits
  std::int64_t most_splits;
  int processors;
  double tile_clocks;      // of a query tile and a key tile
  double block_clocks;     // of a block before its first and after its last tile
  double part_clocks;      // of writing, reading and merging one more part, all processors together
  double constant_clocks;  // of the launches that a split adds
};

PANTILE_HD constexpr double predicted_clocks(const SplitModel& model, std::int64_t splits) {
  const auto waves = static_cast<double>(
      ceil_div<std::int64_t>(model.query_tiles * splits, max_of(model.processors, 1)));
  const auto tiles = static_cast<double>(ceil_div(model.key_tiles, splits));
  const double parts =
      splits == 1 ? 0.0 : model.constant_clocks + static_cast<double>(splits) * model.part_clocks;
  return waves * (tiles * model.tile_clocks + model.block_clocks) + parts;
}

// The number of parts with the smallest predicted time, the smallest of equals; 1 unless parts are
// predicted to save a tenth: less than that is within the model's error, and parts cost memory.
inline constexpr double kLeastGain = 0.9;
PANTILE_HD constexpr int best_splits(const SplitModel& model) {
  std::int64_t best = 1;
  double least = kLeastGain * predicted_clocks(model, 1);
  const std::int64_t most = min_of(model.most_splits, model.key_tiles);
  for (std::int64_t splits = 2; splits <= most; ++splits) {
    const double clocks = predicted_clocks(model, splits);
    if (clocks < least) {
      best = splits;
      least = clocks;
    }
  }
  return static_cast<int>(best);
}

}  // namespace pantile::core
