// FP8 attention forward as the Hopper kernel does it, for a block of query rows of one head; the
// algebra is in docs/design/fp8.md. Rows of the sequence lie along the vector lanes.
//
// 1. Codes of Q become floats once, as the B operand Q^T.
// 2. For every scale block of keys that a row sees, last block first:
//    a. S^T = K Q^T of codes, rounded to fp16 like the accumulators of the GPU;
//    b. the mask;
//    c. P^T: e4m3 codes of 2^(S * scales + c), where c follows each row's maximum so that P fills
//       the range of e4m3;
//    d. (P V)^T of codes from zero, then O = O * factor + that: the second level of accumulation.
// 3. O is normalised by the sum of the rounded P and written with LSE.
#pragma once

#include "core/blocked.h"
#include "cpu/isa/forward.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// c is 8 - max in log2 units, so that P goes up to 2^8, with room to 448 for maxima that grow.
constexpr float kTopExponent = 8.0f;
constexpr float kFirstShift = 7168.0f;  // c of a row without a key: 8 c is finite in fp16
constexpr float kLastExponent = 8.75f;  // log2 of P at most, where scores leave fp16: below 448
constexpr float kSlack = 0.5f;          // growth of a maximum that is let pass
constexpr int kVotingRows = 16;         // rows whose c changes together: those of a GPU warp
// Steps of the code map a log2 unit, and the code of 1 less what centres the map's error.
constexpr float kCodeSteps = 8.0f;
constexpr float kCodeOfOne = 55.53125f;
constexpr float kSmallestFactor = 5.9604645e-8f;  // 2^-24, the smallest fp16 number
constexpr float kLargestFactor = 4096.0f;         // 8 times that is finite in fp16
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- number formats ----------------------------------------------------------------------------

// Nearest fp16 number, ties to even; infinity from 65520 on.
PANTILE_INLINE Floats round_to_f16(Floats x) {
  const Words sign = bits(x) & 0x80000000u;
  const Words magnitude = bits(x) & 0x7fffffffu;
  const Floats normal = from_bits((magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fffu);
  const Floats subnormal = (from_bits(magnitude) + splat(0.5f)) - splat(0.5f);
  Floats y = select(magnitude < (113u << 23), subnormal, normal);
  y = select(magnitude >= 0x477ff000u, from_bits(Words{} + 0x7f800000u), y);
  y = select(magnitude > 0x7f800000u, from_bits(magnitude), y);
  return from_bits(bits(y) | sign);
}

// The smaller of the two; NaN stays.
PANTILE_INLINE Floats at_most(Floats x, float limit) {
  return select(x > splat(limit), splat(limit), x);
}

// Nearest e4m3 number of 0 <= x <= 448, ties to even; NaN stays.
PANTILE_INLINE Floats round_to_e4m3(Floats x) {
  const Words word = bits(x);
  const Floats normal = from_bits((word + 0x7ffff + ((word >> 20) & 1)) & ~0xfffffu);
  const Floats subnormal = (x + splat(16384.0f)) - splat(16384.0f);
  return select(x < splat(0.015625f), subnormal, select(x == x, normal, x));
}

// The number of a code without sign, given as a whole float; NaN stays.
PANTILE_INLINE Floats number_of_code(Floats code) {
  const Words word = reinterpret_cast<Words>(__builtin_convertvector(code, Ints));
  const Floats normal = from_bits((word + ((127u - 7u) << 3)) << 20);
  const Floats subnormal = code * splat(0.001953125f);  // 2^-9
  return select(code < splat(8.0f), subnormal, select(code == code, normal, code));
}

// `count` codes, a multiple of kLanes.
inline void decode_codes(const std::uint8_t* codes, int count, float* out) {
  for (int i = 0; i < count; i += kLanes) {
    Words word{};
    PANTILE_UNROLL for (int lane = 0; lane < kLanes; ++lane) {
      word[lane] = codes[i + lane];
    }
    const Words magnitude = word & 0x7f;
    const Floats normal = from_bits((magnitude + ((127u - 7u) << 3)) << 20);
    const Floats subnormal =
        __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Floats) * splat(0.001953125f);
    Floats x = select(magnitude < 8, subnormal, normal);
    x = select(magnitude == 0x7f, splat(__builtin_nanf("")), x);
    store(out + i, from_bits(bits(x) | (word & 0x80) << 24));
  }
}

