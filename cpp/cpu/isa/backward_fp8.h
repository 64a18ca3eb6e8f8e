// FP8 attention backward in the roundings of the Hopper kernel, for a tile of 128 keys of one
// key/value head; the algebra is in docs/design/fp8-backward.md.
//
// Preparation, once for every block of 128 rows: dO becomes e4m3 codes with one scale; delta is
// made of those codes and of the forward's O; LSE is brought to the scores of the codes.
// 1. Codes of K and V become floats; dK and dV start at 0.
// 2. For every query head of the group and every 64 rows that see a key of the tile
//    a. S = Q K^T and dP = dO V^T of codes, rounded to fp16 like the accumulators of the GPU;
//    b. P = 2^(S * scales - LSE), dS = P * (dP * scales - delta), 0 where the mask hides;
//    c. P and dS become fp16 and bf16 and then e4m3 codes, with the scales of core/fp8_steps.h;
//    d. parts of dV = P^T dO, dK = dS^T Q and dQ = dS K, of codes and from zero, which are added
//       times their scales: the second level of accumulation. dQ in the row tile's turn.
// 3. dK and dV are scaled and written; dQ by the last tile of keys that adds to it.
//
// NaN and Inf of Q, K and dO reach P or dS of all pairs that attend to them. The operands of d hold
// 0 in their place, so that no hidden pair, whose weight is 0, carries them further.
#pragma once

#include "cpu/fp8_backward_job.h"
#include "cpu/isa/backward.h"
#include "cpu/isa/forward_fp8.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

constexpr int kStepRows = core::kFp8StepRows;
constexpr int kStepKeys = core::kFp8StepKeys;

// ---- number formats -----------------------------------------------------------------------------

// Nearest e4m3 number of any x, whose magnitude may reach 448; NaN and Inf give NaN.
PANTILE_INLINE Floats round_signed_to_e4m3(Floats x) {
  const Words sign = bits(x) & 0x80000000u;
  const Floats magnitude = from_bits(bits(x) & 0x7fffffffu);
  const Floats whole = round_to_e4m3(at_most(magnitude, core::kE4m3Max));
  const Floats finite =
      select(magnitude <= splat(core::kLargestFloat), whole, splat(__builtin_nanf("")));
  return from_bits(bits(finite) | sign);
}

// Nearest bf16 number, ties to even; NaN stays.
PANTILE_INLINE Floats round_to_bf16(Floats x) {
  const Words word = bits(x);
  return select(x == x, from_bits((word + 0x7fff + ((word >> 16) & 1)) & ~0xffffu), x);
}

// Of 0 or more numbers the larger finite one.
PANTILE_INLINE Floats raise_amax(Floats amax, Floats x) {
  const Floats magnitude = from_bits(bits(x) & 0x7fffffffu);
  return select((magnitude > amax) & (magnitude <= splat(core::kLargestFloat)), magnitude, amax);
}

// In place, in the operands that are summed over rows.
inline void drop_nan(float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load(x + i);
    store(x + i, select(value == value, value, Floats{}));
  }
}

// ---- preparation --------------------------------------------------------------------------------

// A block of 128 rows of one query head.
struct GradBlock {
  int batch, head;
  Span rows;                                                       // of the sequence
  std::int64_t block;                                              // among the blocks of all heads
  std::int64_t row() const { return block * core::kBlockedRows; }  // the first, of the operands
};

