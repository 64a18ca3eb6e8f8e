// FlashAttention-2 backward for a tile of keys of one key/value head.
//
// Preparation, once for every row: delta = rowsum(dO * O) - dLSE.
// 1. K, K^T and V^T of the tile are packed; dK and dV start at 0.
// 2. For every query head of the group, and every row tile that sees a key of the tile, Q and dO
// are
//    packed. Then for every subtile of keys
//    a. S = Q K^T and dP = dO V^T, keys along the vector lanes;
//    b. P = exp(S - LSE), dS = P * (dP - delta), 0 where the mask hides;
//    c. dV += P^T dO, dK += dS^T Q, and dS K is added up for the row tile.
//    The row tile's share of dQ is added to the sum over key tiles when its turn comes.
// 3. dK and dV are scaled and written.
//
// Every sum has one order, whatever the number of threads. dQ alone is shared between work items.
#pragma once

#include "core/softmax_state.h"
#include "cpu/isa/pairs.h"
#include "cpu/isa/problem.h"
#include "cpu/parallel.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// A tile of keys of one key/value head.
struct KeyBlock {
  int batch, key_head;
  int index;  // of the tile in its sequence
  core::Mask mask;
  Span keys;
};

// A tile of rows of one query head that the block works on.
struct QueryTile {
  int head;
  int index;  // of the tile in its sequence
  Span rows;
};

PANTILE_INLINE float rows_product(DType dtype, const Rows& a, const Rows& b, int row) {
  Floats sum{};
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    for (int d = 0; d < a.dim; d += kLanes) {
      sum += read_row<Element>(a.row<Element>(row), d, a.dim) *
             read_row<Element>(b.row<Element>(row), d, b.dim);
    }
  });
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += sum[lane];
  }
  return total;
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
      core::plan_row_tile(mask_of(job, q.length, k.length), rows, job.item_keys);
  if (plan.visit.empty()) {
    clear_rows(job.dtype, job.grad_q, work.batch, work.head, rows, job.dim);
    return;
  }
  job.turns[(work.batch * job.heads.heads_q + work.head) * std::int64_t{job.row_tiles} +
            work.tile] = plan.visit.begin;
  const Rows o = rows_of(job.dtype, job.o, work.batch, work.head, rows, job.dim_v);
  const Rows grad_o = rows_of(job.dtype, job.grad_o, work.batch, work.head, rows, job.dim_v);
  const float* grad_lse =
      job.grad_lse.data == nullptr
          ? nullptr
          : head_values(job.grad_lse, job.q.side, work.batch, work.head) + begin;
  float* delta = head_values(job.delta, job.q.side, work.batch, work.head) + begin;
  for (int i = 0; i < rows.size(); ++i) {
    delta[i] = rows_product(job.dtype, o, grad_o, i) - (grad_lse != nullptr ? grad_lse[i] : 0.0f);
  }
}

// P and dS of kLanes keys of two rows, as operands of the products in step c.
PANTILE_INLINE void keep(FloatMath, const Floats (&p)[2], const Floats (&ds)[2], int row, int lane,
                         const BackwardScratch& scratch) {
  for (int i = 0; i < 2; ++i) {
    store(scratch.scores + (row + i) * kBackwardKeys + lane, p[i]);
    store(scratch.grad_scores + (row + i) * kBackwardKeys + lane, ds[i]);
  }
}
#if defined(__AVX512BF16__)
PANTILE_INLINE void keep(PairMath, const Floats (&p)[2], const Floats (&ds)[2], int row, int lane,
                         const BackwardScratch& scratch) {
  const int pair = row / 2 * kBackwardKeys + lane;
  store(static_cast<std::uint32_t*>(scratch.pairs_p) + pair, pair_up(p[0], p[1]));
  store(static_cast<std::uint32_t*>(scratch.pairs_ds) + pair, pair_up(ds[0], ds[1]));
  for (int i = 0; i < 2; ++i) {
    store_bf16(
        static_cast<std::uint16_t*>(scratch.pairs_ds_keys) + (row + i) * kBackwardKeys + lane,
        ds[i]);
  }
}
#endif

// Keys of a subtile, and what a row tile sees of it.
struct Subtile {
  int place;  // first key in the block's scratch arrays
  Span keys;
  int vectors;  // of keys
  bool full;    // no pair is hidden
};