// ---- rows ---------------------------------------------------------------------------------------

// A block of rows of one head with the state of its softmax.
struct Fp8Block {
  int batch, head;
  core::ShiftedMask mask;
  Span rows;                              // of the sequence
  std::int64_t first_row_q, first_row_k;  // of the sequence, among the rows of a head
  int vectors;                            // of rows
  float scale_q[kFp8Rows];                // times the softmax scale, in log2 units
  float factor[kFp8Rows];                 // from a score to log2 units, fp16
  float shift[kFp8Rows];                  // c
  float sum[kFp8Rows];                    // of P
  float shrink[kFp8Rows];                 // 2^(c - old c)
  float scale_v;                          // that O is in units of
};

PANTILE_INLINE const std::uint8_t* code_address(const Operand& operand, std::int64_t at) {
  return static_cast<const std::uint8_t*>(operand.data) + at;
}

// Stage 1.
inline void load_queries(const Fp8ForwardJob& job, const Fp8Scratch& scratch, Fp8Block* block) {
  const int width = padded(job.dim);
  const std::int64_t head_rows = job.blocks_q * core::kBlockedRows;
  const std::int64_t first = block->head * head_rows + block->first_row_q + block->rows.begin;
  float row[core::round_up(core::kMaxFp8Dim, kColumnPad)];
  fill(scratch.queries, width * kFp8Rows, 0.0f);
  for (int i = 0; i < block->rows.size(); ++i) {
    decode_codes(code_address(job.q, (first + i) * width), width, row);
    for (int d = 0; d < width; ++d) {
      scratch.queries[d * kFp8Rows + i] = row[d];
    }
    block->scale_q[i] = job.tensors.scale_q[(first + i) / job.format.block_q] * job.scale * kLog2E;
  }
  for (int i = block->rows.size(); i < kFp8Rows; ++i) {
    block->scale_q[i] = 0.0f;
  }
  for (int i = 0; i < kFp8Rows; ++i) {
    block->shift[i] = kFirstShift;
    block->sum[i] = 0.0f;
  }
}

// ---- keys ---------------------------------------------------------------------------------------

// A scale block of keys.
struct Fp8Keys {
  Span keys;         // of the sequence; those past its end are hidden
  std::int64_t row;  // of the first, among the rows of all heads
  float scale_k;
  float scale_v;  // stored; 0 for a block of zeros
  bool full;      // no pair is hidden
};

PANTILE_INLINE Fp8Keys locate_keys(const Fp8ForwardJob& job, const Fp8Block& block,
                                   const core::TilePlan& plan, int tile) {
  const int block_k = job.format.block_k;
  Fp8Keys keys;
  keys.keys = Span{tile * block_k, (tile + 1) * block_k};
  keys.row = job.heads.key_head(block.head) * job.blocks_k * core::kBlockedRows +
             block.first_row_k + keys.keys.begin;
  const float* scales = job.tensors.scale_kv + keys.row / block_k * 2;
  keys.scale_k = scales[0];
  keys.scale_v = __builtin_fabsf(scales[1]);
  keys.full = tile >= plan.full.begin && tile < plan.full.end;
  return keys;
}

// Steps a and b.
inline void score_fp8(const Fp8ForwardJob& job, const Fp8Block& block, const Fp8Keys& keys,
                      const Fp8Scratch& scratch) {
  const int width = padded(job.dim);
  const int count = keys.keys.size();
  decode_codes(code_address(job.k, keys.row * width), count * width, scratch.keys);
  Product p{};
  p.a = scratch.keys;
  p.lda = width;
  p.b = scratch.queries;
  p.ldb = kFp8Rows;
  p.c = scratch.scores;
  p.ldc = kFp8Rows;
  p.rows = count;
  p.vectors = block.vectors;
  p.steps = job.dim;
  multiply<Start::zero, Walk::along_rows>(p);
  const Ints lanes = lane_numbers();
  for (int k = 0; k < count; ++k) {
    const int key = keys.keys.begin + k;
    Span seen = core::visible_rows(block.mask, key);
    if (key >= block.mask.keys) {
      seen = Span{0, 0};
    }
    for (int v = 0; v < block.vectors; ++v) {
      float* s = scratch.scores + k * kFp8Rows + v * kLanes;
      Floats x = round_to_f16(load(s));
      if (!keys.full) {
        const int row = block.rows.begin + v * kLanes;
        x = select((lanes >= seen.begin - row) & (lanes < seen.end - row), x, splat(kHidden));
      }
      store(s, x);
    }
  }
}