// Codes of dO; returns for each row whether it is finite in `finite`.
inline void quantize_gradients(const Fp8BackwardJob& job, const GradBlock& block,
                               const Rows& grad_o, bool (&finite)[core::kBlockedRows]) {
  const int width = padded(job.dim_v);
  const float limit = core::gradient_code_limit(job.dim_v);
  float row[core::round_up(core::kMaxFp8Dim, kColumnPad)];
  const auto read = [&](int i) {
    with_element(job.dtype, [&](auto element) {
      using Element = decltype(element);
      for (int d = 0; d < job.dim_v; d += kLanes) {
        store(row + d, read_row<Element>(grad_o.row<Element>(i), d, job.dim_v));
      }
    });
  };
  float amax = 0.0f;
  for (int i = 0; i < grad_o.count; ++i) {
    read(i);
    finite[i] = true;
    for (int d = 0; d < job.dim_v; ++d) {
      amax = core::raise_amax(amax, row[d]);
      finite[i] = finite[i] && core::is_finite(row[d]);
    }
  }
  const core::BlockScale scale = core::block_scale(amax, limit);
  job.grad_scales[block.block] = scale.scale;
  std::uint8_t* codes = job.grad_codes + block.row() * width;
  for (int i = 0; i < core::kBlockedRows; ++i, codes += width) {
    __builtin_memset(codes, 0, static_cast<std::size_t>(width));
    if (i >= grad_o.count) {
      continue;
    }
    read(i);
    for (int d = 0; d < job.dim_v; ++d) {
      codes[d] = core::is_finite(row[d]) ? core::quantize(row[d], scale, limit) : 0;
    }
  }
}

// delta and LSE of the block's rows.
inline void write_row_terms(const Fp8BackwardJob& job, const GradBlock& block, const Rows& o,
                            const bool (&finite)[core::kBlockedRows]) {
  const int width = padded(job.dim_v);
  const int begin = block.rows.begin;
  const float* lse = head_values(job.lse, job.q.side, block.batch, block.head) + begin;
  const float* grad_lse =
      job.grad_lse.data == nullptr
          ? nullptr
          : head_values(job.grad_lse, job.q.side, block.batch, block.head) + begin;
  float grad[core::round_up(core::kMaxFp8Dim, kColumnPad)];
  for (int i = 0; i < core::kBlockedRows; ++i) {
    float* delta = job.row_delta + block.row() + i;
    float* lse2 = job.row_lse2 + block.row() + i;
    *delta = 0.0f;
    *lse2 = __builtin_huge_valf();
    if (i >= block.rows.size() || lse[i] == kHidden) {
      continue;
    }
    decode_codes(job.grad_codes + (block.row() + i) * width, width, grad);
    Floats sum{};
    with_element(job.dtype, [&](auto element) {
      using Element = decltype(element);
      for (int d = 0; d < job.dim_v; d += kLanes) {
        sum += read_row<Element>(o.row<Element>(i), d, job.dim_v) * load(grad + d);
      }
    });
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) {
      total += sum[lane];
    }
    total = total * job.grad_scales[block.block] - (grad_lse != nullptr ? grad_lse[i] : 0.0f);
    *delta = core::is_finite(total) ? total : __builtin_nanf("");
    const float shift = job.fp8.q_dot_mean == nullptr
                            ? 0.0f
                            : job.softmax_scale * job.fp8.q_dot_mean[block.row() + i];
    *lse2 = finite[i] ? (lse[i] - shift) * kLog2E : __builtin_nanf("");
  }
}

// Gives the first key tile its turn, and writes the dQ of rows that no key tile will visit.
inline void open_turns(const Fp8BackwardJob& job, const GradBlock& block,
                       const core::ShiftedMask& mask) {
  for (int begin = block.rows.begin; begin < block.rows.end; begin += kStepRows) {
    const Span rows{begin, core::min_of(begin + kStepRows, block.rows.end)};
    const core::TilePlan plan = core::plan_row_tile(mask, rows, job.item_keys);
    if (plan.visit.empty()) {
      clear_rows(job.dtype, job.grad_q, block.batch, block.head, rows, job.dim);
    } else {
      job.turns[tile_number(job, block.batch, block.head, begin / kStepRows)] = plan.visit.begin;
    }
  }
}

inline void prepare_fp8(const Fp8BackwardJob& job, int item) {
  const core::WorkTile work = job.row_order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * core::kBlockedRows;
  const int end = core::min_of(begin + core::kBlockedRows, q.room);
  const Span rows{begin, core::min_of(end, q.length)};
  clear_rows(job.dtype, job.grad_q, work.batch, work.head, Span{core::max_of(begin, q.length), end},
             job.dim);
  if (rows.empty()) {
    return;
  }
  const GradBlock block{
      work.batch, work.head, rows,
      work.head * job.blocks_q + core::first_block(job.q.side, work.batch) + work.tile};
  bool finite[core::kBlockedRows];
  quantize_gradients(
      job, block, rows_of(job.dtype, job.grad_o, work.batch, work.head, rows, job.dim_v), finite);
  write_row_terms(job, block, rows_of(job.dtype, job.o, work.batch, work.head, rows, job.dim_v),
                  finite);
  open_turns(job, block, mask_of(job, work.batch, q.length, k.length));
}

