// After the main backward kernel: dQ = scale * sum, from register order to rows of 16-bit elements,
// and zeros for queries that see no key.
//
// Rows of dS sum to 0, or to dLSE where that is given. What the sum of a row of the 16-bit dS lacks
// of it - the leak - has gone into dQ with the mean of the keys: with a mean of 3 sigma it was most
// of dQ's error. So leak * mean is taken away. Exact dS would leave dQ as it is, whatever vector
// stands for the mean, so that the mean of a few of the keys that the rows see is enough: of 32, it
// is off by 0.18 sigma.
#pragma once

#include "common/backward_rows.cuh"
#include "common/quad_transpose.cuh"
#include "core/integer_sum.h"
#include "core/integer_unit.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/unpack.cuh"

namespace pantile::common {

// How the main kernel summed dQ.
enum class SumFormat {
  f32,   // four accumulators of a thread per 16 bytes
  i32,   // the same, words of core/integer_sum.h in units of the row's scale
  i32x2  // integers in units of that scale, two accumulators in one 64-bit sum
         // (prim/global_add.cuh)
};

struct FinishParams {
  RowPass pass;
  void* grad_q;  // [queries, heads_q, head_dim]
  Layout grad_q_layout;
  int head_dim;
  int tile_k;       // keys of an addition to the sums
  bool rows_split;  // a tile's fragments follow each other along the rows, not the columns
  // Whether dS belongs to all keys of its rows, so that what its sum lacks is an error. Only then:
  const void* k;          // [keys, heads_k, head_dim]
  Layout k_layout;        //
  const float* grad_lse;  // as in PrepareParams, or null
  const float* lse;
  std::int64_t lse_head_stride, lse_batch_stride;
  bool takes_leak;
};

inline constexpr int kFinishThreads = 128;

// A thread's 32 accumulators of a fragment: sums[4 j + 2 i + c], as in prim/wgmma.cuh. Words have
// been added `terms` times.
template <SumFormat kFormat>
PANTILE_DEVICE void load_sums(float (&sums)[32], const float* fragment, int column_groups,
                              std::uint32_t terms) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool exists = j < column_groups;
    if constexpr (kFormat == SumFormat::i32x2) {
      const auto* pairs = reinterpret_cast<const int2*>(fragment) + thread;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int2 pair = exists ? pairs[(2 * j + i) * kFinishThreads] : make_int2(0, 0);
        sums[4 * j + 2 * i] = static_cast<float>(pair.x);
        sums[4 * j + 2 * i + 1] = static_cast<float>(pair.y + (pair.x < 0 ? 1 : 0));
      }
    } else {
      const auto* fours = reinterpret_cast<const float4*>(fragment) + thread;
      const float4 four = exists ? fours[j * kFinishThreads] : make_float4(0, 0, 0, 0);
      const float words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[4 * j + i] =
            kFormat == SumFormat::f32
                ? words[i]
                : static_cast<float>(core::integer_sum(__float_as_uint(words[i]), terms));
      }
    }
  }
}

