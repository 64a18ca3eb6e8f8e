// FlashAttention-2 backward for a tile of keys of one key/value head.
//
// Preparation, once for every row: delta = rowsum(dO * O) - dLSE, of O with its low bits if they
// are there, and Q and dO are packed.
// 1. K, K^T and V^T of the tile are packed; dK and dV start at 0.
// 2. For every query head of the group, and every row tile that sees a key of the tile, and every
//    subtile of keys
//    a. S = Q K^T and dP = dO V^T, keys along the vector lanes;
//    b. P = exp(S - LSE), dS = P * (dP - delta), 0 where the mask hides, and what a variant changes
//       of them;
//    c. dV += P^T dO, dK += dS^T Q, and, in the row tile's turn, dQ += dS K.
// 3. dK and dV are scaled and written; dQ by the last tile of keys that adds to it.
//
// Every sum has one order, whatever the number of threads. dQ alone is shared between work items.
// All products are of floats, also of bf16 operands on processors that multiply pairs of bf16: rows
// of a dS in bf16 do not sum to 0, and what they leak reaches dQ with the mean of the keys.
#pragma once

#include <type_traits>

#include "cpu/isa/backward_steps.h"
#include "cpu/parallel.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// rowsum(O * dO) of one row; `low` are the low bits of its O, or null.
PANTILE_INLINE float rows_product(DType dtype, const Rows& o, const std::int8_t* low,
                                  const Rows& grad_o, int row) {
  Floats sum{};
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    for (int d = 0; d < o.dim; d += kLanes) {
      Floats output = read_row<Element>(o.row<Element>(row), d, o.dim);
      if constexpr (!std::is_same_v<Element, F32>) {
        if (low != nullptr) {
          output = read_row_with_low<Element>(o.row<Element>(row), low, d, o.dim);
        }
      }
      sum += output * read_row<Element>(grad_o.row<Element>(row), d, o.dim);
    }
  });
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += sum[lane];
  }
  return total;
}

// Of the head's sink, whose score has the weight P = exp(sink - LSE) and the value 0: the sum of
// dS = P (0 - delta) over rows.
inline double sink_gradient(float sink, const float* lse, const float* delta, int rows) {
  double sum = 0.0;
  if (sink == kHidden) {
    return sum;  // as if there were none
  }
  for (int i = 0; i < rows; ++i) {
    sum -= static_cast<double>(exp(splat(sink - lse[i]))[0] * delta[i]);
  }
  return sum;
}

// The preparation of one row tile. Also gives the first key tile its turn, and writes the dQ of
// tiles that no key tile will visit and of rows that take no part.
inline void prepare(const BackwardJob& job, int item) {
  const core::WorkTile work = job.row_order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * kBackwardRows;
  const int end = core::min_of(begin + kBackwardRows, q.room);
  const Span rows{begin, core::min_of(end, q.length)};
  clear_rows(job.dtype, job.grad_q, work.batch, work.head, Span{core::max_of(begin, q.length), end},
             job.dim);
  if (rows.empty()) {
    return;
  }
  const core::TilePlan plan =
      core::plan_row_tile(mask_of(job, work.batch, q.length, k.length), rows, job.item_keys);
  const std::int64_t number = tile_number(job, work.batch, work.head, work.tile);
  if (plan.visit.empty()) {
    clear_rows(job.dtype, job.grad_q, work.batch, work.head, rows, job.dim);
    if (job.sink_sums == nullptr) {
      return;  // else: a row without keys has the weight of its sink
    }
  }
  job.turns[number] = plan.visit.begin;
  const Rows o = rows_of(job.dtype, job.o, work.batch, work.head, rows, job.dim_v);
  const Rows grad_o = rows_of(job.dtype, job.grad_o, work.batch, work.head, rows, job.dim_v);
  if (job.finite != nullptr) {
    const Rows queries = rows_of(job.dtype, job.q, work.batch, work.head, rows, job.dim);
    const bool q_dropped =
        pack_summed(packed_address(job.packed_q, work.batch, work.head, begin), queries);
    const bool grad_o_dropped =
        pack_summed(packed_address(job.packed_grad_o, work.batch, work.head, begin), grad_o);
    job.finite[number] = static_cast<std::uint8_t>((q_dropped ? 0 : 1) | (grad_o_dropped ? 0 : 2));
  }
  const float* grad_lse =
      job.grad_lse.data == nullptr
          ? nullptr
          : head_values(job.grad_lse, job.q.side, work.batch, work.head) + begin;
  const std::int8_t* low =
      job.o_low.data == nullptr
          ? nullptr
          : head_address<I8>(job.o_low, work.batch, work.head) + begin * job.o_low.side.seq_stride;
  float* delta = head_values(job.delta, job.q.side, work.batch, work.head) + begin;
  for (int i = 0; i < rows.size(); ++i) {
    const std::int8_t* low_row = low == nullptr ? nullptr : low + i * job.o_low.side.seq_stride;
    delta[i] =
        rows_product(job.dtype, o, low_row, grad_o, i) - (grad_lse != nullptr ? grad_lse[i] : 0.0f);
  }
  if (job.sink_sums != nullptr) {
    const float* lse = head_values(job.lse, job.q.side, work.batch, work.head) + begin;
    job.sink_sums[number] = sink_gradient(job.variant.sinks[work.head], lse, delta, rows.size());
  }
}