// Step b: from S and dP to P and dS. `lse` and `delta` are those of the tile's rows.
template <class Math>
inline void weigh(const core::Mask& mask, const QueryTile& tile, const Subtile& subtile,
                  const float* lse, const float* delta, const BackwardScratch& scratch) {
  const Ints lanes = lane_numbers();
  for (int row = 0; row < tile.rows.size(); row += 2) {
    Span seen[2] = {{0, 0}, {0, 0}};
    Floats row_lse[2] = {};
    Floats row_delta[2] = {};
    for (int i = 0; i < core::min_of(2, tile.rows.size() - row); ++i) {
      seen[i] = subtile.full ? subtile.keys : core::visible_keys(mask, tile.rows.begin + row + i);
      seen[i].end = core::min_of(seen[i].end, subtile.keys.end);
      // A row of -inf has P = exp(S - inf) = 0.
      const bool empty = lse[row + i] == -__builtin_huge_valf();
      row_lse[i] = splat(empty ? __builtin_huge_valf() : lse[row + i]);
      row_delta[i] = splat(delta[row + i]);
    }
    for (int v = 0; v < subtile.vectors; ++v) {
      const int key = subtile.keys.begin + v * kLanes;
      Floats p[2];
      Floats ds[2];
      PANTILE_UNROLL for (int i = 0; i < 2; ++i) {
        const int at = (row + i) * kBackwardKeys + v * kLanes;
        p[i] = exp(load(scratch.scores + at) - row_lse[i]);
        ds[i] = p[i] * (load(scratch.grad_scores + at) - row_delta[i]);
        if (seen[i].begin > key || seen[i].end < key + kLanes) {
          const Ints visible = (lanes >= seen[i].begin - key) & (lanes < seen[i].end - key);
          p[i] = select(visible, p[i], Floats{});
          ds[i] = select(visible, ds[i], Floats{});
        }
      }
      keep(Math(), p, ds, row, v * kLanes, scratch);
    }
  }
}

// S = Q K^T, or dP with dO, V^T and dP for Q, K^T and S.
template <class Math>
inline void score(const QueryTile& tile, const Subtile& subtile, const void* a, const void* b,
                  int dim, float scale, float* c) {
  using Item = typename Math::Item;
  Product<Math> p{};
  p.a = static_cast<const Item*>(a);
  p.lda = padded(dim) / Math::kDepth;
  p.b = static_cast<const Item*>(b) + subtile.place * p.lda;
  p.ldb = kBackwardKeys;
  p.c = c;
  p.ldc = kBackwardKeys;
  p.rows = tile.rows.size();
  p.vectors = subtile.vectors;
  p.steps = core::ceil_div(dim, Math::kDepth);
  p.scale = scale;
  multiply<Math, Start::zero, Walk::along_rows>(p);
}

// dV += P^T dO, or dK += dS^T Q. `not_finite` are the rows of dO or Q if some were dropped.
template <class Math>
inline void add_to_keys(const core::Mask& mask, const QueryTile& tile, const Subtile& subtile,
                        const void* weights, const void* rows, int dim, float* sums,
                        const Rows* not_finite) {
  using Item = typename Math::Item;
  Product<Math> p{};
  p.a = static_cast<const Item*>(weights);
  p.lda = kBackwardKeys;
  p.b = static_cast<const Item*>(rows);
  p.ldb = padded(dim);
  p.c = sums + subtile.place * p.ldb;
  p.ldc = p.ldb;
  p.rows = subtile.keys.size();
  p.vectors = padded(dim) / kLanes;
  p.steps = core::ceil_div(tile.rows.size(), Math::kDepth);
  multiply<Math, Start::old, Walk::along_columns>(p);
  if (not_finite != nullptr) {
    add_not_finite<Walk::along_columns>(p, subtile.keys.size(), *not_finite, [&](int key, int row) {
      return core::is_visible(mask, tile.rows.begin + row, subtile.keys.begin + key);
    });
  }
}

