// The gradient of the bias, a tile of queries and keys at a time: dS of every sequence, head and
// query that shares the tile's bias, summed in ascending order and written once.
//
// It computes S and dP again: two of the backward's five products. In exchange each element has one
// writer, so that sums need no order among threads and no copies.
#pragma once

#include "cpu/isa/backward_steps.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// A tile of the gradient. Along an axis that shares the bias all indices are of the tile.
struct BiasTile {
  Span batches, heads;
  Span row_tiles;  // of kBackwardRows
  Span keys;
  bool sums_rows;  // all rows add to one
};

PANTILE_INLINE BiasTile bias_tile(const BackwardJob& job, int item) {
  const int key_tiles = bias_key_tiles(job);
  const int row_tiles = bias_row_tiles(job);
  const int key_tile = item % key_tiles;
  const int row_tile = item / key_tiles % row_tiles;
  const int head = item / key_tiles / row_tiles % job.bias_heads;
  const int batch = item / key_tiles / row_tiles / job.bias_heads;
  const auto one_or_all = [](int index, int size, int count) {
    return size == 1 ? Span{0, count} : Span{index, index + 1};
  };
  const int begin = key_tile * kBackwardKeys;
  const bool sums_rows = job.bias_rows == 1;
  return BiasTile{
      one_or_all(batch, job.bias_batches, job.batch),
      one_or_all(head, job.bias_heads, job.heads.heads_q),
      sums_rows ? Span{0, job.row_tiles} : Span{row_tile, row_tile + 1},
      Span{begin, core::min_of(begin + kBackwardKeys, job.bias_keys)},
      sums_rows,
  };
}

// dS of one row tile of one head into scratch.grad_scores: of the scores that the bias was added
// to, or, with `of_score`, of those that the score of the user's own gave; what that was computed
// from is then in scratch.score_inputs.
inline void grad_scores(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                        const Subtile& subtile, bool masked, bool of_score,
                        const BackwardScratch& scratch) {
  const Rows q = rows_of(job.dtype, job.q, block.batch, tile.head, tile.rows, job.dim);
  const Rows grad_o = rows_of(job.dtype, job.grad_o, block.batch, tile.head, tile.rows, job.dim_v);
  float* const queries = scratch.queries;
  float* const grads = scratch.grads;
  pack_rows(queries, q, kBackwardRows);
  pack_rows(grads, grad_o, kBackwardRows);
  const float* lse = head_values(job.lse, job.q.side, block.batch, tile.head) + tile.rows.begin;
  const float* delta = head_values(job.delta, job.q.side, block.batch, tile.head) + tile.rows.begin;
  score(tile, subtile, queries, scratch.keys, job.dim, scratch.scores);
  score(tile, subtile, grads, scratch.values, job.dim_v, scratch.grad_scores);
  const bool has_score = job.variant.score.exists;
  const ScoreSlopes wanted{nullptr, has_score ? scratch.score_slopes : nullptr,
                           of_score ? scratch.score_inputs : nullptr};
  change_rows(job.variant, block.mask, block.batch, tile.head, tile.rows, subtile.keys,
              kBackwardKeys, scratch.scores, wanted);
  VariantChange change(job, block.batch, block.mask, tile, subtile, masked,
                       of_score ? ScoreSlopes() : wanted, scratch);
  weigh(block.mask, tile, subtile, lse, delta, scratch, change);
}

// Adds scratch.grad_scores to the sums of the tile.
inline void add_grad_scores(const BiasTile& bias, int rows, int vectors,
                            const BackwardScratch& scratch) {
  for (int i = 0; i < rows; ++i) {
    float* sums = scratch.grad_bias + (bias.sums_rows ? 0 : i * kBackwardKeys);
    for (int at = 0; at < vectors * kLanes; at += kLanes) {
      store(sums + at, load(sums + at) + load(scratch.grad_scores + i * kBackwardKeys + at));
    }
  }
}

// One head of one sequence. Its keys are packed once for its row tiles.
inline void add_head(const BackwardJob& job, const BiasTile& bias, int batch, int head,
                     const BackwardScratch& scratch) {
  const Extent q = extent_of(job.q.side, batch);
  const Extent k = extent_of(job.k.side, batch);
  const core::ShiftedMask mask = mask_of(job, batch, q.length, k.length);
  const Span keys{bias.keys.begin, core::min_of(bias.keys.end, k.length)};
  if (keys.empty()) {
    return;
  }
  const core::TilePlan plan = core::plan_key_tile(mask, keys, kBackwardRows);
  const Span tiles{core::max_of(bias.row_tiles.begin, plan.visit.begin),
                   core::min_of(bias.row_tiles.end, plan.visit.end)};
  if (tiles.empty()) {
    return;
  }
  const int key_head = job.heads.key_head(head);
  pack_transposed(scratch.keys, kBackwardKeys,
                  rows_of(job.dtype, job.k, batch, key_head, keys, job.dim), job.scale);
  pack_transposed(scratch.values, kBackwardKeys,
                  rows_of(job.dtype, job.v, batch, key_head, keys, job.dim_v), 1.0f);
  const KeyBlock block{batch, key_head, 0, mask, keys};
  for (int t = tiles.begin; t < tiles.end; ++t) {
    const Span rows{t * kBackwardRows, core::min_of((t + 1) * kBackwardRows, mask.rows)};
    const Subtile subtile{0, keys, core::ceil_div(keys.size(), kLanes),
                          t >= plan.full.begin && t < plan.full.end};
    const Sight sight = sight_of(job.variant.mask, {batch, head, mask.shift()}, rows, keys);
    if (sight == Sight::none) {
      continue;
    }
    grad_scores(job, block, QueryTile{head, t, rows}, subtile, sight == Sight::some, false,
                scratch);
    add_grad_scores(bias, rows.size(), subtile.vectors, scratch);
  }
}

inline void bias_gradient(const BackwardJob& job, int item, void* memory) {
  const BackwardScratch scratch = backward_scratch(job, memory);
  const BiasTile bias = bias_tile(job, item);
  fill(scratch.grad_bias, kBackwardRows * kBackwardKeys, 0.0f);
  for (int batch = bias.batches.begin; batch < bias.batches.end; ++batch) {
    for (int head = bias.heads.begin; head < bias.heads.end; ++head) {
      add_head(job, bias, batch, head, scratch);
    }
  }
  const int first = bias.sums_rows ? 0 : bias.row_tiles.begin * kBackwardRows;
  const int rows = core::min_of(kBackwardRows, job.bias_rows - first);
  const std::int64_t plane =
      std::int64_t{job.bias_batches == 1 ? 0 : bias.batches.begin} * job.bias_heads +
      (job.bias_heads == 1 ? 0 : bias.heads.begin);
  for (int i = 0; i < rows; ++i) {
    float* to = job.variant_gradients.bias + (plane * job.bias_rows + first + i) * job.bias_keys +
                bias.keys.begin;
    __builtin_memcpy(to, scratch.grad_bias + i * kBackwardKeys,
                     static_cast<unsigned>(bias.keys.size()) * sizeof *to);
  }
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
