// FlashAttention-2 backward for a tile of keys of one key/value head.
//
// Preparation, once for every row: delta = rowsum(dO * O) - dLSE.
// 1. K and V of the tile are packed; dK and dV start at 0.
// 2. For every query head of the group, and every row tile that sees a key of the tile, Q and dO
// are
//    packed, each both transposed and as it is. Then for every subtile of keys
//    a. S^T = K Q^T and dP^T = V dO^T, rows along the vector lanes;
//    b. P^T = exp(S^T - LSE), dS^T = P^T * (dP^T - delta), 0 where the mask hides;
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
  int vectors;  // of rows
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
      core::plan_row_tile(mask_of(job, q.length, k.length), rows, kBackwardItemKeys);
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

// Steps 2a's second half, as operands of the products in 2c: P^T and dS^T of two keys.
PANTILE_INLINE void keep(const Floats (&p)[2], const Floats (&ds)[2], int at,
                         const BackwardScratch& scratch, FloatMath) {
  for (int i = 0; i < 2; ++i) {
    store(scratch.scores + at + i * kBackwardRows, p[i]);
    store(scratch.grad_scores + at + i * kBackwardRows, ds[i]);
  }
}
#if defined(__AVX512BF16__)
PANTILE_INLINE void keep(const Floats (&p)[2], const Floats (&ds)[2], int at,
                         const BackwardScratch& scratch, PairMath) {
  for (int i = 0; i < 2; ++i) {
    const int half = at + i * kBackwardRows;
    store_bf16(static_cast<std::uint16_t*>(scratch.pairs_p) + half, p[i]);
    store_bf16(static_cast<std::uint16_t*>(scratch.pairs_ds) + half, ds[i]);
  }
  const int key = at / kBackwardRows;
  store(static_cast<std::uint32_t*>(scratch.pairs_ds_keys) + at - key / 2 * kBackwardRows,
        pair_up(ds[0], ds[1]));
}
#endif

// Step b for `keys`: from S^T and dP^T to P^T and dS^T.
template <class Math>
inline void weigh(const core::Mask& mask, const QueryTile& tile, Span keys, bool full,
                  const BackwardScratch& scratch) {
  const Ints lanes = lane_numbers();
  for (int key = 0; key < keys.size(); key += 2) {
    Span seen[2];
    for (int i = 0; i < 2; ++i) {
      const bool exists = key + i < keys.size();
      seen[i] = !exists ? Span{0, 0}
                : full  ? tile.rows
                        : core::visible_rows(mask, keys.begin + key + i);
      seen[i].end = core::min_of(seen[i].end, tile.rows.end);
    }
    for (int v = 0; v < tile.vectors; ++v) {
      const int row = tile.rows.begin + v * kLanes;
      const Floats lse = load(scratch.lse + v * kLanes);
      const Floats delta = load(scratch.delta + v * kLanes);
      Floats p[2];
      Floats ds[2];
      for (int i = 0; i < 2; ++i) {
        const int at = (key + i) * kBackwardRows + v * kLanes;
        const Floats s = load(scratch.scores + at);
        p[i] = exp(s - lse);
        ds[i] = p[i] * (load(scratch.grad_scores + at) - delta);
        if (seen[i].begin > row || seen[i].end < row + kLanes) {
          const Ints visible = (lanes >= seen[i].begin - row) & (lanes < seen[i].end - row);
          p[i] = select(visible, p[i], Floats{});
          ds[i] = select(visible, ds[i], Floats{});
        }
      }
      keep(p, ds, key * kBackwardRows + v * kLanes, scratch, Math());
    }
  }
}

// Steps a to c for one row tile and one subtile of keys, `place` keys into the block.
template <class Math>
struct Subtile {
  using Item = typename Math::Item;
  const BackwardJob& job;
  const KeyBlock& block;
  const QueryTile& tile;
  const BackwardScratch& scratch;
  int place;
  Span keys;
  bool started;  // the dQ share holds earlier subtiles

