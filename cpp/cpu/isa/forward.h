// FlashAttention-2 forward for a block of query rows of one head.
//
// 1. Q^T is packed, one operand a row tile.
// 2. For every tile of keys that a row of the block sees: K and V are packed once, and for each row
//    tile that visits it
//    a. S^T = K Q^T, rows of the sequence along the vector lanes: maxima and sums over keys need no
//       horizontal operation;
//    b. what a variant changes of the scores, then the mask, in tiles that core/geometry does not
//       call full;
//    c. online softmax, P^T in place of S^T, then dropout;
//    d. O = O * factor + P V.
// 3. O is normalised and written with LSE.
//
// Scratch memory belongs to the calling thread. How rows are cut into blocks changes no result.
#pragma once

#include <type_traits>

#include "core/softmax_state.h"
#include "cpu/isa/mask.h"
#include "cpu/isa/problem.h"
#include "cpu/isa/variant.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

constexpr int kWays = 4;  // keys at a time in the softmax: independent chains, to hide latencies

// A block of rows of one head, and one tile of rows in it.
struct ForwardBlock {
  int batch, head;
  core::ShiftedMask mask;
  Span rows;
};

struct RowTile {
  int place;            // first row in the block's scratch arrays
  Span rows;            // of the sequence
  Span keys;            // that any of the rows sees
  core::TilePlan plan;  // in tiles of kForwardKeys
  int vectors;          // of rows
};

PANTILE_INLINE RowTile row_tile(const ForwardBlock& block, int place) {
  const int begin = block.rows.begin + place;
  const Span rows{begin, core::min_of(begin + kForwardRows, block.rows.end)};
  return RowTile{place, rows, keys_seen(block.mask, rows),
                 core::plan_row_tile(block.mask, rows, kForwardKeys),
                 core::ceil_div(rows.size(), kLanes)};
}

// Hides scores by the mask, and the rows of S^T between the last key and a multiple of kWays.
inline void hide_scores(const core::ShiftedMask& mask, const RowTile& tile, Span keys,
                        float* scores) {
  const Ints lanes = lane_numbers();
  for (int key = keys.begin; key < keys.end; ++key, scores += kForwardRows) {
    const Span seen = core::visible_rows(mask, key);
    for (int v = 0; v < tile.vectors; ++v) {
      const int row = tile.rows.begin + v * kLanes;
      if (seen.begin > row || seen.end < row + kLanes) {
        const Ints visible = (lanes >= seen.begin - row) & (lanes < seen.end - row);
        float* s = scores + v * kLanes;
        store(s, select(visible, load(s), splat(kHidden)));
      }
    }
  }
}

inline void pad_scores(int keys, float* scores) {
  for (int at = keys * kForwardRows; at % (kWays * kForwardRows) != 0; at += kLanes) {
    store(scores + at, splat(kHidden));
  }
}

// The online softmax of kLanes rows: puts P^T in the place of one column of vectors of S^T, moves
// the rows' state on and returns what their outputs shrink by. `keys` is a multiple of kWays.
inline Floats soften(float* scores, int keys, float* row_max, float* row_sum) {
  Floats top[kWays];
  PANTILE_UNROLL for (int way = 0; way < kWays; ++way) {
    top[way] = splat(kHidden);
  }
  for (int k = 0; k < keys; k += kWays) {
    PANTILE_UNROLL for (int way = 0; way < kWays; ++way) {
      top[way] = max_or_second(load(scores + (k + way) * kForwardRows), top[way]);
    }
  }
  const Floats old_max = load(row_max);
  Floats max = old_max;
  PANTILE_UNROLL for (int way = 0; way < kWays; ++way) {
    max = max_or_second(top[way], max);
  }
  const Floats shift = select(max == splat(kHidden), Floats{}, max);  // core::softmax_shift
  Floats sum[kWays] = {};
  for (int k = 0; k < keys; k += kWays) {
    float* s = scores + k * kForwardRows;
    PANTILE_UNROLL for (int way = 0; way < kWays; ++way) {
      const Floats p = exp(load(s + way * kForwardRows) - shift);
      sum[way] += p;
      store(s + way * kForwardRows, p);
    }
  }
  const Floats shrink = exp(old_max - shift);
  Floats total = load(row_sum) * shrink;
  PANTILE_UNROLL for (int way = 0; way < kWays; ++way) {
    total += sum[way];
  }
  store(row_max, max);
  store(row_sum, total);
  return shrink;
}

