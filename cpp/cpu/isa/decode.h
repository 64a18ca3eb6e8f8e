// Attention over a cache: one item is a chunk of the parts of keys of a (sequence, key head, tile
// of packed rows), see cpu/kv_job.h.
//
//   for each part of the chunk, ascending
//     for each step of kDecodeKeys keys that a row sees: keys and values as floats, then row by row
//       1. scores of the visible keys   2. new maximum, weights   3. O = O * correction + weights V
//     fold the part into the state of the parts before it, or store it
//
// A row's arithmetic does not depend on the rows beside it, and steps begin at multiples of
// kDecodeKeys slots: the bits of a query depend on the keys it sees and on where parts begin.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/softmax_state.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/simd.h"
#include "cpu/kv_job.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

#define PANTILE_NOINLINE __attribute__((noinline))

// ---- the state of a packed row: the maximum, the sum of weights, O times that sum

PANTILE_INLINE float& state_max(float* state) {
  return state[0];
}
PANTILE_INLINE float& state_sum(float* state) {
  return state[1];
}
PANTILE_INLINE float* state_output(float* state) {
  return state + kColumnPad;
}

PANTILE_INLINE void clear_states(const DecodeJob& job, float* states) {
  for (int row = 0; row < kDecodeRows; ++row) {
    float* const state = states + row * job.state_floats;
    fill(state, job.state_floats, 0.0f);
    state_max(state) = -core::kInfinity;
  }
}

PANTILE_INLINE float scalar_exp(float x) {
  return exp(splat(x))[0];
}

// Folds a part into the parts before it. Out of line, so that there is one way to round.
PANTILE_NOINLINE void fold(float* into, float* part, int floats) {
  if (state_max(part) == -core::kInfinity && state_sum(part) == 0.0f) {
    return;  // no key
  }
  const float most = state_max(part) > state_max(into) ? state_max(part) : state_max(into);
  const float shift = core::softmax_shift(most);
  const float keep = scalar_exp(state_max(into) - shift);
  const float add = scalar_exp(state_max(part) - shift);
  state_sum(into) = state_sum(into) * keep + state_sum(part) * add;
  state_max(into) = most;
  for (int i = kColumnPad; i < floats; i += kLanes) {
    store(into + i, load(into + i) * splat(keep) + load(part + i) * splat(add));
  }
}

// ---- keys and values as floats

template <class Element>
PANTILE_INLINE void widen_row(const void* from, std::int64_t at, int dim, float* to) {
  const auto* const row = static_cast<const typename Element::Raw*>(from) + at;
  for (int i = 0; i < dim; i += kLanes) {
    store(to + i, read_row<Element>(row, i, dim));
  }
}

PANTILE_INLINE void read_cache_row(const DecodeJob& job, const void* from, std::int64_t at, int dim,
                                   float* to) {
  const auto* const codes = static_cast<const std::uint8_t*>(from) + at;
  const int wide = padded(dim);
  switch (job.problem->format) {
    case CacheFormat::plain:
      with_element(job.problem->dtype,
                   [&](auto element) { widen_row<decltype(element)>(from, at, dim, to); });
      for (int i = core::round_up(dim, kLanes); i < wide; ++i) {
        to[i] = 0.0f;
      }
      return;
    case CacheFormat::e4m3:
      for (int i = 0; i < dim; ++i) {
        to[i] = job.decoded_e4m3[codes[i]];
      }
      break;
    case CacheFormat::int8:
      for (int i = 0; i < dim; ++i) {
        to[i] = static_cast<float>(static_cast<std::int8_t>(codes[i]));
      }
      break;
  }
  for (int i = dim; i < wide; ++i) {
    to[i] = 0.0f;
  }
}

PANTILE_INLINE float scale_of(const DecodeJob& job, const float* scales, const ScaleLayout& layout,
                              int batch, int head, std::int64_t block, std::int64_t slot) {
  switch (job.problem->scale_kind) {
    case CacheScale::none: return 1.0f;
    case CacheScale::head: return scales[batch * layout.block + head * layout.head];
    case CacheScale::token:
      return scales[block * layout.block + slot * layout.slot + head * layout.head];
  }
  return 1.0f;
}