// The dQ share: dS K, added to that of earlier subtiles unless this is the first. `not_finite` are
// the rows of the block's K if some were dropped.
template <class Math>
inline void add_to_rows(const core::Mask& mask, const QueryTile& tile, const Subtile& subtile,
                        const void* weights, int dim, bool first, const BackwardScratch& scratch,
                        const Rows* not_finite) {
  using Item = typename Math::Item;
  Product<Math> p{};
  p.a = static_cast<const Item*>(weights);
  p.lda = kBackwardKeys / Math::kDepth;
  p.ldb = padded(dim);
  p.b = static_cast<const Item*>(scratch.keys_summed) + subtile.place / Math::kDepth * p.ldb;
  p.c = scratch.grad_queries;
  p.ldc = p.ldb;
  p.rows = tile.rows.size();
  p.vectors = padded(dim) / kLanes;
  p.steps = core::ceil_div(subtile.keys.size(), Math::kDepth);
  p.scale = 1.0f;
  if (first) {
    multiply<Math, Start::zero, Walk::along_rows>(p);
  } else {
    multiply<Math, Start::old, Walk::along_rows>(p);
  }
  if (not_finite != nullptr) {
    add_not_finite<Walk::along_rows>(
        p, tile.rows.size(), not_finite->part(subtile.place, subtile.keys.size()),
        [&](int row, int key) {
          return core::is_visible(mask, tile.rows.begin + row, subtile.keys.begin + key);
        });
  }
}

// An operand's rows both as they are (A) and to be summed over (B), which floats do in one array
// unless some of them are not finite.
struct PackedRows {
  const void* as_a;
  const void* as_b;
  Rows rows;
  bool dropped;
  const Rows* not_finite() const { return dropped ? &rows : nullptr; }
};

template <class Math>
inline PackedRows pack_both(const Rows& rows, void* as_a, void* as_b) {
  using Item = typename Math::Item;
  const bool dropped = pack_summed(Math(), static_cast<Item*>(as_b), rows);
  if (Math::kDepth == 1 && !dropped) {
    return PackedRows{as_b, as_b, rows, false};
  }
  pack_rows(Math(), static_cast<Item*>(as_a), rows, kBackwardRows);
  return PackedRows{as_a, as_b, rows, dropped};
}