// What a row tile sees of the packed tile of keys.
struct SeenKeys {
  Span keys;
  int skip;     // packed keys before the first
  bool full;    // no pair is hidden by the window
  bool masked;  // some are by the mask beside it
  // Rows of V in the packed tile if some of their values were dropped, or null.
  const Rows* not_finite;
};

// `packed` is the first packed key. Keys that no row of the tile sees are left out, at the front in
// whole register blocks.
PANTILE_INLINE SeenKeys seen_keys(const RowTile& tile, int packed, const Rows* not_finite) {
  constexpr int kStep = 2 * kMaxBlockRows;
  const int number = packed / kForwardKeys;
  const int skip = core::max_of(0, tile.keys.begin - packed) / kStep * kStep;
  return SeenKeys{{packed + skip, core::min_of(packed + kForwardKeys, tile.keys.end)},
                  skip,
                  number >= tile.plan.full.begin && number < tile.plan.full.end,
                  false,
                  not_finite};
}

// Step a.
inline void score(const ForwardJob& job, const RowTile& tile, const SeenKeys& seen,
                  const ForwardScratch& scratch) {
  Product p{};
  p.lda = padded(job.dim);
  p.a = scratch.keys + seen.skip * p.lda;
  p.b = scratch.queries + tile.place * p.lda;
  p.ldb = kForwardRows;
  p.c = scratch.scores;
  p.ldc = kForwardRows;
  p.rows = seen.keys.size();
  p.vectors = tile.vectors;
  p.steps = job.dim;
  multiply<Start::zero, Walk::along_rows>(p);
}

// Step d.
inline void add_values(const ForwardJob& job, const ForwardBlock& block, const RowTile& tile,
                       const SeenKeys& seen, const ForwardScratch& scratch) {
  const int width = padded(job.dim_v);
  Product p{};
  p.a = scratch.scores;
  p.lda = kForwardRows;
  p.b = scratch.values + seen.skip * width;
  p.ldb = width;
  p.c = scratch.outputs + tile.place * width;
  p.ldc = width;
  p.rows = tile.rows.size();
  p.vectors = width / kLanes;
  p.steps = seen.keys.size();
  p.factor = scratch.row_factor;
  multiply<Start::old_scaled, Walk::along_columns>(p);
  if (seen.not_finite != nullptr) {
    const Rows values = seen.not_finite->part(seen.skip, seen.keys.size());
    const VisiblePairs visible{block.mask, job.variant.mask, block.batch, block.head};
    add_not_finite<Walk::along_columns>(p, tile.rows.size(), values, [&](int i, int k) {
      return visible(tile.rows.begin + i, seen.keys.begin + k);
    });
  }
}