  // S^T, or dP^T with V, dO^T and dP^T for K, Q^T and S^T.
  void score(const void* a, const void* b, int dim, float scale, float* c) const {
    Product<Math> p{};
    p.lda = padded(dim) / Math::kDepth;
    p.a = static_cast<const Item*>(a) + place * p.lda;
    p.b = static_cast<const Item*>(b);
    p.b_depth = core::ceil_div(dim, Math::kDepth);
    p.c = c;
    p.ldc = kBackwardRows;
    p.rows = keys.size();
    p.vectors = tile.vectors;
    p.steps = p.b_depth;
    p.scale = scale;
    multiply<Math, Start::zero, Walk::along_rows>(p);
  }

  bool visible(int row, int key) const {
    return core::is_visible(block.mask, tile.rows.begin + row, keys.begin + key);
  }

  // dV += P^T dO, or dK += dS^T Q.
  void add_to_keys(const void* weights, const void* rows, int dim, float* sums,
                   const Rows* not_finite) const {
    Product<Math> p{};
    p.a = static_cast<const Item*>(weights);
    p.lda = kBackwardRows / Math::kDepth;
    p.b = static_cast<const Item*>(rows);
    p.b_depth = kBackwardRows / Math::kDepth;
    p.ldc = padded(dim);
    p.c = sums + place * p.ldc;
    p.rows = keys.size();
    p.vectors = padded(dim) / kLanes;
    p.steps = core::ceil_div(tile.rows.size(), Math::kDepth);
    multiply<Math, Start::old, Walk::along_rows>(p);
    if (not_finite != nullptr) {
      add_not_finite<Walk::along_rows>(p, keys.size(), *not_finite,
                                       [this](int key, int row) { return visible(row, key); });
    }
  }

  // The dQ share: (+)= dS K.
  void add_to_rows(const void* weights, const Rows* not_finite) const {
    Product<Math> p{};
    p.a = static_cast<const Item*>(weights);
    p.lda = kBackwardRows;
    p.b = static_cast<const Item*>(scratch.keys_summed);
    p.b_depth = kBackwardItemKeys / Math::kDepth;
    p.b_first = place / Math::kDepth;
    p.c = scratch.grad_queries;
    p.ldc = padded(job.dim);
    p.rows = tile.rows.size();
    p.vectors = padded(job.dim) / kLanes;
    p.steps = core::ceil_div(keys.size(), Math::kDepth);
    if (started) {
      multiply<Math, Start::old, Walk::along_columns>(p);
    } else {
      p.scale = 1.0f;
      multiply<Math, Start::zero, Walk::along_columns>(p);
    }
    if (not_finite != nullptr) {
      Rows rows = *not_finite;
      rows.data =
          static_cast<const char*>(rows.data) + place * rows.stride * dtype_bytes(job.dtype);
      rows.count = keys.size();
      add_not_finite<Walk::along_columns>(p, tile.rows.size(), rows,
                                          [this](int row, int key) { return visible(row, key); });
    }
  }
};

// Rows of an operand of which some values were dropped, or null.
PANTILE_INLINE const Rows* only_if(bool dropped, const Rows& rows) {
  return dropped ? &rows : nullptr;
}