// The c that each row's maximum asks for, and the factors of this block.
inline void propose_shifts(const Fp8ForwardJob& job, const Fp8Keys& keys, const float* scores,
                           Fp8Block* block, float* proposed) {
  for (int v = 0; v < block->vectors; ++v) {
    const int lane = v * kLanes;
    Floats top = splat(kHidden);
    for (int k = 0; k < keys.keys.size(); ++k) {
      top = max_or_second(load(scores + k * kFp8Rows + lane), top);
    }
    Floats factor = load(block->scale_q + lane) * splat(keys.scale_k);
    factor = select(factor > splat(kSmallestFactor), factor, splat(kSmallestFactor));
    factor = round_to_f16(select(factor < splat(kLargestFactor), factor, splat(kLargestFactor)));
    Floats c = round_to_f16(splat(kTopExponent) - top * factor);
    if (job.format.exp != Fp8Exp::exp2) {
      c = round_to_f16(c + splat(192.0f)) - splat(192.0f);  // multiples of 1/8 near zero
    }
    c = select(c > splat(-kFirstShift), c, splat(-kFirstShift));
    store(block->factor + lane, factor);
    const Floats old = load(block->shift + lane);
    store(proposed + lane, select(c < old, c, old));
  }
}

// Takes the proposed shifts of those groups of rows in which one matters.
inline void move_shifts(const float* proposed, bool first, Fp8Block* block) {
  for (int begin = 0; begin < kFp8Rows; begin += kVotingRows) {
    bool matters = first;
    for (int i = begin; i < begin + kVotingRows; ++i) {
      matters = matters || block->shift[i] - proposed[i] > kSlack;
    }
    for (int i = begin; i < begin + kVotingRows; ++i) {
      const float shift = matters ? proposed[i] : block->shift[i];
      block->shrink[i] = __builtin_exp2f(shift - block->shift[i]);
      block->shift[i] = shift;
    }
  }
}

// Step c for kLanes rows: writes P^T and adds to the sums.
template <Fp8Exp kExp>
inline void weigh(const Fp8Keys& keys, int lane, const Fp8Scratch& scratch, Fp8Block* block) {
  const Floats factor = load(block->factor + lane);
  const Floats c = load(block->shift + lane);
  const Floats steps = round_to_f16(factor * splat(kCodeSteps));
  const Floats offset = round_to_f16(c * splat(kCodeSteps) + splat(kCodeOfOne));
  const Ints odd_rows = ((lane_numbers() + (block->rows.begin + lane)) & 8) != 0;
  Floats sum{};
  for (int k = 0; k < keys.keys.size(); ++k) {
    const Floats s = load(scratch.scores + k * kFp8Rows + lane);
    Floats by_code{};
    Floats by_exp2{};
    if (kExp != Fp8Exp::exp2) {
      const Floats y =
          at_most(round_to_f16(s * steps + offset), kCodeSteps * kLastExponent + 56.0f);
      const Floats whole = round_to_f16(select(y < Floats{}, Floats{}, y) + splat(1024.0f));
      by_code = number_of_code(whole - splat(1024.0f));
    }
    if (kExp != Fp8Exp::code) {
      const Floats x = at_most(round_to_f16(s * factor + c), kLastExponent);
      by_exp2 = round_to_e4m3(round_to_f16(exp(x * splat(kLn2))));
    }
    Floats p = kExp == Fp8Exp::code ? by_code : by_exp2;
    if (kExp == Fp8Exp::mixed) {
      const Ints odd_key = Ints{} - ((keys.keys.begin + k) >> 4 & 1);
      p = select(odd_rows ^ odd_key, by_code, by_exp2);
    }
    store(scratch.weights + core::value_column(k) * kFp8Rows + lane, p);
    sum += p;
  }
  store(block->sum + lane, load(block->sum + lane) * load(block->shrink + lane) + sum);
}

