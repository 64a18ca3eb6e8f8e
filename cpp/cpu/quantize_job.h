// The work of the CPU quantiser and of the way back: blocks of 128 rows of Q, K and V.
#pragma once

#include <cstdint>

#include "core/blocked.h"
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "pantile/quantize.h"

namespace pantile::cpu {

// One of q, k and v: where its rows are and how many blocks its longest sequence has.
struct QuantizeSide {
  const void* data;  // with dequantize written
  Layout layout;
  core::SequenceSide sequences;
  int heads;
  int dim;
  int tiles;            // blocks of the longest sequence
  std::int64_t blocks;  // of all sequences

  std::int64_t items(std::int64_t batch) const { return batch * heads * tiles; }
};

// One block of 128 rows, of which `rows` exist.
struct Block {
  int batch, head;
  int begin;             // first row in its sequence
  int rows;              // 0: nothing to do
  std::int64_t index;    // among the blocks of a head
  std::int64_t element;  // of the first row, in the input
};

inline Block locate(const QuantizeSide& side, int item) {
  Block block;
  const int tile = item % side.tiles;
  block.head = item / side.tiles % side.heads;
  block.batch = item / side.tiles / side.heads;
  block.begin = tile * core::kBlockedRows;
  const core::Sequence sequence = core::locate_sequence(side.sequences, block.batch);
  block.rows = core::clamp(sequence.length - block.begin, 0, core::kBlockedRows);
  block.index = core::first_block(side.sequences, block.batch) + tile;
  block.element = sequence.offset + block.begin * side.layout.seq + block.head * side.layout.head;
  return block;
}

struct QuantizeJob {
  const QuantizePlan* plan;
  const QuantizeTensors* tensors;
  QuantizeSide q, k, v;
  core::Heads heads{1, 1};
  float* partial;  // sums of K: [heads_k][blocks_k][head_dim]
  float* rows;     // [workers][core::kBlockedRows][kMaxFp8Dim]
};

inline QuantizeSide make_side(const void* data, const Layout& layout, std::int64_t length,
                              std::int64_t heads, std::int64_t dim, const std::int32_t* cu_seqlens,
                              const std::int32_t* seqused, std::int64_t blocks) {
  QuantizeSide side;
  side.data = data;
  side.layout = layout;
  side.sequences.batch_stride = layout.batch;
  side.sequences.seq_stride = layout.seq;
  side.sequences.max_length = static_cast<int>(length);
  side.sequences.cu_seqlens = cu_seqlens;
  side.sequences.seqused = seqused;
  side.heads = static_cast<int>(heads);
  side.dim = static_cast<int>(dim);
  side.tiles = static_cast<int>(core::ceil_div<std::int64_t>(length, core::kBlockedRows));
  side.blocks = blocks;
  return side;
}

inline QuantizeJob make_job(const QuantizePlan& plan, const QuantizeTensors& t) {
  const QuantizeProblem& problem = plan.problem;
  const ForwardProblem& p = problem.forward;
  const QuantizedSizes sizes = quantized_sizes(p);
  QuantizeJob job;
  job.plan = &plan;
  job.tensors = &t;
  job.heads = core::Heads{static_cast<int>(p.heads_q), static_cast<int>(p.heads_k)};
  const bool back = problem.dequantize;
  job.q = make_side(back ? t.restored_q : t.q, problem.q, p.seqlen_q, p.heads_q, p.head_dim,
                    t.cu_seqlens_q, t.seqused_q, sizes.blocks_q);
  job.k = make_side(back ? t.restored_k : t.k, problem.k, p.seqlen_k, p.heads_k, p.head_dim,
                    t.cu_seqlens_k, t.seqused_k, sizes.blocks_k);
  job.v = make_side(back ? t.restored_v : t.v, problem.v, p.seqlen_k, p.heads_k, p.head_dim_v,
                    t.cu_seqlens_k, t.seqused_k, sizes.blocks_k);
  return job;
}

// Writes the numbers of a block of codes: of Q, of K or of V.
void dequantize_block(const QuantizeJob& job, const Block& block, bool is_query, bool is_key);

}  // namespace pantile::cpu
