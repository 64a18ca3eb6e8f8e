// Before and after the main backward kernel, on tiles of rows of every query head
// (common/backward_rows.cuh): the row terms and zeros in the sums of dQ; then dQ itself. Further
// blocks before the first look at the means of the keys (common/backward_key_means.cuh).
//
//   term 0   minus LSE, base 2       P  = exp2(S * scale_log2 + term)
//   term 1   dLSE - rowsum(dO * O)   dP starts from it, so that dS = P * dP; with dropout over
//                                    keep_scale
//   term 2   the power of two that integer sums of this row of dQ are scaled with, or 1
//
// Rows past the end of a sequence, and rows whose scores are all -inf, get a term 0 of -inf: P = 0.
#pragma once

#include "ampere/backward/params.cuh"
#include "ampere/backward/sinks.cuh"
#include "common/backward_key_means.cuh"
#include "common/backward_prepare.cuh"
#include "common/backward_rows.cuh"
#include "core/softmax_state.h"
#include "prim/convert.cuh"
#include "prim/low_bits.cuh"
#include "prim/unpack.cuh"
#include "tile/quad_sums_sm80.cuh"

namespace pantile::ampere {

inline constexpr int kRowThreads = 256;  // of a block of either kernel
static_assert(kRowThreads == common::kMeanThreads);

struct PrepareParams {
  common::RowPass pass;
  Operand o, grad_o;
  common::KeyMeanParams keys;
  int key_mean_blocks;              // key heads of all sequences, or 0: the means are not wanted
  const std::int8_t* o_low;         // contiguous, shape of O (core/low_bits.h), or null
  std::int64_t o_low_batch_stride;  // rows; 0 for packed tensors
  int head_dim_v;
  const float* lse;       // [batch][heads_q][seqlen_q], packed [heads_q][total_q]
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
  float* row_terms;
};

struct FinishParams {
  common::RowPass pass;
  Operand grad_q;
  int head_dim;
  bool integer_sums;
  const float* row_terms;
  const float* grad_lse;  // as in PrepareParams
  std::int64_t lse_head_stride, lse_batch_stride;
};

// Row 0 of the attended rows of a tile's sequence and head.
PANTILE_DEVICE std::uint16_t* attended_rows(const Operand& x, bool packed,
                                            const common::RowTile& tile) {
  const std::int64_t sequence = packed ? tile.sequence * x.seq : tile.batch * x.batch;
  return static_cast<std::uint16_t*>(x.data) + sequence + tile.first_row * x.seq +
         tile.head * x.head;
}

// Row 0 of the attended rows in an array laid out as the LSE.
template <class Params>
PANTILE_DEVICE std::int64_t lse_offset_of(const Params& params, bool packed,
                                          const common::RowTile& tile) {
  return tile.head * params.lse_head_stride +
         (packed ? tile.sequence : tile.batch * params.lse_batch_stride) + tile.first_row;
}

// Threads that read one row together, 16 bytes each.
template <class Config>
inline constexpr int kThreadsPerRow = Config::kHeadDimV <= 64    ? 8
                                      : Config::kHeadDimV <= 128 ? 16
                                                                 : 32;

template <class Config, DType kDType>
__global__ void __launch_bounds__(kRowThreads)
    prepare_rows(const __grid_constant__ PrepareParams params) {
  constexpr int kTileQ = Config::kTileQ;
  constexpr int kTileWords = kTileQ * Config::kHeadDim;
  constexpr int kGroup = kThreadsPerRow<Config>;
  const common::RowPass& pass = params.pass;
  const int thread = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x) - params.key_mean_blocks;
  if (block < 0) {
    common::sample_keys<kDType>(pass, params.keys, static_cast<int>(blockIdx.x));
    return;
  }
  const common::RowTile tile =
      common::locate_row_tile(pass, block, static_cast<int>(gridDim.x) - params.key_mean_blocks);
  const int first = tile.tile * kTileQ;
  if (first >= tile.rows) {
    return;
  }
  float4* const sums = reinterpret_cast<float4*>(pass.dq_sum + tile.index * kTileWords);
#pragma unroll 4
  for (int i = thread; i < kTileWords / 4; i += kRowThreads) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  common::clear_row_sums(pass, tile, kRowThreads);