// Stage 2 for one row tile, but for the sum over key tiles. `keys_not_finite` as in only_if().
template <class Math>
inline void add_row_tile(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                         const BackwardScratch& scratch, const Rows* keys_not_finite) {
  using Item = typename Math::Item;
  const Rows q = rows_of(job.dtype, job.q, block.batch, tile.head, tile.rows, job.dim);
  const Rows grad_o = rows_of(job.dtype, job.grad_o, block.batch, tile.head, tile.rows, job.dim_v);
  const int columns = tile.vectors * kLanes;
  constexpr int kDepth = kBackwardRows / Math::kDepth;
  pack_transposed(Math(), static_cast<Item*>(scratch.queries), tile.vectors, q, job.scale);
  pack_transposed(Math(), static_cast<Item*>(scratch.grads), tile.vectors, grad_o, 1.0f);
  const Rows* const q_not_finite =
      only_if(pack_summed(Math(), static_cast<Item*>(scratch.queries_summed), kDepth, q), q);
  const Rows* const grad_o_not_finite = only_if(
      pack_summed(Math(), static_cast<Item*>(scratch.grads_summed), kDepth, grad_o), grad_o);
  const float* lse = head_values(job.lse, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const float* delta = head_values(job.delta, job.q.side, block.batch, tile.head) + tile.rows.begin;
  for (int i = 0; i < columns; ++i) {
    // P = exp(S - inf) = 0 for rows that do not exist and for rows of -inf.
    const bool exists = i < tile.rows.size();
    const bool empty = !exists || lse[i] == -__builtin_huge_valf();
    scratch.lse[i] = empty ? __builtin_huge_valf() : lse[i];
    scratch.delta[i] = exists ? delta[i] : 0.0f;
  }
  const bool pairs = Math::kDepth == 2;
  bool started = false;
  for (int place = 0; place < block.keys.size(); place += kBackwardKeys) {
    const int begin = block.keys.begin + place;
    const Span keys{begin, core::min_of(begin + kBackwardKeys, block.keys.end)};
    const core::TilePlan plan = core::plan_key_tile(block.mask, keys, kBackwardRows);
    if (tile.index < plan.visit.begin || tile.index >= plan.visit.end) {
      continue;
    }
    const bool full = tile.index >= plan.full.begin && tile.index < plan.full.end;
    const Subtile<Math> subtile{job, block, tile, scratch, place, keys, started};
    subtile.score(scratch.keys, scratch.queries, job.dim, job.scale, scratch.scores);
    subtile.score(scratch.values, scratch.grads, job.dim_v, 1.0f, scratch.grad_scores);
    weigh<Math>(block.mask, tile, keys, full, scratch);
    subtile.add_to_keys(pairs ? scratch.pairs_p : scratch.scores, scratch.grads_summed, job.dim_v,
                        scratch.grad_values, grad_o_not_finite);
    subtile.add_to_keys(pairs ? scratch.pairs_ds : scratch.grad_scores, scratch.queries_summed,
                        job.dim, scratch.grad_keys, q_not_finite);
    subtile.add_to_rows(pairs ? scratch.pairs_ds_keys : scratch.grad_scores, keys_not_finite);
    started = true;
  }
}

// Waits for the tile's turn, adds the share to the sum in memory and passes the turn on. The first
// key tile stores instead of adding; the last one writes dQ.
inline void add_share(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                      const BackwardScratch& scratch) {
  const core::TilePlan plan = core::plan_row_tile(block.mask, tile.rows, kBackwardItemKeys);
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

template <class Math>
inline void stream_rows(const BackwardJob& job, const KeyBlock& block,
                        const BackwardScratch& scratch) {
  using Item = typename Math::Item;
  const Rows k = rows_of(job.dtype, job.k, block.batch, block.key_head, block.keys, job.dim);
  const Rows v = rows_of(job.dtype, job.v, block.batch, block.key_head, block.keys, job.dim_v);
  pack_rows(Math(), static_cast<Item*>(scratch.keys), k, kBackwardItemKeys);
  pack_rows(Math(), static_cast<Item*>(scratch.values), v, kBackwardItemKeys);
  const Rows* const not_finite =
      only_if(pack_summed(Math(), static_cast<Item*>(scratch.keys_summed),
                          kBackwardItemKeys / Math::kDepth, k),
              k);
  const core::TilePlan plan = core::plan_key_tile(block.mask, block.keys, kBackwardRows);
  const int first_head = job.heads.first_query_head(block.key_head);
  for (int head = first_head; head < first_head + job.heads.group(); ++head) {
    for (int t = plan.visit.begin; t < plan.visit.end; ++t) {
      const Span rows{t * kBackwardRows, core::min_of((t + 1) * kBackwardRows, block.mask.rows)};
      const QueryTile tile{head, t, rows, core::ceil_div(rows.size(), kLanes)};
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
  const int begin = work.tile * kBackwardItemKeys;
  const int end = core::min_of(begin + kBackwardItemKeys, k.room);
  const KeyBlock block{work.batch, work.head, work.tile, mask_of(job, q.length, k.length),
                       Span{begin, core::min_of(end, k.length)}};
  if (!block.keys.empty()) {
    const BackwardScratch scratch = backward_scratch(job, memory);
    for (int i = 0; i < kBackwardItemKeys * padded(job.dim); i += kLanes) {
      store(scratch.grad_keys + i, Floats{});
    }
    for (int i = 0; i < kBackwardItemKeys * padded(job.dim_v); i += kLanes) {
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