// Slots [range.begin, range.end) of the step that begins at slot `first`.
PANTILE_NOINLINE void load_step(const DecodeJob& job, const core::KvSequence& sequence, int batch,
                                int head, int first, core::KeyRange range,
                                const DecodeScratch& scratch) {
  const KvProblem& p = *job.problem;
  const auto dim = static_cast<int>(p.head_dim);
  const auto dim_v = static_cast<int>(p.head_dim_v);
  for (int key = range.begin; key < range.end; ++key) {
    std::int64_t block = sequence.cache_row;
    std::int64_t slot = key;
    if (p.page_size > 0) {
      block = job.tensors.block_table[sequence.cache_row * p.table_stride + key / p.page_size];
      slot = key % p.page_size;
    }
    const int at = key - first;
    read_cache_row(job, job.tensors.k, block * p.k.block + slot * p.k.slot + head * p.k.head, dim,
                   scratch.keys + at * padded(dim));
    scratch.scale_k[at] = scale_of(job, job.tensors.scale_k, p.scale_k, batch, head, block, slot);
    if (p.v_in_k) {
      scratch.scale_v[at] = scratch.scale_k[at];
    } else {
      read_cache_row(job, job.tensors.v, block * p.v.block + slot * p.v.slot + head * p.v.head,
                     dim_v, scratch.values + at * padded(dim_v));
      scratch.scale_v[at] = scale_of(job, job.tensors.scale_v, p.scale_v, batch, head, block, slot);
    }
  }
}

// ---- one row of a step

// Four lanes at a time: half the time of a tree of scalars.
typedef float Quad __attribute__((vector_size(16)));
typedef float QuadInMemory __attribute__((vector_size(16), aligned(4), may_alias));

