// The steps of the backward on one row tile and one subtile of keys, see backward.h.
#pragma once

#include "cpu/isa/mask.h"
#include "cpu/isa/problem.h"
#include "cpu/isa/variant.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// A tile of keys of one key/value head.
struct KeyBlock {
  int batch, key_head;
  int index;  // of the tile in its sequence
  core::ShiftedMask mask;
  Span keys;
};

// A tile of rows of one query head that the block works on.
struct QueryTile {
  int head;
  int index;  // of the tile in its sequence
  Span rows;
};

// Number of a row tile among those of all heads and sequences.
PANTILE_INLINE std::int64_t tile_number(const BackwardJob& job, int batch, int head, int tile) {
  return (static_cast<std::int64_t>(batch) * job.heads.heads_q + head) * job.row_tiles + tile;
}

// Where rows of Q or dO are kept in packed form.
PANTILE_INLINE float* packed_address(const Operand& packed, int batch, int head, int row) {
  return head_address<F32>(packed, batch, head) + row * packed.side.seq_stride;
}

// P and dS of kLanes keys of two rows, in the places of S and dP.
PANTILE_INLINE void keep(const Floats (&p)[2], const Floats (&ds)[2], int row, int lane,
                         const BackwardScratch& scratch) {
  for (int i = 0; i < 2; ++i) {
    store(scratch.scores + (row + i) * kBackwardKeys + lane, p[i]);
    store(scratch.grad_scores + (row + i) * kBackwardKeys + lane, ds[i]);
  }
}

// Keys of a subtile, and what a row tile sees of it.
struct Subtile {
  int place;  // first key in the block's scratch arrays
  Span keys;
  int vectors;  // of keys
  bool full;    // no pair is hidden
};

// What step b needs of two neighbouring rows.
struct RowPair {
  Floats lse[2];
  Floats delta[2];
  Span seen[2];  // keys
};

// `lse` and `delta` are those of the tile's rows. A second row that does not exist sees nothing.
PANTILE_INLINE RowPair row_pair(const core::ShiftedMask& mask, const QueryTile& tile,
                                const Subtile& subtile, int row, const float* lse,
                                const float* delta) {
  RowPair pair{};
  for (int i = 0; i < core::min_of(2, tile.rows.size() - row); ++i) {
    // A row of -inf has P = exp(S - inf) = 0.
    const bool empty = lse[row + i] == -__builtin_huge_valf();
    pair.lse[i] = splat(empty ? __builtin_huge_valf() : lse[row + i]);
    pair.delta[i] = splat(delta[row + i]);
    pair.seen[i] =
        subtile.full ? subtile.keys : core::visible_keys(mask, tile.rows.begin + row + i);
    pair.seen[i].end = core::min_of(pair.seen[i].end, subtile.keys.end);
  }
  return pair;
}

// Step b for two rows: from S and dP to P and dS. `kHides`: some pairs in reach are hidden.
// `Change` is what a variant changes.
template <bool kHides, class Change>
PANTILE_INLINE void weigh_pair(const RowPair& pair, const Subtile& subtile, int row,
                               const BackwardScratch& scratch, Change& change) {
  const Ints lanes = lane_numbers();
  for (int v = 0; v < subtile.vectors; ++v) {
    const int key = subtile.keys.begin + v * kLanes;
    Floats p[2];
    Floats ds[2];
    PANTILE_UNROLL for (int i = 0; i < 2; ++i) {
      const int at = (row + i) * kBackwardKeys + v * kLanes;
      p[i] = exp(load(scratch.scores + at) - pair.lse[i]);
      const auto kept = change.kept(row + i, v * kLanes);
      ds[i] = p[i] * (change.drop(load(scratch.grad_scores + at), kept) - pair.delta[i]);
      if (kHides) {
        const Ints visible = (lanes >= pair.seen[i].begin - key) & (lanes < pair.seen[i].end - key);
        p[i] = select(visible, p[i], Floats{});
        ds[i] = select(visible, ds[i], Floats{});
      }
      p[i] = change.show(p[i], row + i, v * kLanes);
      ds[i] = change.show(ds[i], row + i, v * kLanes);
      p[i] = change.drop(p[i], kept);
      ds[i] = change.finish(ds[i], row + i, v * kLanes);
    }
    keep(p, ds, row, v * kLanes, scratch);
  }
}