PANTILE_DEVICE void zero_unattended_rows(const FinishParams& params, const RowTile& row_tile,
                                         std::uint16_t* rows) {
  const int begin = row_tile.tile * params.pass.row_tiles.tile;
  const int end = core::min_of(begin + params.pass.row_tiles.tile, row_tile.capacity);
  const int attended_end = row_tile.first_row + row_tile.rows;
  if (begin >= row_tile.first_row && end <= attended_end) {
    return;
  }
  const int vectors = params.head_dim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * vectors; i += kFinishThreads) {
    const int row = begin + i / vectors;
    if (row < row_tile.first_row || row >= attended_end) {
      *reinterpret_cast<uint4*>(rows + row * params.grad_q_layout.seq + i % vectors * 8) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// The scale of the integers of a row.
PANTILE_DEVICE float integer_scale_of(const RowPass& pass, const RowTile& row_tile, int row) {
  const std::int64_t first = row_tile.tile * pass.row_tiles.tile;
  return __uint_as_float(pass.lse_terms[row_tile.index * pass.row_tiles.tile + row - first].z);
}

// Keys that stand for the mean of those that a tile of rows sees, evenly spaced.
inline constexpr int kSampledKeys = 32;

struct alignas(16) KeyMean {
  // Of every 16th sampled key; in the end sums[0] is the mean.
  float sums[kFinishThreads / 8][kFragmentColumns];
};

// The mean of columns first_column.. of the keys that the tile's rows see. Numbers that are not
// finite are left out: a key that some of the rows do not see must not reach them.
template <DType kDType>
PANTILE_DEVICE void sample_keys(KeyMean& mean, const FinishParams& params, const RowTile& row_tile,
                                int first_column) {
  constexpr int kGroups = kFinishThreads / 8;  // 8 threads take 64 columns of a key
  const RowPass& pass = params.pass;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = first_column + thread % 8 * 8;
  const core::Span keys = visible_keys(pass, row_tile);
  const bool packed = pass.keys.cu_seqlens != nullptr;
  const auto* const from = static_cast<const std::uint16_t*>(params.k) +
                           key_sequence_offset(params.k_layout, packed, pass, row_tile) + column;
  uint4 words[kSampledKeys / kGroups];
#pragma unroll
  for (int i = 0; i < kSampledKeys / kGroups; ++i) {
    const std::int64_t sample = 2 * (thread / 8 + i * kGroups) + 1;
    const std::int64_t key = keys.begin + sample * keys.size() / (2 * kSampledKeys);
    words[i] = make_uint4(0, 0, 0, 0);
    if (column < params.head_dim && !keys.empty()) {
      words[i] = *reinterpret_cast<const uint4*>(from + key * params.k_layout.seq);
    }
  }
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < kSampledKeys / kGroups; ++i) {
    const std::uint32_t x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = prim::unpack<kDType>(x[j]);
      sums[2 * j] += fabsf(pair.x) < __builtin_huge_valf() ? pair.x : 0.0f;
      sums[2 * j + 1] += fabsf(pair.y) < __builtin_huge_valf() ? pair.y : 0.0f;
    }
  }
  float4* const to = reinterpret_cast<float4*>(mean.sums[thread / 8] + thread % 8 * 8);
  to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  __syncthreads();
  float total = 0.0f;
  if (thread < kFragmentColumns) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      total += mean.sums[i][thread];
    }
  }
  __syncthreads();
  if (thread < kFragmentColumns) {
    mean.sums[0][thread] = total * (1.0f / kSampledKeys);
  }
  __syncthreads();
}

// What the sum of row `row` (of the attended ones) of dS is off by. `sums`: that row's, one before
// each fragment of `fragments`.
template <SumFormat kFormat>
PANTILE_DEVICE float leak_of(const FinishParams& params, const RowTile& row_tile, int row,
                             const float* sums, int fragments, std::uint32_t terms) {
  const RowPass& pass = params.pass;
  if (row >= row_tile.rows) {
    return 0.0f;
  }
  float leak = 0.0f;
  if constexpr (kFormat == SumFormat::f32) {
    for (int i = 0; i < fragments; ++i) {
      leak += sums[i * kSummedFragmentFloats];
    }
  } else {
    int units = 0;
    for (int i = 0; i < fragments; ++i) {
      units += core::integer_sum(__float_as_uint(sums[i * kSummedFragmentFloats]), terms);
    }
    const float unit = core::row_sum_unit(pass.key_bounds[key_head_of(pass, row_tile)]);
    leak = unit > 0.0f ? static_cast<float>(units) / integer_scale_of(pass, row_tile, row) / unit
                       : 0.0f;
  }
  if (params.grad_lse != nullptr) {
    const bool packed = pass.queries.cu_seqlens != nullptr;
    const std::int64_t at =
        row_tile.head * params.lse_head_stride +
        (packed ? row_tile.sequence : row_tile.batch * params.lse_batch_stride) +
        row_tile.first_row + row;
    leak -= params.lse[at] == -__builtin_huge_valf() ? 0.0f : params.grad_lse[at];
  }
  return leak;
}