// Stage 2 for one row tile, but for the sum over key tiles. `keys_not_finite` are the block's keys
// if some of their values were dropped.
template <class Math>
inline void add_row_tile(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                         const BackwardScratch& scratch, const Rows* keys_not_finite) {
  const PackedRows q =
      pack_both<Math>(rows_of(job.dtype, job.q, block.batch, tile.head, tile.rows, job.dim),
                      scratch.queries, scratch.queries_summed);
  const PackedRows grad_o =
      pack_both<Math>(rows_of(job.dtype, job.grad_o, block.batch, tile.head, tile.rows, job.dim_v),
                      scratch.grads, scratch.grads_summed);
  const float* lse = head_values(job.lse, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const float* delta = head_values(job.delta, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const bool pairs = Math::kDepth == 2;
  bool first = true;
  for (int place = 0; place < block.keys.size(); place += kBackwardKeys) {
    const int begin = block.keys.begin + place;
    const Span keys{begin, core::min_of(begin + kBackwardKeys, block.keys.end)};
    const core::TilePlan plan = core::plan_key_tile(block.mask, keys, kBackwardRows);
    if (tile.index < plan.visit.begin || tile.index >= plan.visit.end) {
      continue;
    }
    const Subtile subtile{place, keys, core::ceil_div(keys.size(), kLanes),
                          tile.index >= plan.full.begin && tile.index < plan.full.end};
    score<Math>(tile, subtile, q.as_a, scratch.keys, job.dim, job.scale, scratch.scores);
    score<Math>(tile, subtile, grad_o.as_a, scratch.values, job.dim_v, 1.0f, scratch.grad_scores);
    weigh<Math>(block.mask, tile, subtile, lse, delta, scratch);
    add_to_keys<Math>(block.mask, tile, subtile, pairs ? scratch.pairs_p : scratch.scores,
                      grad_o.as_b, job.dim_v, scratch.grad_values, grad_o.not_finite());
    add_to_keys<Math>(block.mask, tile, subtile, pairs ? scratch.pairs_ds : scratch.grad_scores,
                      q.as_b, job.dim, scratch.grad_keys, q.not_finite());
    add_to_rows<Math>(block.mask, tile, subtile,
                      pairs ? scratch.pairs_ds_keys : scratch.grad_scores, job.dim, first, scratch,
                      keys_not_finite);
    first = false;
  }
}

// Waits for the tile's turn, adds the share to the sum in memory and passes the turn on. The first
// key tile stores instead of adding; the last one writes dQ.
inline void add_share(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                      const BackwardScratch& scratch) {
  const core::TilePlan plan = core::plan_row_tile(block.mask, tile.rows, job.item_keys);
  const bool first = block.index == plan.visit.begin;
  const bool last = block.index == plan.visit.end - 1;
  std::int32_t* turn = job.turns +
                       (block.batch * job.heads.heads_q + tile.head) * std::int64_t{job.row_tiles} +
                       tile.index;
  for (int round = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != block.index; ++round) {
    pause_while_waiting(round);
  }
  const int width = padded(job.dim);
  float* sums = head_address<F32>(job.sum_q, block.batch, tile.head);
  with_element(job.dtype, [&](auto element) {
    using Element = decltype(element);
    typename Element::Raw* out = head_address<Element>(job.grad_q, block.batch, tile.head);
    for (int i = 0; i < tile.rows.size(); ++i) {
      const std::int64_t row = tile.rows.begin + i;
      float* sum = sums + row * job.sum_q.side.seq_stride;
      for (int d = 0; d < job.dim; d += kLanes) {
        Floats x = load(scratch.grad_queries + i * width + d);
        if (!first) {
          x += read_row<F32>(sum, d, job.dim);
        }
        if (last) {
          write_row<Element>(out + row * job.grad_q.side.seq_stride, d, job.dim,
                             x * splat(job.scale));
        } else {
          write_row<F32>(sum, d, job.dim, x);
        }
      }
    }
  });
  __atomic_store_n(turn, block.index + 1, __ATOMIC_RELEASE);
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

// Stage 1. True when K holds values that are not finite.
template <class Math>
inline bool pack_keys(const BackwardJob& job, const Rows& k, const Rows& v,
                      const BackwardScratch& scratch) {
  using Item = typename Math::Item;
  for (int place = 0; place < k.count; place += kBackwardKeys) {
    const int count = core::min_of(kBackwardKeys, k.count - place);
    pack_transposed(Math(),
                    static_cast<Item*>(scratch.keys) + place * (padded(k.dim) / Math::kDepth),
                    kBackwardKeys, k.part(place, count), job.scale);
    pack_transposed(Math(),
                    static_cast<Item*>(scratch.values) + place * (padded(v.dim) / Math::kDepth),
                    kBackwardKeys, v.part(place, count), 1.0f);
  }
  return pack_summed(Math(), static_cast<Item*>(scratch.keys_summed), k);
}

template <class Math>
inline void stream_rows(const BackwardJob& job, const KeyBlock& block,
                        const BackwardScratch& scratch) {
  const Rows k = rows_of(job.dtype, job.k, block.batch, block.key_head, block.keys, job.dim);
  const Rows v = rows_of(job.dtype, job.v, block.batch, block.key_head, block.keys, job.dim_v);
  const Rows* const not_finite = pack_keys<Math>(job, k, v, scratch) ? &k : nullptr;
  const core::TilePlan plan = core::plan_key_tile(block.mask, block.keys, kBackwardRows);
  const int first_head = job.heads.first_query_head(block.key_head);
  for (int head = first_head; head < first_head + job.heads.group(); ++head) {
    for (int t = plan.visit.begin; t < plan.visit.end; ++t) {
      const Span rows{t * kBackwardRows, core::min_of((t + 1) * kBackwardRows, block.mask.rows)};
      const QueryTile tile{head, t, rows};
      add_row_tile<Math>(job, block, tile, scratch, not_finite);
      add_share(job, block, tile, scratch);
    }
  }
}

template <class Math>
void backward(const BackwardJob& job, int item, void* memory) {
  const core::WorkTile work = job.key_order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * job.item_keys;
  const int end = core::min_of(begin + job.item_keys, k.room);
  const KeyBlock block{work.batch, work.head, work.tile, mask_of(job, q.length, k.length),
                       Span{begin, core::min_of(end, k.length)}};
  if (!block.keys.empty()) {
    const BackwardScratch scratch = backward_scratch(job, memory);
    for (int i = 0; i < job.item_keys * padded(job.dim); i += kLanes) {
      store(scratch.grad_keys + i, Floats{});
    }
    for (int i = 0; i < job.item_keys * padded(job.dim_v); i += kLanes) {
      store(scratch.grad_values + i, Floats{});
    }
    stream_rows<Math>(job, block, scratch);
    write_keys(job, block, job.grad_k, scratch.grad_keys, job.dim, job.scale);
    write_keys(job, block, job.grad_v, scratch.grad_values, job.dim_v, 1.0f);
  }
  const Span unused{core::max_of(begin, k.length), end};
  clear_rows(job.dtype, job.grad_k, work.batch, work.head, unused, job.dim);
  clear_rows(job.dtype, job.grad_v, work.batch, work.head, unused, job.dim_v);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