// Plain attention.
struct NoChange {
  struct Nothing {};
  PANTILE_INLINE Nothing kept(int, int) const { return {}; }
  PANTILE_INLINE Floats drop(Floats x, Nothing) const { return x; }
  PANTILE_INLINE Floats show(Floats x, int, int) const { return x; }
  PANTILE_INLINE Floats finish(Floats ds, int, int) const { return ds; }
};

// A variant, on the subtile that change_rows() has seen. dS is that of the scores before each
// function whose derivatives are in `slopes`. `masked`: its mask hides some pairs.
class VariantChange {
 public:
  VariantChange(const BackwardJob& job, int batch, const core::ShiftedMask& mask,
                const QueryTile& tile, const Subtile& subtile, bool masked,
                const ScoreSlopes& slopes, const BackwardScratch& scratch)
      : dropped_(job.variant.dropped),
        scale_(splat(core::dropout_scale(job.variant.dropped))),
        slopes_(slopes.softcap),
        score_slopes_(slopes.score),
        shown_(masked ? scratch.shown : nullptr),
        sums_distances_(job.variant_gradients.alibi_slopes != nullptr),
        first_distance_(tile.rows.begin + mask.shift() - subtile.keys.begin) {
    if (dropped_ > 0) {
      const Span keys{subtile.keys.begin, subtile.keys.begin + subtile.vectors * kLanes};
      random_ = random_bytes<false>(job.variant, batch, tile.head, tile.rows, keys, scratch.random);
    }
    if (masked) {
      shown_bytes<false>(job.variant.mask, {batch, tile.head, mask.shift()}, tile.rows,
                         subtile.keys, kBackwardKeys, scratch.shown);
    }
  }

  // What a weight is multiplied with.
  PANTILE_INLINE Floats kept(int row, int lane) const {
    return dropped_ == 0
               ? scale_
               : select(PANTILE_ISA::kept(random_, dropped_, row, lane), scale_, Floats{});
  }
  PANTILE_INLINE Floats drop(Floats x, Floats kept) const { return x * kept; }

  PANTILE_INLINE Floats show(Floats x, int row, int lane) const {
    return shown_ == nullptr
               ? x
               : select(shown_lanes(shown_ + row * kBackwardKeys + lane), x, Floats{});
  }

  PANTILE_INLINE Floats finish(Floats ds, int row, int lane) {
    if (score_slopes_ != nullptr) {
      ds = through(ds, score_slopes_ + row * kBackwardKeys + lane);
    }
    if (sums_distances_) {
      distance_sum_ += ds * distances<-1>(first_distance_ + row - lane);
    }
    return slopes_ == nullptr ? ds : through(ds, slopes_ + row * kBackwardKeys + lane);
  }

  // Sum of dS times the distance.
  double distance_sum() const {
    double sum = 0.0;
    for (int lane = 0; lane < kLanes; ++lane) {
      sum += static_cast<double>(distance_sum_[lane]);
    }
    return sum;
  }

 private:
  // Slopes of hidden pairs may be anything.
  static PANTILE_INLINE Floats through(Floats ds, const float* slopes) {
    return select(ds == Floats{}, Floats{}, ds * load(slopes));
  }

  const int dropped_;
  const Floats scale_;
  const float* const slopes_;
  const float* const score_slopes_;
  const std::uint8_t* const shown_;
  const bool sums_distances_;
  const int first_distance_;
  RandomBytes random_{};
  Floats distance_sum_{};
};

template <class Change>
inline void weigh(const core::ShiftedMask& mask, const QueryTile& tile, const Subtile& subtile,
                  const float* lse, const float* delta, const BackwardScratch& scratch,
                  Change& change) {
  const Span reach{subtile.keys.begin, subtile.keys.begin + subtile.vectors * kLanes};
  for (int row = 0; row < tile.rows.size(); row += 2) {
    const RowPair pair = row_pair(mask, tile, subtile, row, lse, delta);
    const bool all = core::max_of(pair.seen[0].begin, pair.seen[1].begin) <= reach.begin &&
                     core::min_of(pair.seen[0].end, pair.seen[1].end) >= reach.end;
    if (all) {
      weigh_pair<false>(pair, subtile, row, scratch, change);
    } else {
      weigh_pair<true>(pair, subtile, row, scratch, change);
    }
  }
}