// Steps a to d for one row tile.
inline void attend(const ForwardJob& job, const ForwardBlock& block, const RowTile& tile,
                   const SeenKeys& seen, const ForwardScratch& scratch) {
  score(job, tile, seen, scratch);
  if (job.variant.any_score) {
    change_columns(job.variant, block.mask, block.batch, block.head, tile.rows, seen.keys,
                   kForwardRows, scratch.scores);
  }
  if (!seen.full) {
    hide_scores(block.mask, tile, seen.keys, scratch.scores);
  }
  if (seen.masked) {
    shown_bytes<true>(job.variant.mask, {block.batch, block.head, block.mask.shift()}, tile.rows,
                      seen.keys, kForwardRows, scratch.shown);
    hide_unshown(scratch.shown, seen.keys.size(), tile.vectors, scratch.scores);
  }
  pad_scores(seen.keys.size(), scratch.scores);
  for (int v = 0; v < tile.vectors; ++v) {
    const int lane = v * kLanes;
    const int row = tile.place + lane;
    const Floats factor = soften(scratch.scores + lane, core::round_up(seen.keys.size(), kWays),
                                 scratch.row_max + row, scratch.row_sum + row);
    store(scratch.row_factor + lane, factor);
  }
  if (job.variant.dropped > 0) {
    const Span rows{tile.rows.begin, tile.rows.begin + tile.vectors * kLanes};
    const RandomBytes random =
        random_bytes<true>(job.variant, block.batch, block.head, rows, seen.keys, scratch.random);
    drop_weights(random, job.variant.dropped, seen.keys.size(), tile.vectors, scratch.scores);
  }
  add_values(job, block, tile, seen, scratch);
}

// O, normalised, of one row: from the sums to the tensor, with its low bits where they are wanted.
template <class Element>
PANTILE_INLINE void write_output(const float* sums, Floats factor, int dim,
                                 typename Element::Raw* o, std::int8_t* low) {
  for (int d = 0; d < dim; d += kLanes) {
    const Floats exact = load(sums + d) * factor;
    write_row<Element>(o, d, dim, exact);
    if constexpr (!std::is_same_v<Element, F32>) {
      if (low != nullptr) {
        write_low_row<Element>(low, o, d, dim, exact);
      }
    }
  }
}

// The softmax of a row with the head's sink, which its sum of weights contains and its output does
// not: `shrink` is what the sink's maximum leaves of the sum of outputs.
struct FinishedRow {
  core::SoftmaxState state;
  float shrink;
};

PANTILE_INLINE FinishedRow finish_row(const ForwardJob& job, int head,
                                      const ForwardScratch& scratch, int i) {
  const core::SoftmaxState seen{scratch.row_max[i], scratch.row_sum[i]};
  if (job.variant.sinks == nullptr) {
    return FinishedRow{seen, 1.0f};
  }
  const float sink = job.variant.sinks[head];
  const float max = sink > seen.max ? sink : seen.max;
  const float shift = core::softmax_shift(max);
  const float shrink = exp(splat(seen.max - shift))[0];
  // max_or_second(-88, x) of exp turns -inf into 0, and keeps NaN of either.
  return FinishedRow{{max, seen.sum * shrink + exp(splat(sink - shift))[0]}, shrink};
}

// Stage 3 for the rows of a block.
inline void write_block(const ForwardJob& job, const ForwardBlock& block,
                        const ForwardScratch& scratch) {
  const int width = padded(job.dim_v);
  std::int8_t* low =
      job.o_low.data == nullptr ? nullptr : head_address<I8>(job.o_low, block.batch, block.head);
  with_element(job.output_dtype, [&](auto element) {
    using Element = decltype(element);
    typename Element::Raw* o = head_address<Element>(job.o, block.batch, block.head);
    for (int i = 0; i < block.rows.size(); ++i) {
      const FinishedRow finished = finish_row(job, block.head, scratch, i);
      const Floats factor = splat(core::normaliser(finished.state) * finished.shrink *
                                  core::dropout_scale(job.variant.dropped));
      const std::int64_t row = block.rows.begin + i;
      write_output<Element>(scratch.outputs + i * width, factor, job.dim_v,
                            o + row * job.o.side.seq_stride,
                            low == nullptr ? nullptr : low + row * job.o_low.side.seq_stride);
    }
  });
  if (job.lse.data != nullptr) {
    float* lse = head_values(job.lse, job.q.side, block.batch, block.head) + block.rows.begin;
    for (int i = 0; i < block.rows.size(); ++i) {
      const core::SoftmaxState state = finish_row(job, block.head, scratch, i).state;
      lse[i] = state.sum == 0.0f ? kHidden : state.max + __builtin_logf(state.sum);
    }
  }
  if (job.max_logit != nullptr) {
    float* entry = job.max_logit + std::int64_t{block.batch} * job.heads.heads_q + block.head;
    for (int i = 0; i < block.rows.size(); ++i) {
      raise_max_logit(entry, scratch.row_max[i], scratch.row_sum[i]);
    }
  }
}