// One fragment a block.
template <DType kDType, SumFormat kFormat>
__global__ void __launch_bounds__(kFinishThreads)
    finish_rows(const __grid_constant__ FinishParams params) {
  const RowPass& pass = params.pass;
  const int fragments = pass.tile_floats / kSummedFragmentFloats;
  const int fragment = static_cast<int>(blockIdx.x) % fragments;
  const RowTile row_tile = locate_row_tile(pass, static_cast<int>(blockIdx.x) / fragments,
                                           static_cast<int>(gridDim.x) / fragments);
  const bool packed = pass.queries.cu_seqlens != nullptr;
  std::uint16_t* rows = static_cast<std::uint16_t*>(params.grad_q) +
                        sequence_offset(params.grad_q_layout, packed, row_tile);
  const int tile = pass.row_tiles.tile;
  const int first_row = row_tile.tile * tile + (params.rows_split ? fragment * kFragmentRows : 0);
  const int first_column = params.rows_split ? 0 : fragment * kFragmentColumns;
  const bool works = first_row < row_tile.rows && first_column < params.head_dim;
  __shared__ KeyMean mean;
  if (params.takes_leak && works) {  // K is nothing that the kernel before writes
    sample_keys<kDType>(mean, params, row_tile, first_column);
  }
  // Also in blocks that need nothing of it: what follows this kernel relies on the one before, too.
  prim::wait_for_previous_grid();
  if (fragment == 0) {
    zero_unattended_rows(params, row_tile, rows);
  }
  if (!works) {
    return;
  }
  const float* const tile_sums = pass.dq_sum + row_tile.index * pass.tile_floats;
  const float* const same_rows =
      tile_sums + (params.rows_split ? fragment * kSummedFragmentFloats : 0);
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t terms =
      kFormat == SumFormat::i32
          ? static_cast<std::uint32_t>(additions(pass, row_tile, params.tile_k))
          : 0;
  __shared__ float leaks[kFragmentRows];
  if (params.takes_leak) {
    if (thread < kFragmentRows) {
      leaks[thread] = leak_of<kFormat>(params, row_tile, first_row + thread, same_rows + thread,
                                       params.rows_split ? 1 : fragments, terms);
    }
    __syncthreads();
  }
  float sums[32];
  load_sums<kFormat>(sums, tile_sums + fragment * kSummedFragmentFloats + kFragmentRows,
                     core::min_of((params.head_dim - first_column) / 8, 8), terms);
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + thread / 32 * 16 + lane / 4 + 8 * i;
    float factor = pass.scale;
    float leak = params.takes_leak ? leaks[row - first_row] : 0.0f;
    if (kFormat != SumFormat::f32 && row < row_tile.rows) {
      const float scale = integer_scale_of(pass, row_tile, row);
      factor = scale > 0.0f ? factor / scale : __builtin_nanf("");  // integer_scale()
      leak *= scale;                                                // in units, as the sums
    }
    std::uint16_t* to = rows + (row_tile.first_row + row) * params.grad_q_layout.seq + first_column;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * g + 4 * j + 2 * i;
        const int from = g * 32 + j * 8 + (lane & 3) * 2;
        const float x = params.takes_leak ? sums[at] - leak * mean.sums[0][from] : sums[at];
        const float y =
            params.takes_leak ? sums[at + 1] - leak * mean.sums[0][from + 1] : sums[at + 1];
        words[j] = prim::pack<kDType>(x * factor, y * factor);
      }
      quad_transpose(words);
      const int column = g * 32 + (lane & 3) * 8;
      if (row < row_tile.rows && first_column + column < params.head_dim) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace pantile::common