// S = Q K^T, or dP with dO, V^T and dP for Q, K^T and S.
inline void score(const QueryTile& tile, const Subtile& subtile, const float* a, const float* b,
                  int dim, float* c) {
  Product p{};
  p.a = a;
  p.lda = padded(dim);
  p.b = b + subtile.place * p.lda;
  p.ldb = kBackwardKeys;
  p.c = c;
  p.ldc = kBackwardKeys;
  p.rows = tile.rows.size();
  p.vectors = subtile.vectors;
  p.steps = dim;
  multiply<Start::zero, Walk::along_rows>(p);
}

// dV += P^T dO, or dK += dS^T Q. `not_finite` are the rows of dO or Q if some were dropped.
inline void add_to_keys(const VisiblePairs& visible, const QueryTile& tile, const Subtile& subtile,
                        const float* weights, const float* rows, int dim, float* sums,
                        const Rows* not_finite) {
  Product p{};
  p.a = weights;
  p.lda = kBackwardKeys;
  p.b = rows;
  p.ldb = padded(dim);
  p.c = sums + subtile.place * p.ldb;
  p.ldc = p.ldb;
  p.rows = subtile.keys.size();
  p.vectors = padded(dim) / kLanes;
  p.steps = tile.rows.size();
  multiply<Start::old, Walk::along_columns>(p);
  if (not_finite != nullptr) {
    add_not_finite<Walk::along_columns>(p, subtile.keys.size(), *not_finite, [&](int key, int row) {
      return visible(tile.rows.begin + row, subtile.keys.begin + key);
    });
  }
}

// dQ += dS K, or dQ = dS K if the sums are empty. `not_finite` are the rows of the block's K if
// some were dropped.
inline void add_to_rows(const VisiblePairs& visible, const QueryTile& tile, const Subtile& subtile,
                        const float* weights, int dim, bool empty, float* sums,
                        const BackwardScratch& scratch, const Rows* not_finite) {
  Product p{};
  p.a = weights;
  p.lda = kBackwardKeys;
  p.ldb = padded(dim);
  p.b = scratch.keys_summed + subtile.place * p.ldb;
  p.c = sums;
  p.ldc = p.ldb;
  p.rows = tile.rows.size();
  p.vectors = padded(dim) / kLanes;
  p.steps = subtile.keys.size();
  if (empty) {
    multiply<Start::zero, Walk::along_rows>(p);
  } else {
    multiply<Start::old, Walk::along_rows>(p);
  }
  if (not_finite != nullptr) {
    add_not_finite<Walk::along_rows>(
        p, tile.rows.size(), not_finite->part(subtile.place, subtile.keys.size()),
        [&](int row, int key) { return visible(tile.rows.begin + row, subtile.keys.begin + key); });
  }
}

// An operand's rows both as they are (A) and to be summed over (B), which floats do in one array
// unless some of them are not finite.
struct PackedRows {
  const float* as_a;
  const float* as_b;
  Rows rows;
  bool dropped;
  const Rows* not_finite() const { return dropped ? &rows : nullptr; }
};

inline PackedRows pack_both(const Rows& rows, float* as_a, float* as_b) {
  const bool dropped = pack_summed(as_b, rows);
  if (!dropped) {
    return PackedRows{as_b, as_b, rows, false};
  }
  pack_rows(as_a, rows, kBackwardRows);
  return PackedRows{as_a, as_b, rows, dropped};
}

// Rows of Q or dO: the ones the preparation packed, if it did and bit `bit` says that they are
// finite.
inline PackedRows query_rows(const BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                             const Operand& operand, const Operand& packed, unsigned bit, int dim,
                             float* as_a, float* as_b) {
  const Rows rows = rows_of(job.dtype, operand, block.batch, tile.head, tile.rows, dim);
  if (job.finite != nullptr &&
      (job.finite[tile_number(job, block.batch, tile.head, tile.index)] & bit) != 0) {
    const float* from = packed_address(packed, block.batch, tile.head, tile.rows.begin);
    return PackedRows{from, from, rows, false};
  }
  return pack_both(rows, as_a, as_b);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