// Rows that exist in memory but take no part: O = 0, LSE = -inf.
inline void write_unused(const ForwardJob& job, int batch, int head, Span rows) {
  clear_rows(job.output_dtype, job.o, batch, head, rows, job.dim_v);
  if (job.lse.data != nullptr) {
    float* lse = head_values(job.lse, job.q.side, batch, head);
    for (int row = rows.begin; row < rows.end; ++row) {
      lse[row] = kHidden;
    }
  }
}

// Stages 1 and 2.
inline void stream_keys(const ForwardJob& job, const ForwardBlock& block,
                        const ForwardScratch& scratch) {
  const int key_head = job.heads.key_head(block.head);
  const int row_tiles = core::ceil_div(block.rows.size(), kForwardRows);
  const int lda = padded(job.dim);
  for (int t = 0; t < row_tiles; ++t) {
    const RowTile tile = row_tile(block, t * kForwardRows);
    pack_transposed(scratch.queries + tile.place * lda, kForwardRows,
                    rows_of(job.dtype, job.q, block.batch, block.head, tile.rows, job.dim),
                    job.scale);
  }
  const Span seen = keys_seen(block.mask, block.rows);
  if (seen.empty()) {
    return;
  }
  for (int k = seen.begin / kForwardKeys; k * kForwardKeys < seen.end; ++k) {
    const Span keys{k * kForwardKeys, core::min_of((k + 1) * kForwardKeys, block.mask.keys)};
    Rows values{};
    bool packed = false;
    bool dropped = false;
    for (int t = 0; t < row_tiles; ++t) {
      const RowTile tile = row_tile(block, t * kForwardRows);
      if (k < tile.plan.visit.begin || k >= tile.plan.visit.end) {
        continue;
      }
      SeenKeys seen_by_tile = seen_keys(tile, keys.begin, nullptr);
      const Sight sight = sight_of(job.variant.mask, {block.batch, block.head, block.mask.shift()},
                                   tile.rows, seen_by_tile.keys);
      if (sight == Sight::none) {
        continue;
      }
      if (!packed) {
        values = key_rows(job, job.v, block.batch, key_head, keys, job.dim_v, scratch.paged_values);
        pack_rows(scratch.keys,
                  key_rows(job, job.k, block.batch, key_head, keys, job.dim, scratch.paged_keys),
                  kForwardKeys);
        dropped = pack_summed(scratch.values, values);
        packed = true;
      }
      seen_by_tile.masked = sight == Sight::some;
      seen_by_tile.not_finite = dropped ? &values : nullptr;
      attend(job, block, tile, seen_by_tile, scratch);
    }
  }
}

inline void forward(const ForwardJob& job, int item, void* memory) {
  const core::WorkTile work = job.order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * job.item_rows;
  const int end = core::min_of(begin + job.item_rows, q.room);
  const Span rows{begin, core::min_of(end, q.length)};
  if (!rows.empty()) {
    const ForwardScratch scratch = forward_scratch(job, memory);
    const ForwardBlock block{work.batch, work.head, mask_of(job, work.batch, q.length, k.length),
                             rows};
    const int touched = touched_rows(rows.size());
    fill(scratch.row_max, touched, core::empty_softmax_state().max);
    fill(scratch.row_sum, touched, core::empty_softmax_state().sum);
    fill(scratch.outputs, touched * padded(job.dim_v), 0.0f);
    stream_keys(job, block, scratch);
    write_block(job, block, scratch);
  }
  write_unused(job, work.batch, work.head, Span{core::max_of(begin, q.length), end});
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