// ---- operands of a step -------------------------------------------------------------------------

// Stage 1.
inline void load_keys_fp8(const Fp8BackwardJob& job, std::int64_t block,
                          const Fp8BackwardScratch& scratch) {
  const int width = padded(job.dim);
  const auto* codes = static_cast<const std::uint8_t*>(job.k.data) + block * kStepKeys * width;
  decode_codes(codes, kStepKeys * width, scratch.keys_summed);
  for (int key = 0; key < kStepKeys; ++key) {
    for (int d = 0; d < job.dim; ++d) {
      scratch.keys[d * kStepKeys + key] = scratch.keys_summed[key * width + d];
    }
  }
  drop_nan(scratch.keys_summed, std::int64_t{kStepKeys} * width);
  const auto* values = static_cast<const std::uint8_t*>(job.v.data) + block * job.dim_v * kStepKeys;
  const float factor = core::value_row_factor(job.dim_v);
  float row[kStepKeys];
  for (int d = 0; d < job.dim_v; ++d) {
    decode_codes(values + d * kStepKeys, kStepKeys, row);
    for (int key = 0; key < kStepKeys; key += kLanes) {
      float* to = scratch.values + d * kStepKeys + key;
      for (int lane = 0; lane < kLanes; ++lane) {
        to[lane] = row[core::value_column(key + lane)];
      }
      store(to, round_signed_to_e4m3(load(to) * splat(factor)));
    }
  }
}

// Rows of Q and dO, zeros past the last one. `row`: the first, among the operands' rows.
inline void load_rows_fp8(const Fp8BackwardJob& job, std::int64_t row, int count,
                          const Fp8BackwardScratch& scratch) {
  const int width = padded(job.dim);
  const int width_v = padded(job.dim_v);
  const auto* codes = static_cast<const std::uint8_t*>(job.q.data) + row * width;
  fill(scratch.queries, (kStepRows + kRegisterRows) * width, 0.0f);
  fill(scratch.grads, (kStepRows + kRegisterRows) * width_v, 0.0f);
  decode_codes(codes, count * width, scratch.queries);
  decode_codes(job.grad_codes + row * width_v, count * width_v, scratch.grads);
  for (int i = 0; i < count * width; i += kLanes) {
    store(scratch.queries_summed + i, load(scratch.queries + i));
  }
  drop_nan(scratch.queries_summed, std::int64_t{count} * width);
}

// c[rows][kStepKeys] = a[rows][dim] b[dim][kStepKeys].
inline void multiply_codes(const float* a, int lda, const float* b, int rows, int steps, float* c) {
  Product p{};
  p.a = a;
  p.lda = lda;
  p.b = b;
  p.ldb = kStepKeys;
  p.c = c;
  p.ldc = kStepKeys;
  p.rows = rows;
  p.vectors = kStepKeys / kLanes;
  p.steps = steps;
  multiply<Start::zero, Walk::along_rows>(p);
}

// ---- steps --------------------------------------------------------------------------------------

// What belongs to 64 rows of a head and the tile of keys.
struct Fp8Step {
  Span rows;          // of the sequence
  std::int64_t row;   // the first, among the rows of the operands
  float factor;       // from S to log2 units
  float grad_factor;  // from dP to its number
  float scale_q, scale_k, scale_grad;
  float scale_p[kStepKeys / core::kFp8ScaledKeys];  // of kWeightUnits P
  float scale_ds;
};

