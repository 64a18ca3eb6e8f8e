// The gradients of the tensors that a score of the user's own captures: dS of the score times the
// derivative of each of its loads, added in double where the load reads.
//
// An item is a part of the heads of all sequences, which has sums of its own: their order does not
// depend on the number of threads. As bias_gradient.h, it computes S and dP again.
#pragma once

#include "cpu/isa/bias_gradient.h"
#include "cpu/isa/expression.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// One element of one load.
PANTILE_INLINE void add_element(const ScoreJob& score, const expression::Addend& addend,
                                const Machine& machine, int lane, float ds, double* sums) {
  const CapturedTensor& tensor = score.captured[addend.captured];
  std::int64_t offset = 0;
  for (int axis = 0; axis < addend.axes; ++axis) {
    const std::int64_t index = machine.integer(addend.index[axis], lane);
    offset =
        offset * tensor.size[axis] + core::clamp<std::int64_t>(index, 0, tensor.size[axis] - 1);
  }
  sums[offset] +=
      static_cast<double>(ds) * static_cast<double>(machine.number(addend.derivative, lane));
}

// What scratch.grad_scores adds, row by row. Pairs that are hidden have dS = 0.
inline void add_tile(const BackwardJob& job, const QueryTile& tile, const Subtile& subtile,
                     const BackwardScratch& scratch, Machine& machine, double* sums) {
  const ScoreJob& score = job.variant.score;
  for (int i = 0; i < tile.rows.size(); ++i) {
    const float* ds = scratch.grad_scores + i * kBackwardKeys;
    machine.run_row(scratch.score_inputs + i * kBackwardKeys,
                    PairRow{tile.rows.begin + i, subtile.keys.begin, 0, 1, tile.rows.end - 1,
                            subtile.keys.end - 1, subtile.vectors});
    for (int a = 0; a < score.addend_count; ++a) {
      const expression::Addend& addend = score.addends[a];
      const std::int64_t begin = job.captured_begin[addend.captured];
      if (begin < 0) {
        continue;
      }
      for (int lane = 0; lane < subtile.keys.size(); ++lane) {
        if (ds[lane] != 0.0f) {
          add_element(score, addend, machine, lane, ds[lane], sums + begin);
        }
      }
    }
  }
}

// One head of one sequence.
inline void add_captured_head(const BackwardJob& job, int batch, int head,
                              const BackwardScratch& scratch, double* sums) {
  const Extent q = extent_of(job.q.side, batch);
  const Extent k = extent_of(job.k.side, batch);
  const core::ShiftedMask mask = mask_of(job, batch, q.length, k.length);
  const int key_head = job.heads.key_head(head);
  Machine machine(job.variant.score.gradients, job.variant.score.captured, batch, head);
  for (int begin = 0; begin < k.length; begin += kBackwardKeys) {
    const Span keys{begin, core::min_of(begin + kBackwardKeys, k.length)};
    const core::TilePlan plan = core::plan_key_tile(mask, keys, kBackwardRows);
    if (plan.visit.empty()) {
      continue;
    }
    pack_transposed(scratch.keys, kBackwardKeys,
                    rows_of(job.dtype, job.k, batch, key_head, keys, job.dim), job.scale);
    pack_transposed(scratch.values, kBackwardKeys,
                    rows_of(job.dtype, job.v, batch, key_head, keys, job.dim_v), 1.0f);
    const KeyBlock block{batch, key_head, 0, mask, keys};
    for (int t = plan.visit.begin; t < plan.visit.end; ++t) {
      const Span rows{t * kBackwardRows, core::min_of((t + 1) * kBackwardRows, mask.rows)};
      const Subtile subtile{0, keys, core::ceil_div(keys.size(), kLanes),
                            t >= plan.full.begin && t < plan.full.end};
      const Sight sight = sight_of(job.variant.mask, {batch, head, mask.shift()}, rows, keys);
      if (sight == Sight::none) {
        continue;
      }
      const QueryTile tile{head, t, rows};
      grad_scores(job, block, tile, subtile, sight == Sight::some, true, scratch);
      add_tile(job, tile, subtile, scratch, machine, sums);
    }
  }
}

inline void captured_gradient(const BackwardJob& job, int item, void* memory) {
  const BackwardScratch scratch = backward_scratch(job, memory);
  double* sums = job.captured_sums + item * job.captured_elements;
  for (std::int64_t i = 0; i < job.captured_elements; ++i) {
    sums[i] = 0.0;
  }
  const int heads = job.batch * job.heads.heads_q;
  for (int number = item; number < heads; number += job.captured_parts) {
    add_captured_head(job, number / job.heads.heads_q, number % job.heads.heads_q, scratch, sums);
  }
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
