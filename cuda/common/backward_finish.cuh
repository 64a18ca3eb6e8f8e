// After the main backward kernel: dQ = scale * sum, from register order to rows of 16-bit elements,
// and zeros for queries that see no key.
#pragma once

#include "common/backward_rows.cuh"
#include "common/quad_transpose.cuh"
#include "core/integer_sum.h"
#include "core/integer_unit.h"
#include "core/softmax_state.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"

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
  int tile_k;             // keys of an addition to the sums
  bool rows_split;        // a tile's fragments follow each other along the rows, not the columns
  int blocks;             // fragments of all tiles
  bool repeats;           // integers: the heads that are measured, and only these; else the others
  float grad_scale;       // dQ in units of the sum
  const float* lse;       // as in PrepareParams
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
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

// The leak of row `row` (of the attended ones), see backward_key_means.cuh. `sums`: that row's, one
// for each of the `fragments`.
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
      leak += sums[i * kFragmentRows];
    }
  } else {
    int units = 0;
    for (int i = 0; i < fragments; ++i) {
      units += core::integer_sum(__float_as_uint(sums[i * kFragmentRows]), terms);
    }
    const float unit = core::row_sum_unit(pass.key_bounds[key_head_of(pass, row_tile)]);
    leak = unit > 0.0f ? static_cast<float>(units) / integer_scale_of(pass, row_tile, row) / unit
                       : 0.0f;
  }
  const bool packed = pass.queries.cu_seqlens != nullptr;
  const std::int64_t at = row_tile.head * params.lse_head_stride +
                          (packed ? row_tile.sequence : row_tile.batch * params.lse_batch_stride) +
                          row_tile.first_row + row;
  if (params.grad_lse != nullptr) {
    leak -= params.lse[at] == -core::kInfinity ? 0.0f : pass.delta_factor * params.grad_lse[at];
  }
  if (pass.sinks != nullptr) {  // what the row of P lacks of 1
    const std::int64_t slot = row_tile.index * pass.row_tiles.tile + row -
                              std::int64_t{row_tile.tile} * pass.row_tiles.tile;
    leak +=
        sink_share(pass.sinks[row_tile.head], params.lse[at]) * term_value(pass.delta_terms[slot]);
  }
  return leak;
}

// Takes the leaks of a thread's two rows from its 32 sums. `row_sums`: of the fragments' first row,
// in the first of them; `mean`: of the fragments' first column.
template <SumFormat kFormat>
PANTILE_DEVICE void take_leaks(float (&sums)[32], const FinishParams& params,
                               const RowTile& row_tile, int first_row, const float* row_sums,
                               const float* mean, int fragments, std::uint32_t terms) {
  __shared__ float leaks[kFragmentRows];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  if (thread < kFragmentRows) {
    leaks[thread] =
        leak_of<kFormat>(params, row_tile, first_row + thread, row_sums + thread, fragments, terms);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * i;
    float leak = leaks[row];
    if (kFormat != SumFormat::f32 && first_row + row < row_tile.rows) {
      leak *= integer_scale_of(params.pass, row_tile, first_row + row);  // in units, as the sums
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 part = *reinterpret_cast<const float2*>(mean + 8 * j + lane % 4 * 2);
      sums[4 * j + 2 * i] -= leak * part.x;
      sums[4 * j + 2 * i + 1] -= leak * part.y;
    }
  }
}

// Fragment `block` of params.blocks.
template <DType kDType, SumFormat kFormat>
PANTILE_DEVICE void finish_fragment(const FinishParams& params, int block) {
  const RowPass& pass = params.pass;
  const int fragments = pass.tile_floats / kFragmentFloats;
  const int fragment = block % fragments;
  const RowTile row_tile = locate_row_tile(pass, block / fragments, params.blocks / fragments);
  const bool packed = pass.queries.cu_seqlens != nullptr;
  std::uint16_t* rows = static_cast<std::uint16_t*>(params.grad_q) +
                        sequence_offset(params.grad_q_layout, packed, row_tile);
  // Also in blocks that need nothing of it: what follows this kernel relies on the one before, too.
  prim::wait_for_previous_grid();
  if (fragment == 0 && !params.repeats) {
    zero_unattended_rows(params, row_tile, rows);
  }
  const int tile = pass.row_tiles.tile;
  const int first_row = row_tile.tile * tile + (params.rows_split ? fragment * kFragmentRows : 0);
  const int first_column = params.rows_split ? 0 : fragment * kFragmentColumns;
  if (first_row >= row_tile.rows || first_column >= params.head_dim) {
    return;
  }
  const int key_head = key_head_of(pass, row_tile);
  if (kFormat != SumFormat::f32 && (pass.key_bounds[key_head].measured != 0) != params.repeats) {
    return;
  }
  const bool leaks = pass.key_means != nullptr && pass.large_means[key_head] != 0;
  const float* const tile_sums = pass.dq_sum + row_tile.index * pass.tile_floats;
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t terms =
      kFormat == SumFormat::i32
          ? static_cast<std::uint32_t>(additions(pass, row_tile, params.tile_k))
          : 0;
  float sums[32];
  load_sums<kFormat>(sums, tile_sums + fragment * kFragmentFloats,
                     core::min_of((params.head_dim - first_column) / 8, 8), terms);
  const int lane = thread % 32;
  if (leaks) {
    take_leaks<kFormat>(sums, params, row_tile, first_row,
                        pass.row_sums + row_tile.index * row_sum_floats(pass.tile_floats) +
                            (params.rows_split ? fragment * kFragmentRows : 0),
                        pass.key_means + key_head * pass.key_mean_columns + first_column,
                        params.rows_split ? 1 : fragments, terms);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + thread / 32 * 16 + lane / 4 + 8 * i;
    float factor = params.grad_scale;
    if (kFormat != SumFormat::f32 && row < row_tile.rows) {
      const float scale = integer_scale_of(pass, row_tile, row);
      factor = scale > 0.0f ? factor / scale : __builtin_nanf("");  // integer_scale()
    }
    std::uint16_t* to = rows + (row_tile.first_row + row) * params.grad_q_layout.seq + first_column;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * g + 4 * j + 2 * i;
        words[j] = prim::pack<kDType>(sums[at] * factor, sums[at + 1] * factor);
      }
      quad_transpose(words);
      const int column = g * 32 + (lane & 3) * 8;
      if (row < row_tile.rows && first_column + column < params.head_dim) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// A block takes a fragment. What repeats is nearly always nothing: few blocks, which then share the
// fragments.
template <DType kDType, SumFormat kFormat>
__global__ void __launch_bounds__(kFinishThreads, kFormat == SumFormat::f32 ? 9 : 8)
    finish_rows(const __grid_constant__ FinishParams params) {
  if constexpr (kFormat == SumFormat::f32) {
    finish_fragment<kDType, kFormat>(params, static_cast<int>(blockIdx.x));
  } else {
    if (params.repeats) {
      prim::wait_for_previous_grid();
      if (*params.pass.measured == 0) {
        return;
      }
    }
    for (int block = static_cast<int>(blockIdx.x); block < params.blocks;
         block += static_cast<int>(gridDim.x)) {
      finish_fragment<kDType, kFormat>(params, block);
      __syncthreads();  // the leaks of the fragment have been read
    }
  }
}

}  // namespace pantile::common