PANTILE_INLINE float lane_sum(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  Quad sum = *reinterpret_cast<const QuadInMemory*>(lanes);
  for (int i = 4; i < kLanes; i += 4) {
    sum += *reinterpret_cast<const QuadInMemory*>(lanes + i);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

PANTILE_INLINE float dot(const float* query, const float* key, int wide) {
  Floats even{};
  Floats odd{};
  for (int i = 0; i + kLanes < wide; i += 2 * kLanes) {
    even += load(query + i) * load(key + i);
    odd += load(query + i + kLanes) * load(key + i + kLanes);
  }
  if (wide / kLanes % 2 != 0) {
    even += load(query + wide - kLanes) * load(key + wide - kLanes);
  }
  return lane_sum(even + odd);
}

// acc[] += weights[j] * V[j] over the visible keys, kVectors vectors from `values` on.
template <int kVectors>
PANTILE_INLINE void add_values(const std::uint8_t* visible, int count, const float* weights,
                               const float* values, int stride, float correction, float* output) {
  Floats acc[kVectors];
  PANTILE_UNROLL for (int v = 0; v < kVectors; ++v) {
    acc[v] = load(output + v * kLanes) * splat(correction);
  }
  for (int i = 0; i < count; ++i) {
    const Floats weight = splat(weights[visible[i]]);
    const float* const row = values + visible[i] * stride;
    PANTILE_UNROLL for (int v = 0; v < kVectors; ++v) {
      acc[v] += weight * load(row + v * kLanes);
    }
  }
  PANTILE_UNROLL for (int v = 0; v < kVectors; ++v) {
    store(output + v * kLanes, acc[v]);
  }
}

// `visible`: the numbers, within the step, of the keys that the row sees, ascending; count > 0.
PANTILE_NOINLINE void row_step(const DecodeJob& job, const DecodeScratch& scratch,
                               const float* query, const std::uint8_t* visible, int count,
                               float* state) {
  const KvProblem& p = *job.problem;
  const int wide = padded(static_cast<int>(p.head_dim));
  const int wide_v = padded(static_cast<int>(p.head_dim_v));
  const int stride_v = p.v_in_k ? wide : wide_v;
  const float* const values = p.v_in_k ? scratch.keys : scratch.values;
  float* const weights = scratch.weights;
  fill(weights, kDecodeKeys, -core::kInfinity);
  float most = state_max(state);
  for (int i = 0; i < count; ++i) {
    const int j = visible[i];
    float score = dot(query, scratch.keys + j * wide, wide) * scratch.scale_k[j];
    if (p.softcap > 0.0f) {
      score = p.softcap * std::tanh(score / p.softcap);
    }
    weights[j] = score;
    most = score > most ? score : most;
  }
  const float shift = core::softmax_shift(most);
  const float correction = scalar_exp(state_max(state) - shift);
  Floats sum{};
  for (int j = 0; j < kDecodeKeys; j += kLanes) {
    const Floats weight = exp(load(weights + j) - splat(shift));
    store(weights + j, weight);
    sum += weight;
  }
  state_max(state) = most;
  state_sum(state) = state_sum(state) * correction + lane_sum(sum);
  for (int i = 0; i < count; ++i) {
    weights[visible[i]] *= scratch.scale_v[visible[i]];
  }
  float* const output = state_output(state);
  int column = 0;
  for (; column + 4 * kLanes <= wide_v; column += 4 * kLanes) {
    add_values<4>(visible, count, weights, values + column, stride_v, correction, output + column);
  }
  for (; column < wide_v; column += kLanes) {
    add_values<1>(visible, count, weights, values + column, stride_v, correction, output + column);
  }
}

// ---- an item

struct DecodeTile {
  core::KvSequence sequence;
  int begin, end;  // packed rows
};

PANTILE_INLINE DecodeTile decode_tile(const DecodeJob& job, const DecodeItem& item) {
  DecodeTile tile{};
  tile.sequence = core::locate_kv_sequence(job.arrays, item.batch);
  tile.begin = item.tile * kDecodeRows;
  tile.end = core::min_of(tile.begin + kDecodeRows, tile.sequence.queries * job.group);
  return tile;
}

PANTILE_INLINE core::KeyRange keys_of_row(const DecodeJob& job, const DecodeTile& tile, int row) {
  return core::visible_keys(tile.sequence, row / job.group, job.problem->window_left,
                            job.problem->window_right);
}

// Elements from the first of q or o to those of a packed row.
PANTILE_INLINE std::int64_t row_offset(const DecodeJob& job, const Layout& layout,
                                       const DecodeTile& tile, const DecodeItem& item, int row) {
  const int query = row / job.group;
  const std::int64_t head = item.head * std::int64_t{job.group} + row % job.group;
  const std::int64_t first =
      job.problem->packed_q ? tile.sequence.query_row * layout.seq : item.batch * layout.batch;
  return first + query * layout.seq + head * layout.head;
}

PANTILE_INLINE void read_queries(const DecodeJob& job, const DecodeTile& tile,
                                 const DecodeItem& item, float* queries) {
  const KvProblem& p = *job.problem;
  const auto dim = static_cast<int>(p.head_dim);
  const int wide = padded(dim);
  for (int row = tile.begin; row < tile.end; ++row) {
    float* const to = queries + (row - tile.begin) * wide;
    fill(to, wide, 0.0f);
    with_element(p.dtype, [&](auto element) {
      widen_row<decltype(element)>(job.tensors.q, row_offset(job, p.q, tile, item, row), dim, to);
    });
    for (int i = 0; i < wide; i += kLanes) {
      store(to + i, load(to + i) * splat(p.scale));
    }
  }
}

// The keys of a step that a row sees, as numbers within the step.
PANTILE_INLINE int list_visible(const DecodeJob& job, const DecodeTile& tile, int row, int first,
                                int end, std::uint8_t* visible) {
  const core::KeyRange range = keys_of_row(job, tile, row);
  const bool tree = job.problem->has_tree_mask;
  const auto bits = static_cast<std::uint64_t>(
      tree ? job.tensors.tree_mask[tile.sequence.query_row + row / job.group] : 0);
  int count = 0;
  for (int key = core::max_of(first, range.begin); key < core::min_of(end, range.end); ++key) {
    if (!tree || !core::tree_hides(tile.sequence, bits, key)) {
      visible[count++] = static_cast<std::uint8_t>(key - first);
    }
  }
  return count;
}

// Slots `part`.begin to end for all rows of the tile.
PANTILE_INLINE void attend_part(const DecodeJob& job, const DecodeItem& item,
                                const DecodeTile& tile, core::KeyRange part,
                                const DecodeScratch& scratch, float* states) {
  const int wide = padded(static_cast<int>(job.problem->head_dim));
  // Bounds move one way with the query, so that the first and the last row know those of all.
  const int low = core::max_of(part.begin, keys_of_row(job, tile, tile.begin).begin);
  const int high = core::min_of(part.end, keys_of_row(job, tile, tile.end - 1).end);
  std::uint8_t visible[kDecodeKeys];
  for (int first = low / kDecodeKeys * kDecodeKeys; first < high; first += kDecodeKeys) {
    const int end = core::min_of(first + kDecodeKeys, high);
    load_step(job, tile.sequence, item.batch, item.head, first,
              core::KeyRange{core::max_of(first, low), end}, scratch);
    for (int row = tile.begin; row < tile.end; ++row) {
      const int count = list_visible(job, tile, row, first, end, visible);
      if (count > 0) {
        row_step(job, scratch, scratch.queries + (row - tile.begin) * wide, visible, count,
                 states + (row - tile.begin) * job.state_floats);
      }
    }
  }
}

// O and LSE of a tile whose keys are all in `states`.
PANTILE_NOINLINE void write_rows(const DecodeJob& job, const DecodeItem& item,
                                 const DecodeTile& tile, float* states) {
  const KvProblem& p = *job.problem;
  const auto dim_v = static_cast<int>(p.head_dim_v);
  for (int row = tile.begin; row < tile.end; ++row) {
    float* const state = states + (row - tile.begin) * job.state_floats;
    const std::int64_t head = item.head * std::int64_t{job.group} + row % job.group;
    float most = state_max(state);
    float sum = state_sum(state);
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (p.has_sinks) {
      const float sink = job.tensors.sinks[head];
      const float higher = sink > most ? sink : most;
      const float shift = core::softmax_shift(higher);
      const float keep = scalar_exp(most - shift);
      sum = sum * keep + scalar_exp(sink - shift);
      most = higher;
      factor = sum == 0.0f ? 0.0f : keep / sum;
    }
    const std::int64_t at = row_offset(job, p.o, tile, item, row);
    const DType dtype = p.output_f32 ? DType::f32 : p.dtype;
    with_element(dtype, [&](auto element) {
      using Element = decltype(element);
      auto* const to = static_cast<typename Element::Raw*>(job.tensors.o) + at;
      for (int i = 0; i < dim_v; i += kLanes) {
        write_row<Element>(to, i, dim_v, load(state_output(state) + i) * splat(factor));
      }
    });
    if (p.wants_lse) {
      const int query = row / job.group;
      const std::int64_t lse_at = p.packed_q ? head * p.total_q + tile.sequence.query_row + query
                                             : (item.batch * p.heads_q + head) * p.seqlen_q + query;
      job.tensors.lse[lse_at] = sum == 0.0f ? -core::kInfinity : most + std::log(sum);
    }
  }
}

struct PartSpan {
  int begin, end;
};

PANTILE_INLINE PartSpan parts_of_chunk(const DecodeJob& job, const DecodeTile& tile, int part_keys,
                                       int chunk) {
  const std::int64_t count = core::part_count(tile.sequence.keys, part_keys);
  return PartSpan{static_cast<int>(chunk * count / job.chunks),
                  static_cast<int>((chunk + 1) * count / job.chunks)};
}

PANTILE_INLINE void decode(const DecodeJob& job, int number, void* memory) {
  const DecodeItem item = decode_item(job, number);
  const DecodeTile tile = decode_tile(job, item);
  if (tile.begin >= tile.end) {
    return;
  }
  const DecodeScratch scratch = decode_scratch(job, memory);
  read_queries(job, tile, item, scratch.queries);
  clear_states(job, scratch.folded);
  const int part_keys = job.schedule[item.batch];
  const PartSpan parts = parts_of_chunk(job, tile, part_keys, item.chunk);
  for (int part = parts.begin; part < parts.end; ++part) {
    const int begin = part * part_keys;
    const core::KeyRange keys{begin, static_cast<int>(core::min_of<std::int64_t>(
                                         std::int64_t{begin} + part_keys, tile.sequence.keys))};
    float* const states = job.chunks > 1 ? part_states(job, item, part) : scratch.part;
    clear_states(job, states);
    attend_part(job, item, tile, keys, scratch, states);
    for (int row = 0; job.chunks == 1 && row < tile.end - tile.begin; ++row) {
      fold(scratch.folded + row * job.state_floats, states + row * job.state_floats,
           job.state_floats);
    }
  }
  if (job.chunks == 1) {
    write_rows(job, item, tile, scratch.folded);
  }
}

// Where chunks stored their parts; `number` counts items of one chunk.
PANTILE_INLINE void merge_decode(const DecodeJob& job, int number, void* memory) {
  const DecodeItem item = decode_item(job, number * job.chunks);
  const DecodeTile tile = decode_tile(job, item);
  if (tile.begin >= tile.end) {
    return;
  }
  const DecodeScratch scratch = decode_scratch(job, memory);
  clear_states(job, scratch.folded);
  const int parts = core::part_count(tile.sequence.keys, job.schedule[item.batch]);
  for (int part = 0; part < parts; ++part) {
    float* const states = part_states(job, item, part);
    for (int row = 0; row < tile.end - tile.begin; ++row) {
      fold(scratch.folded + row * job.state_floats, states + row * job.state_floats,
           job.state_floats);
    }
  }
  write_rows(job, item, tile, scratch.folded);
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