// The sums of dQ of one row tile, which one key block at a time adds to, in ascending order.
class RowSums {
 public:
  RowSums(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile, float* scratch)
      : job_(job),
        block_(block),
        tile_(tile),
        visit_(core::plan_row_tile(block.mask, tile.rows, job.item_keys).visit),
        turn_(job.turns + tile_number(job, block.batch, tile.head, tile.index)),
        memory_(packed_address(job.sum_q, block.batch, tile.head, tile.rows.begin)),
        // Register blocks write past the last row, where the next sequence may be.
        at_(tile.rows.size() == kBackwardRows ? memory_ : scratch) {}

  // Waits for the earlier blocks; after that the sums belong to this one.
  float* take() {
    for (int round = 0; __atomic_load_n(turn_, __ATOMIC_ACQUIRE) != block_.index; ++round) {
      pause_while_waiting(round);
    }
    if (at_ != memory_ && !is_empty()) {
      copy(at_, memory_);
    }
    return at_;
  }

  // Whether no block has added anything yet.
  bool is_empty() const { return block_.index == visit_.begin; }

  // Hands the sums to the next block, or writes dQ when there is none.
  void release() {
    if (block_.index == visit_.end - 1) {
      write();
    } else if (at_ != memory_) {
      copy(memory_, at_);
    }
    __atomic_store_n(turn_, block_.index + 1, __ATOMIC_RELEASE);
  }

 private:
  void copy(float* to, const float* from) const {
    for (int i = 0; i < tile_.rows.size() * padded(job_.dim); i += kLanes) {
      store(to + i, load(from + i));
    }
  }

  void write() const {
    const int width = padded(job_.dim);
    with_element(job_.dtype, [&](auto element) {
      using Element = decltype(element);
      typename Element::Raw* out = head_address<Element>(job_.grad_q, block_.batch, tile_.head);
      for (int i = 0; i < tile_.rows.size(); ++i) {
        typename Element::Raw* row = out + (tile_.rows.begin + i) * job_.grad_q.side.seq_stride;
        for (int d = 0; d < job_.dim; d += kLanes) {
          write_row<Element>(row, d, job_.dim, load(at_ + i * width + d) * splat(job_.scale));
        }
      }
    });
  }

  const BackwardJob& job_;
  const KeyBlock& block_;
  const QueryTile& tile_;
  const Span visit_;  // the blocks that add to the tile
  std::int32_t* const turn_;
  float* const memory_;
  float* const at_;
};

// Of the part that a block and a query head have of the gradient of the slopes.
PANTILE_INLINE std::int64_t slope_number(const BackwardJob& job, const KeyBlock& block, int head) {
  return (static_cast<std::int64_t>(block.batch) * job.heads.heads_q + head) * job.key_tiles +
         block.index;
}

// Keys of a subtile, `place` behind the block's first.
inline Span keys_at(const KeyBlock& block, int place) {
  const int begin = block.keys.begin + place;
  return Span{begin, core::min_of(begin + kBackwardKeys, block.keys.end)};
}