// Step b. The largest P of each group of keys and the largest dS.
inline void weigh_fp8(const Fp8BackwardJob& job, const KeyBlock& block, Fp8Step* step,
                      const Fp8BackwardScratch& scratch) {
  constexpr int kGroups = kStepKeys / core::kFp8ScaledKeys;
  Floats top[kGroups] = {};
  Floats top_ds{};
  const Ints lanes = lane_numbers();
  for (int i = 0; i < step->rows.size(); ++i) {
    Span seen = core::visible_keys(block.mask, step->rows.begin + i);
    seen.end = core::min_of(seen.end, block.keys.end);
    const Floats lse2 = splat(job.row_lse2[step->row + i]);
    const Floats delta = splat(job.row_delta[step->row + i]);
    for (int lane = 0; lane < kStepKeys; lane += kLanes) {
      float* at = scratch.scores + i * kStepKeys + lane;
      float* at_ds = scratch.grad_scores + i * kStepKeys + lane;
      const int key = block.keys.begin + lane;
      const Ints visible = (lanes >= seen.begin - key) & (lanes < seen.end - key);
      const Floats x = round_to_f16(load(at)) * splat(step->factor) - lse2;
      Floats p = exp(x * splat(kLn2));
      Floats ds = p * (round_to_f16(load(at_ds)) * splat(step->grad_factor) - delta);
      p = select(visible, p, Floats{});
      ds = select(visible, ds, Floats{});
      p = round_to_f16(p * splat(core::kWeightUnits));
      ds = round_to_bf16(ds);
      store(at, p);
      store(at_ds, ds);
      Floats& most = top[lane / core::kFp8ScaledKeys];
      most = raise_amax(most, p);
      top_ds = raise_amax(top_ds, ds);
    }
  }
  const auto largest = [](Floats x) {
    float most = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) {
      most = core::max_of(most, x[lane]);
    }
    return most;
  };
  for (int g = 0; g < kGroups; ++g) {
    step->scale_p[g] = core::weight_scale(largest(top[g])).scale;
  }
  step->scale_ds = core::score_gradient_scale(largest(top_ds)).scale;
}

// Step c.
inline void round_fp8(const Fp8Step& step, const Fp8BackwardScratch& scratch) {
  for (int i = 0; i < step.rows.size(); ++i) {
    for (int lane = 0; lane < kStepKeys; lane += kLanes) {
      float* at = scratch.scores + i * kStepKeys + lane;
      float* at_ds = scratch.grad_scores + i * kStepKeys + lane;
      const float scale_p = step.scale_p[lane / core::kFp8ScaledKeys];
      store(at, round_signed_to_e4m3(load(at) * splat(1.0f / scale_p)));
      store(at_ds, round_signed_to_e4m3(load(at_ds) * splat(1.0f / step.scale_ds)));
    }
  }
}

// Step d of dV and dK: sums[keys][dim] += weights[rows][keys]^T rows[rows][dim], times
// `factor(key)`.
template <class Factor>
inline void add_to_keys_fp8(const float* weights, const float* rows, int count, int dim,
                            float* part, float* sums, Factor factor) {
  const int width = padded(dim);
  Product p{};
  p.a = weights;
  p.lda = kStepKeys;
  p.b = rows;
  p.ldb = width;
  p.c = part;
  p.ldc = width;
  p.rows = kStepKeys;
  p.vectors = width / kLanes;
  p.steps = count;
  multiply<Start::zero, Walk::along_columns>(p);
  for (int key = 0; key < kStepKeys; ++key) {
    const Floats by = splat(factor(key));
    for (int d = 0; d < width; d += kLanes) {
      const int at = key * width + d;
      store(sums + at, load(part + at) * by + load(sums + at));
    }
  }
}

// Step d of dQ.
inline void add_to_rows_fp8(const Fp8BackwardJob& job, const Fp8Step& step, bool empty,
                            const Fp8BackwardScratch& scratch, float* sums) {
  const int width = padded(job.dim);
  Product p{};
  p.a = scratch.grad_scores;
  p.lda = kStepKeys;
  p.b = scratch.keys_summed;
  p.ldb = width;
  p.c = scratch.part;
  p.ldc = width;
  p.rows = step.rows.size();
  p.vectors = width / kLanes;
  p.steps = kStepKeys;
  multiply<Start::zero, Walk::along_rows>(p);
  const Floats factor = splat(step.scale_ds * step.scale_k);
  for (int at = 0; at < step.rows.size() * width; at += kLanes) {
    const Floats part = load(scratch.part + at) * factor;
    store(sums + at, empty ? part : load(sums + at) + part);
  }
}