  float* const terms = params.row_terms + tile.index * (kRowTerms * kTileQ);
  const bool packed = pass.queries.cu_seqlens != nullptr;
  const std::uint16_t* const o = attended_rows(params.o, packed, tile);
  const std::uint16_t* const grad_o = attended_rows(params.grad_o, packed, tile);
  const std::int64_t lse_offset = lse_offset_of(params, packed, tile);
  core::KeyBounds bounds{};
  if (pass.key_bounds != nullptr) {
    bounds = common::bounds_of_keys<kDType>(pass, tile);
  }
  const int column = thread % kGroup * 8;
  const std::int64_t low_row =
      (packed ? tile.sequence : tile.batch * params.o_low_batch_stride) + tile.first_row;
#pragma unroll
  for (int i = thread / kGroup; i < kTileQ; i += kRowThreads / kGroup) {
    const int row = first + i;
    const bool exists = row < tile.rows;
    uint4 x = make_uint4(0, 0, 0, 0);
    uint4 y = x;
    uint2 low = make_uint2(0, 0);
    if (exists && column < params.head_dim_v) {
      x = *reinterpret_cast<const uint4*>(o + row * params.o.seq + column);
      y = *reinterpret_cast<const uint4*>(grad_o + row * params.grad_o.seq + column);
      if (params.o_low != nullptr) {
        low = *reinterpret_cast<const uint2*>(
            params.o_low + ((low_row + row) * pass.heads_q + tile.head) * params.head_dim_v +
            column);
      }
    }
    const std::uint32_t words_o[4] = {x.x, x.y, x.z, x.w};
    const std::uint32_t words_grad[4] = {y.x, y.y, y.z, y.w};
    float product = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 a = prim::with_low_bits<kDType>(words_o[k], k < 2 ? low.x : low.y, k % 2 * 2);
      const float2 b = prim::unpack<kDType>(words_grad[k]);
      product += a.x * b.x + a.y * b.y;
    }
#pragma unroll
    for (int step = kGroup / 2; step > 0; step /= 2) {
      product += __shfl_xor_sync(prim::kAllLanes, product, step);
    }
    core::Magnitude grad_o_norm;
    if (pass.key_bounds != nullptr) {
      grad_o_norm = common::row_norm<kDType, kGroup>(y);
    }
    if (column > 0) {
      continue;
    }
    const float lse = exists ? params.lse[lse_offset + row] : -INFINITY;
    const float grad_lse =
        exists && params.grad_lse != nullptr ? params.grad_lse[lse_offset + row] : 0.0f;
    const float delta = (product - grad_lse) * pass.delta_factor;
    terms[i] = lse == -INFINITY ? -INFINITY : -lse * core::kLog2E;
    terms[kTileQ + i] = -delta;
    terms[2 * kTileQ + i] = 1.0f;
    if (pass.key_bounds != nullptr) {
      terms[2 * kTileQ + i] = common::first_integer_scale(bounds, grad_o_norm, delta, lse);
      pass.row_max[tile.index * kTileQ + i] = 0;
    }
  }
}

// Zeros in rows of this tile's slice of the whole sequence that attend to nothing.
PANTILE_DEVICE void clear_unattended_rows(const FinishParams& params, bool packed,
                                          const common::RowTile& tile, int tile_q) {
  const int begin = tile.tile * tile_q;
  const int end = core::min_of(begin + tile_q, tile.capacity);
  const int attended_end = tile.first_row + tile.rows;
  if (begin >= tile.first_row && end <= attended_end) {
    return;
  }
  std::uint16_t* const rows =
      attended_rows(params.grad_q, packed, tile) - tile.first_row * params.grad_q.seq;
  const int chunks = params.head_dim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * chunks; i += kRowThreads) {
    const int row = begin + i / chunks;
    if (row < tile.first_row || row >= attended_end) {
      *reinterpret_cast<uint4*>(rows + row * params.grad_q.seq + i % chunks * 8) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

template <DType kDType>
PANTILE_DEVICE void store_chunk(std::uint16_t* to, const float (&x)[8], float factor) {
  *reinterpret_cast<uint4*>(to) = make_uint4(prim::pack<kDType>(x[0] * factor, x[1] * factor),
                                             prim::pack<kDType>(x[2] * factor, x[3] * factor),
                                             prim::pack<kDType>(x[4] * factor, x[5] * factor),
                                             prim::pack<kDType>(x[6] * factor, x[7] * factor));
}

// The leak of row `row` of a tile (common/backward_key_means.cuh), multiplied by the scale of the
// row's sums of dQ. `terms`: of the tile.
PANTILE_DEVICE float leak_of(const FinishParams& params, const common::RowTile& tile, int row,
                             const float* terms) {
  const common::RowPass& pass = params.pass;
  const int tile_q = pass.row_tiles.tile;
  const int index = tile.tile * tile_q + row;
  if (index >= tile.rows) {
    return 0.0f;
  }
  const float sum = pass.row_sums[tile.index * common::row_sum_floats(pass) + row];
  float leak = sum;
  if (params.integer_sums) {
    const float unit = core::row_sum_unit(pass.key_bounds[common::key_head_of(pass, tile)]);
    leak = unit > 0.0f ? static_cast<float>(__float_as_int(sum)) / unit : 0.0f;
  }
  const float scale = terms[2 * tile_q + row];
  if (params.grad_lse != nullptr && terms[row] != -INFINITY) {
    const bool packed = pass.queries.cu_seqlens != nullptr;
    leak -=
        params.grad_lse[lse_offset_of(params, packed, tile) + index] * pass.delta_factor * scale;
  }
  if (pass.sinks != nullptr) {  // what the row of P lacks of 1
    leak += sink_share(pass.sinks[tile.head], terms[row]) * terms[tile_q + row] * scale;
  }
  return leak;
}

PANTILE_DEVICE void take_leak(float (&x)[8], float leak, const float* means) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] -= leak * means[i];
  }
}