// Stage 2 for one row tile. `keys_not_finite` are the block's keys if some of their values were
// dropped.
inline void add_row_tile(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                         const BackwardScratch& scratch, const Rows* keys_not_finite) {
  const PackedRows q = query_rows(job, block, tile, job.q, job.packed_q, 1, job.dim,
                                  scratch.queries, scratch.queries_summed);
  const PackedRows grad_o = query_rows(job, block, tile, job.grad_o, job.packed_grad_o, 2,
                                       job.dim_v, scratch.grads, scratch.grads_summed);
  const float* lse = head_values(job.lse, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const float* delta = head_values(job.delta, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const VisiblePairs visible{block.mask, job.variant.mask, block.batch, tile.head};
  RowSums row_sums(job, block, tile, scratch.grad_queries);
  float* sums = nullptr;
  for (int place = 0; place < block.keys.size(); place += kBackwardKeys) {
    const Span keys = keys_at(block, place);
    const core::TilePlan plan = core::plan_key_tile(block.mask, keys, kBackwardRows);
    if (tile.index < plan.visit.begin || tile.index >= plan.visit.end) {
      continue;
    }
    const Sight sight =
        sight_of(job.variant.mask, {block.batch, tile.head, block.mask.shift()}, tile.rows, keys);
    if (sight == Sight::none) {
      continue;
    }
    const Subtile subtile{place, keys, core::ceil_div(keys.size(), kLanes),
                          tile.index >= plan.full.begin && tile.index < plan.full.end};
    score(tile, subtile, q.as_a, scratch.keys, job.dim, scratch.scores);
    score(tile, subtile, grad_o.as_a, scratch.values, job.dim_v, scratch.grad_scores);
    if (job.variant.any_score || job.variant.dropped > 0 || sight == Sight::some) {
      const ScoreSlopes slopes{job.variant.softcap > 0.0f ? scratch.slopes : nullptr,
                               job.variant.score.exists ? scratch.score_slopes : nullptr, nullptr};
      change_rows(job.variant, block.mask, block.batch, tile.head, tile.rows, keys, kBackwardKeys,
                  scratch.scores, slopes);
      VariantChange change(job, block.batch, block.mask, tile, subtile, sight == Sight::some,
                           slopes, scratch);
      weigh(block.mask, tile, subtile, lse, delta, scratch, change);
      if (job.slope_sums != nullptr) {
        job.slope_sums[slope_number(job, block, tile.head)] -= change.distance_sum();
      }
    } else {
      NoChange change;
      weigh(block.mask, tile, subtile, lse, delta, scratch, change);
    }
    add_to_keys(visible, tile, subtile, scratch.scores, grad_o.as_b, job.dim_v, scratch.grad_values,
                grad_o.not_finite());
    add_to_keys(visible, tile, subtile, scratch.grad_scores, q.as_b, job.dim, scratch.grad_keys,
                q.not_finite());
    const bool empty = sums == nullptr && row_sums.is_empty();
    if (sums == nullptr) {
      sums = row_sums.take();
    }
    add_to_rows(visible, tile, subtile, scratch.grad_scores, job.dim, empty, sums, scratch,
                keys_not_finite);
  }
  if (sums == nullptr) {  // the mask hides all: nothing to add, but the turn must pass on
    sums = row_sums.take();
    if (row_sums.is_empty()) {
      fill(sums, tile.rows.size() * padded(job.dim), 0.0f);
    }
  }
  row_sums.release();
}

// Stage 3 for dK or dV.
inline void write_keys(const BackwardJob& job, const KeyBlock& block, const Operand& operand,
                       const float* sums, int dim, float scale) {
  const int width = padded(dim);
  with_element(job.dtype, [&](auto element) {
    using Element = decltype(element);
    typename Element::Raw* out = head_address<Element>(operand, block.batch, block.key_head);
    for (int i = 0; i < block.keys.size(); ++i) {
      for (int d = 0; d < dim; d += kLanes) {
        write_row<Element>(out + (block.keys.begin + i) * operand.side.seq_stride, d, dim,
                           load(sums + i * width + d) * splat(scale));
      }
    }
  });
}

// Stage 3 where sequences share keys: adds to what earlier sequences have left.
inline void add_keys(const BackwardJob& job, const KeyBlock& block, const float* sums, int dim,
                     float scale, float* shared) {
  const int width = padded(dim);
  const std::int64_t first = locate(job.k.side, block.batch).row + block.keys.begin;
  float* to = shared + (block.key_head * job.total_k + first) * dim;
  for (int i = 0; i < block.keys.size(); ++i, to += dim) {
    for (int d = 0; d < dim; d += kLanes) {
      write_row<F32>(to, d, dim,
                     read_row<F32>(to, d, dim) + load(sums + i * width + d) * splat(scale));
    }
  }
}

// Rows of one head of a shared sum, to the gradient.
inline void write_shared_rows(const BackwardJob& job, const Operand& operand, const float* shared,
                              int head, std::int64_t begin, std::int64_t end, int dim) {
  with_element(job.dtype, [&](auto element) {
    using Element = decltype(element);
    auto* out = static_cast<typename Element::Raw*>(operand.data) + head * operand.head_stride;
    for (std::int64_t row = begin; row < end; ++row) {
      const float* from = shared + (head * job.total_k + row) * dim;
      for (int d = 0; d < dim; d += kLanes) {
        write_row<Element>(out + row * operand.side.seq_stride, d, dim,
                           read_row<F32>(from, d, dim));
      }
    }
  });
}

inline void write_shared_keys(const BackwardJob& job, int item) {
  const auto blocks = static_cast<int>(core::ceil_div<std::int64_t>(job.total_k, kSharedRows));
  const int head = item / blocks;
  const std::int64_t begin = std::int64_t{item % blocks} * kSharedRows;
  const std::int64_t end = core::min_of<std::int64_t>(begin + kSharedRows, job.total_k);
  write_shared_rows(job, job.grad_k, job.shared_grad_k, head, begin, end, job.dim);
  write_shared_rows(job, job.grad_v, job.shared_grad_v, head, begin, end, job.dim_v);
}

// Stage 1. True when K holds values that are not finite.
inline bool pack_keys(const BackwardJob& job, const Rows& k, const Rows& v,
                      const BackwardScratch& scratch) {
  for (int place = 0; place < k.count; place += kBackwardKeys) {
    const int count = core::min_of(kBackwardKeys, k.count - place);
    pack_transposed(scratch.keys + place * padded(k.dim), kBackwardKeys, k.part(place, count),
                    job.scale);
    pack_transposed(scratch.values + place * padded(v.dim), kBackwardKeys, v.part(place, count),
                    1.0f);
  }
  return pack_summed(scratch.keys_summed, k);
}

inline void stream_rows(const BackwardJob& job, const KeyBlock& block,
                        const BackwardScratch& scratch) {
  const Rows k = rows_of(job.dtype, job.k, block.batch, block.key_head, block.keys, job.dim);
  const Rows v = rows_of(job.dtype, job.v, block.batch, block.key_head, block.keys, job.dim_v);
  const Rows* const not_finite = pack_keys(job, k, v, scratch) ? &k : nullptr;
  const core::TilePlan plan = core::plan_key_tile(block.mask, block.keys, kBackwardRows);
  const int first_head = job.heads.first_query_head(block.key_head);
  for (int head = first_head; head < first_head + job.heads.group(); ++head) {
    for (int t = plan.visit.begin; t < plan.visit.end; ++t) {
      const Span rows{t * kBackwardRows, core::min_of((t + 1) * kBackwardRows, block.mask.rows)};
      const QueryTile tile{head, t, rows};
      add_row_tile(job, block, tile, scratch, not_finite);
    }
  }
}

inline void backward(const BackwardJob& job, int item, void* memory) {
  core::WorkTile work = job.key_order.tile(item);
  work.batch += job.first_batch;
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * job.item_keys;
  const int end = core::min_of(begin + job.item_keys, k.room);
  const KeyBlock block{work.batch, work.head, work.tile,
                       mask_of(job, work.batch, q.length, k.length),
                       Span{begin, core::min_of(end, k.length)}};
  if (!block.keys.empty()) {
    const BackwardScratch scratch = backward_scratch(job, memory);
    const int touched = core::min_of(touched_rows(block.keys.size()), job.item_keys);
    fill(scratch.grad_keys, touched * padded(job.dim), 0.0f);
    fill(scratch.grad_values, touched * padded(job.dim_v), 0.0f);
    stream_rows(job, block, scratch);
    if (job.shared_grad_k != nullptr) {
      add_keys(job, block, scratch.grad_keys, job.dim, job.scale, job.shared_grad_k);
      add_keys(job, block, scratch.grad_values, job.dim_v, 1.0f, job.shared_grad_v);
    } else {
      write_keys(job, block, job.grad_k, scratch.grad_keys, job.dim, job.scale);
      write_keys(job, block, job.grad_v, scratch.grad_values, job.dim_v, 1.0f);
    }
  }
  const Span unused{core::max_of(begin, k.length), end};
  clear_rows(job.dtype, job.grad_k, work.batch, work.head, unused, job.dim);
  clear_rows(job.dtype, job.grad_v, work.batch, work.head, unused, job.dim_v);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