inline void weigh_rows(const Fp8ForwardJob& job, const Fp8Keys& keys, const Fp8Scratch& scratch,
                       Fp8Block* block) {
  for (int v = 0; v < block->vectors; ++v) {
    switch (job.format.exp) {
      case Fp8Exp::code: weigh<Fp8Exp::code>(keys, v * kLanes, scratch, block); break;
      case Fp8Exp::mixed: weigh<Fp8Exp::mixed>(keys, v * kLanes, scratch, block); break;
      case Fp8Exp::exp2: weigh<Fp8Exp::exp2>(keys, v * kLanes, scratch, block); break;
    }
  }
}

// Step d. O changes to the units of this block's V.
inline void add_values_fp8(const Fp8ForwardJob& job, const Fp8Keys& keys, const Fp8Scratch& scratch,
                           Fp8Block* block) {
  const int count = keys.keys.size();
  const std::int64_t tile = keys.row / core::kBlockedRows;
  const int column = static_cast<int>(keys.row % core::kBlockedRows);
  for (int d = 0; d < job.dim_v; ++d) {
    decode_codes(code_address(job.v, (tile * job.dim_v + d) * core::kBlockedRows + column), count,
                 scratch.values + d * count);
  }
  Product p{};
  p.a = scratch.values;
  p.lda = count;
  p.b = scratch.weights;
  p.ldb = kFp8Rows;
  p.c = scratch.part;
  p.ldc = kFp8Rows;
  p.rows = job.dim_v;
  p.vectors = block->vectors;
  p.steps = count;
  multiply<Start::zero, Walk::along_rows>(p);
  const core::BlockScale from{block->scale_v, 1.0f / block->scale_v};
  const float unit = core::value_unit(keys.scale_v, block->scale_v);
  const core::BlockScale to{unit, 1.0f / unit};
  const Floats ratio = splat(core::scale_ratio(from, to));
  for (int v = 0; v < block->vectors; ++v) {
    const Floats shrink = load(block->shrink + v * kLanes) * ratio;
    for (int d = 0; d < job.dim_v; ++d) {
      const int at = d * kFp8Rows + v * kLanes;
      store(scratch.outputs + at, load(scratch.outputs + at) * shrink + load(scratch.part + at));
    }
  }
  block->scale_v = unit;
}

// Stage 2.
inline void stream_keys_fp8(const Fp8ForwardJob& job, const Fp8Scratch& scratch, Fp8Block* block) {
  const core::TilePlan plan = core::plan_row_tile(block->mask, block->rows, job.format.block_k);
  for (int tile = plan.visit.end - 1; tile >= plan.visit.begin; --tile) {
    const bool first = tile == plan.visit.end - 1;
    const Fp8Keys keys = locate_keys(job, *block, plan, tile);
    float proposed[kFp8Rows];
    fill(proposed, kFp8Rows, kFirstShift);
    if (first) {
      block->scale_v = core::value_unit(keys.scale_v, core::kSmallestScale);
    }
    score_fp8(job, *block, keys, scratch);
    propose_shifts(job, keys, scratch.scores, block, proposed);
    move_shifts(proposed, first, block);
    weigh_rows(job, keys, scratch, block);
    add_values_fp8(job, keys, scratch, block);
  }
}

// ---- output -------------------------------------------------------------------------------------

// Whether the row sees a key whose value in this channel is not finite. `words`: the channel's bits
// of the block of 128 keys that starts at `first_key`.
PANTILE_INLINE bool sees_nonfinite(const core::ShiftedMask& mask, int row, int first_key,
                                   const std::uint32_t* words) {
  const Span seen = core::visible_keys(mask, row);
  const int end = core::min_of(seen.end - first_key, core::kBlockedRows);
  for (int k = core::max_of(seen.begin - first_key, 0); k < end; ++k) {
    if (words[k / 32] >> (k % 32) & 1u) {
      return true;
    }
  }
  return false;
}