// Stage 2 for 64 rows of one query head.
inline void add_step_fp8(const Fp8BackwardJob& job, const KeyBlock& block, const QueryTile& tile,
                         std::int64_t key_block, const Fp8BackwardScratch& scratch) {
  const std::int64_t first = core::first_block(job.q.side, block.batch) * core::kBlockedRows;
  Fp8Step step{};
  step.rows = tile.rows;
  step.row = tile.head * job.blocks_q * core::kBlockedRows + first + tile.rows.begin;
  step.scale_q = job.fp8.scale_q[step.row / core::kBlockedRows];
  step.scale_k = job.fp8.scale_kv[2 * key_block];
  step.scale_grad = job.grad_scales[step.row / core::kBlockedRows];
  step.factor = step.scale_q * step.scale_k * job.softmax_scale * kLog2E;
  step.grad_factor = step.scale_grad * __builtin_fabsf(job.fp8.scale_kv[2 * key_block + 1]) /
                     core::value_row_factor(job.dim_v);
  const int count = tile.rows.size();
  const int width = padded(job.dim);
  const int width_v = padded(job.dim_v);
  load_rows_fp8(job, step.row, count, scratch);
  multiply_codes(scratch.queries, width, scratch.keys, count, job.dim, scratch.scores);
  multiply_codes(scratch.grads, width_v, scratch.values, count, job.dim_v, scratch.grad_scores);
  weigh_fp8(job, block, &step, scratch);
  round_fp8(step, scratch);
  add_to_keys_fp8(scratch.scores, scratch.grads, count, job.dim_v, scratch.part,
                  scratch.grad_values, [&](int key) {
                    return step.scale_p[key / core::kFp8ScaledKeys] * step.scale_grad /
                           core::kWeightUnits;
                  });
  add_to_keys_fp8(scratch.grad_scores, scratch.queries_summed, count, job.dim, scratch.part,
                  scratch.grad_keys, [&](int) { return step.scale_ds * step.scale_q; });
  RowSums row_sums(job, block, tile, scratch.grad_queries);
  float* sums = row_sums.take();
  add_to_rows_fp8(job, step, row_sums.is_empty(), scratch, sums);
  row_sums.release();
}

inline void backward_fp8(const Fp8BackwardJob& job, int item, void* memory) {
  const core::WorkTile work = job.key_order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * kStepKeys;
  const int end = core::min_of(begin + kStepKeys, k.room);
  const KeyBlock block{work.batch, work.head, work.tile,
                       mask_of(job, work.batch, q.length, k.length),
                       Span{begin, core::min_of(end, k.length)}};
  if (!block.keys.empty()) {
    const Fp8BackwardScratch scratch = fp8_backward_scratch(job, memory);
    const std::int64_t key_block =
        work.head * job.blocks_k + core::first_block(job.k.side, work.batch) + work.tile;
    fill(scratch.grad_keys, kStepKeys * padded(job.dim), 0.0f);
    fill(scratch.grad_values, kStepKeys * padded(job.dim_v), 0.0f);
    load_keys_fp8(job, key_block, scratch);
    const core::TilePlan plan = core::plan_key_tile(block.mask, block.keys, kStepRows);
    const int first_head = job.heads.first_query_head(work.head);
    for (int head = first_head; head < first_head + job.heads.group(); ++head) {
      for (int t = plan.visit.begin; t < plan.visit.end; ++t) {
        const Span rows{t * kStepRows, core::min_of((t + 1) * kStepRows, block.mask.rows)};
        add_step_fp8(job, block, QueryTile{head, t, rows}, key_block, scratch);
      }
    }
    write_keys(job, block, job.grad_k, scratch.grad_keys, job.dim, job.scale_k);
    write_keys(job, block, job.grad_v, scratch.grad_values, job.dim_v, 1.0f);
  }
  const Span unused{core::max_of(begin, k.length), end};
  clear_rows(job.dtype, job.grad_k, work.batch, work.head, unused, job.dim);
  clear_rows(job.dtype, job.grad_v, work.batch, work.head, unused, job.dim_v);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