// dQ = scale * sums, from the order of the accumulators to rows. Each thread takes 8 columns of two
// rows at a time.
template <class Config, DType kDType>
__global__ void __launch_bounds__(kRowThreads)
    finish_rows(const __grid_constant__ FinishParams params) {
  constexpr int kTileQ = Config::kTileQ;
  constexpr int kMTiles = Config::kGradRows / 16;
  constexpr int kNTiles = Config::kGradColumns / 8;
  constexpr int kQuadTiles = kTileQ * Config::kHeadDim / tile::kQuadTileWords;
  const common::RowPass& pass = params.pass;
  const common::RowTile tile =
      common::locate_row_tile(pass, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const bool packed = pass.queries.cu_seqlens != nullptr;
  clear_unattended_rows(params, packed, tile, kTileQ);
  const int first = tile.tile * kTileQ;
  if (first >= tile.rows) {
    return;
  }
  const float* const sums = pass.dq_sum + tile.index * (kTileQ * Config::kHeadDim);
  const float* const terms = params.row_terms + tile.index * (kRowTerms * kTileQ);
  const float* const scales = terms + 2 * kTileQ;
  std::uint16_t* const rows = attended_rows(params.grad_q, packed, tile);
  const auto unscaled = [&pass](float scale) {  // 0: integer_scale() found something not finite
    return scale == 0.0f ? __builtin_nanf("") : pass.scale / scale;
  };
  __shared__ float leaks[kTileQ];
  const int key_head = common::key_head_of(pass, tile);
  const bool has_leaks = pass.key_means != nullptr && pass.large_means[key_head] != 0;
  const float* const means = pass.key_means + key_head * pass.key_mean_columns;
  if (has_leaks) {
    if (static_cast<int>(threadIdx.x) < kTileQ) {
      leaks[threadIdx.x] = leak_of(params, tile, static_cast<int>(threadIdx.x), terms);
    }
    __syncthreads();
  }
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kQuadTiles * 8; i += kRowThreads) {
    const int quad_tile = i / 8;
    const int g = i % 8;
    const int warp = quad_tile / (kMTiles * kNTiles);
    const int m = quad_tile / kNTiles % kMTiles;
    const int row = warp % Config::kGradRowWarps * Config::kGradRows + m * 16 + g;
    const int column =
        warp / Config::kGradRowWarps * Config::kGradColumns + quad_tile % kNTiles * 8;
    if (column >= params.head_dim || first + row >= tile.rows) {
      continue;
    }
    tile::QuadRows x =
        tile::read_quads(sums + quad_tile * tile::kQuadTileWords, g, params.integer_sums);
    if (has_leaks) {
      take_leak(x.upper, leaks[row], means + column);
      take_leak(x.lower, leaks[row + 8], means + column);
    }
    std::uint16_t* const to = rows + (first + row) * params.grad_q.seq + column;
    store_chunk<kDType>(to, x.upper, unscaled(scales[row]));
    if (first + row + 8 < tile.rows) {
      store_chunk<kDType>(to + 8 * params.grad_q.seq, x.lower, unscaled(scales[row + 8]));
    }
  }
}

}  // namespace pantile::ampere