// NaN where a row attends to NaN or Inf in V, which have the code 0.
inline void restore_nonfinite(const Fp8ForwardJob& job, const Fp8Block& block, float* outputs) {
  const std::int64_t first =
      job.heads.key_head(block.head) * job.blocks_k + block.first_row_k / core::kBlockedRows;
  for (int begin = 0; begin < block.mask.keys; begin += core::kBlockedRows) {
    const std::int64_t tile = first + begin / core::kBlockedRows;
    const float* scales = job.tensors.scale_kv + tile * core::kBlockedRows / job.format.block_k * 2;
    if (!__builtin_signbit(scales[1])) {
      continue;
    }
    const std::uint32_t* words =
        job.tensors.nonfinite_v + tile * job.dim_v * (core::kBlockedRows / 32);
    for (int d = 0; d < job.dim_v; ++d, words += core::kBlockedRows / 32) {
      for (int i = 0; i < block.rows.size(); ++i) {
        if (sees_nonfinite(block.mask, block.rows.begin + i, begin, words)) {
          outputs[d * kFp8Rows + i] = __builtin_nanf("");
        }
      }
    }
  }
}

// Stage 3.
inline void write_fp8(const Fp8ForwardJob& job, const Fp8Scratch& scratch, const Fp8Block& block) {
  restore_nonfinite(job, block, scratch.outputs);
  with_element(job.dtype, [&](auto element) {
    using Element = decltype(element);
    typename Element::Raw* o = head_address<Element>(job.o, block.batch, block.head);
    for (int i = 0; i < block.rows.size(); ++i) {
      const float sum = block.sum[i];
      const float factor = sum == 0.0f ? 0.0f : block.scale_v / sum;
      float row[core::round_up(core::kMaxFp8Dim, kColumnPad)];
      for (int d = 0; d < job.dim_v; ++d) {
        row[d] = scratch.outputs[d * kFp8Rows + i] * factor;
      }
      typename Element::Raw* to = o + (block.rows.begin + i) * job.o.side.seq_stride;
      for (int d = 0; d < job.dim_v; d += kLanes) {
        write_row<Element>(to, d, job.dim_v, load(row + d));
      }
    }
  });
  if (job.lse.data == nullptr) {
    return;
  }
  float* lse = head_values(job.lse, job.q.side, block.batch, block.head) + block.rows.begin;
  const float* dots = job.format.smooth_k ? job.tensors.q_dot_mean +
                                                block.head * job.blocks_q * core::kBlockedRows +
                                                block.first_row_q + block.rows.begin
                                          : nullptr;
  for (int i = 0; i < block.rows.size(); ++i) {
    const float sum = block.sum[i];
    lse[i] = sum == 0.0f ? kHidden
                         : __builtin_logf(sum) - block.shift[i] * kLn2 +
                               (dots != nullptr ? job.scale * dots[i] : 0.0f);
  }
}

inline void forward_fp8(const Fp8ForwardJob& job, int item, void* memory) {
  const core::WorkTile work = job.order.tile(item);
  const Extent q = extent_of(job.q.side, work.batch);
  const Extent k = extent_of(job.k.side, work.batch);
  const int begin = work.tile * kFp8Rows;
  const int end = core::min_of(begin + kFp8Rows, q.room);
  const Span rows{begin, core::min_of(end, q.length)};
  if (!rows.empty()) {
    const Fp8Scratch scratch = fp8_scratch(job, memory);
    Fp8Block block;
    block.batch = work.batch;
    block.head = work.head;
    block.mask = mask_of(job, work.batch, q.length, k.length);
    block.rows = rows;
    block.first_row_q = core::first_block(job.q.side, work.batch) * core::kBlockedRows;
    block.first_row_k = core::first_block(job.k.side, work.batch) * core::kBlockedRows;
    block.vectors = core::ceil_div(rows.size(), kLanes);
    block.scale_v = 1.0f;
    fill(scratch.outputs, job.dim_v * kFp8Rows, 0.0f);
    fill(scratch.keys + job.format.block_k * padded(job.dim), kRegisterRows * padded(job.dim),
         0.0f);
    fill(scratch.values + job.dim_v * job.format.block_k, kRegisterRows * job.format.block_k, 0.0f);
    load_queries(job, scratch, &block);
    if (!keys_seen(block.mask, rows).empty()) {
      stream_keys_fp8(job, scratch, &block);
    }
    write_fp8(job, scratch, block);
  }
  write_unused(job, work.batch, work.head, Span{core::max_of(begin, q.length), end});
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
