// Before the main backward kernel: per row the two terms that its products start from, and zeros in
// the sum of dQ. For rounding-free order independence also the row's integer scale.
//
//   lse term    -lse / scale            S^T starts from it, so that P = exp2(S * scale * log2 e)
//   delta term  dLSE - rowsum(dO * O)   dP^T starts from it, so that dS = P * dP
//
// One block at least runs, even without rows: the main kernel's work counter starts here.
//
// Terms are cut into three bf16 (prim/wgmma_row_terms.cuh). Rows past the end of a sequence, and
// rows whose scores are all -inf, get an lse term that makes P zero.
#pragma once

#include "common/backward_rows.cuh"
#include "core/softmax_state.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/low_bits.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

struct PrepareParams {
  RowPass pass;
  const void* o;       // [queries, heads_q, head_dim_v]
  const void* grad_o;  // the same
  Layout o_layout, grad_o_layout;
  const std::int8_t* o_low;  // contiguous, shape of o: what rounding took from it; or null
  std::int64_t seqlen_q;     // dense: rows of o_low a sequence
  int head_dim_v;
  int* claimed;           // the main kernel's work counter, set to 0
  const float* lse;       // [batch][heads_q][seqlen_q], packed [heads_q][total_q]
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
};

inline constexpr int kPrepareThreads = 256;

// x = hi + mid + lo, each a bf16; exact to 24 bits.
PANTILE_DEVICE uint4 split_term(float x) {
  const auto round = [](float y) {
    return prim::unpack<DType::bf16>(prim::pack<DType::bf16>(y, 0)).x;
  };
  const float hi = round(x);
  const float mid = round(x - hi);
  return make_uint4(prim::pack<DType::bf16>(hi, mid), prim::pack<DType::bf16>(x - hi - mid, 0.0f),
                    0, 0);
}

// The power of two by which a row of dQ / scale is multiplied before it is rounded to integers, so
// that every partial sum stays below 2^30:
//   |sum_j dS_ij K_jd| <= (||dO_i|| max_j ||V_j|| + |delta_i|) max |K|
// and 1.1 covers the rounding of P and dS. Zero, from which dQ becomes NaN, when that or the LSE is
// not finite: integers cannot carry a NaN. A row's scale must be finite as two bf16.
PANTILE_DEVICE float integer_scale(float grad_o_norm2, float delta, float lse,
                                   const std::uint32_t* bounds) {
  const float bound = 1.1f * __uint_as_float(bounds[0]) *
                      (sqrtf(grad_o_norm2 * __uint_as_float(bounds[1])) + fabsf(delta));
  if (!(bound < __builtin_huge_valf()) || !(lse < __builtin_huge_valf())) {
    return 0.0f;
  }
  const int exponent = static_cast<int>(__float_as_uint(bound) >> 23) - 127;
  const int shift = bound > 0.0f ? core::clamp(29 - exponent, -120, 120) : 0;
  return __uint_as_float(static_cast<std::uint32_t>(shift + 127) << 23);
}

// kRowThreads threads read one row, 16 bytes each; kTileQ rows a block.
template <DType kDType, int kTileQ, int kRowThreads>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ PrepareParams params) {
  constexpr int kRowsAtOnce = kPrepareThreads / kRowThreads;
  constexpr int kRounds = kTileQ / kRowsAtOnce;
  prim::allow_next_grid();
  const RowPass& pass = params.pass;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) {
    *params.claimed = 0;
  }
  if (pass.row_tile_count == 0) {
    prim::wait_for_previous_grid();  // for the kernels after this one
    return;
  }
  const RowTile row_tile =
      locate_row_tile(pass, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const int first = row_tile.tile * kTileQ;
  if (first >= row_tile.rows) {
    prim::wait_for_previous_grid();
    return;
  }
  float4* sum = reinterpret_cast<float4*>(pass.dq_sum + row_tile.index * pass.tile_floats);
#pragma unroll 8
  for (int i = thread; i < pass.tile_floats / 4; i += kPrepareThreads) {
    sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const bool packed = pass.queries.cu_seqlens != nullptr;
  const int column = thread % kRowThreads * 8;
  const auto* o = static_cast<const std::uint16_t*>(params.o) +
                  sequence_offset(params.o_layout, packed, row_tile) + column;
  const auto* grad_o = static_cast<const std::uint16_t*>(params.grad_o) +
                       sequence_offset(params.grad_o_layout, packed, row_tile) + column;
  uint4 o_words[kRounds];
  uint4 grad_words[kRounds];
  uint2 low_words[kRounds];
  const std::int64_t low_row_bytes = std::int64_t{pass.heads_q} * params.head_dim_v;
  const std::int64_t low_rows = packed ? row_tile.sequence : row_tile.batch * params.seqlen_q;
  const std::int8_t* o_low = params.o_low + low_rows * low_row_bytes +
                             std::int64_t{row_tile.head} * params.head_dim_v + column;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int local = first + i * kRowsAtOnce + thread / kRowThreads;
    const std::int64_t row = row_tile.first_row + local;
    o_words[i] = grad_words[i] = make_uint4(0, 0, 0, 0);
    low_words[i] = make_uint2(0, 0);
    if (local < row_tile.rows && column < params.head_dim_v) {
      o_words[i] = *reinterpret_cast<const uint4*>(o + row * params.o_layout.seq);
      grad_words[i] = *reinterpret_cast<const uint4*>(grad_o + row * params.grad_o_layout.seq);
      if (params.o_low != nullptr) {
        low_words[i] = *reinterpret_cast<const uint2*>(o_low + row * low_row_bytes);
      }
    }
  }

  prim::wait_for_previous_grid();  // bound_keys, if it ran, wrote the bounds
  const std::int64_t lse_offset =
      row_tile.head * params.lse_head_stride +
      (packed ? row_tile.sequence : row_tile.batch * params.lse_batch_stride);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const std::uint32_t x[4] = {o_words[i].x, o_words[i].y, o_words[i].z, o_words[i].w};
    const std::uint32_t y[4] = {grad_words[i].x, grad_words[i].y, grad_words[i].z, grad_words[i].w};
    float product = 0.0f;
    float norm2 = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t low = k < 2 ? low_words[i].x : low_words[i].y;
      const float2 a = prim::with_low_bits<kDType>(x[k], low, k % 2 * 2);
      const float2 b = prim::unpack<kDType>(y[k]);
      product += a.x * b.x + a.y * b.y;
      norm2 += b.x * b.x + b.y * b.y;
    }
#pragma unroll
    for (int step = kRowThreads / 2; step > 0; step /= 2) {
      product += __shfl_xor_sync(prim::kAllLanes, product, step);
      norm2 += __shfl_xor_sync(prim::kAllLanes, norm2, step);
    }
    if (column > 0) {
      continue;
    }
    const int local = first + i * kRowsAtOnce + thread / kRowThreads;
    const std::int64_t to = row_tile.index * kTileQ + local - first;
    const bool exists = local < row_tile.rows;
    const std::int64_t row = lse_offset + row_tile.first_row + local;
    const float lse = exists ? params.lse[row] : -__builtin_huge_valf();
    const float delta =
        product - (exists && params.grad_lse != nullptr ? params.grad_lse[row] : 0.0f);
    uint4 lse_term = lse == -__builtin_huge_valf() ? split_term(pass.scale > 0.0f ? -1e30f : 1e30f)
                                                   : split_term(-lse / pass.scale);
    if (pass.key_bounds != nullptr) {
      const int key_head = row_tile.head / pass.group;
      const std::uint32_t* bounds =
          pass.key_bounds + 2 * (row_tile.batch * (pass.heads_q / pass.group) + key_head);
      lse_term.z = __float_as_uint(integer_scale(norm2, delta, lse, bounds));
    }
    pass.lse_terms[to] = lse_term;
    pass.delta_terms[to] = split_term(-delta);
  }
}

struct KeyBoundsParams {
  core::SequenceSide queries, keys;  // lengths only
  TileNumbers key_tiles;
  int heads_k;
  int window_left, window_right;
  const void* k;  // [keys, heads_k, head_dim]
  const void* v;  // [keys, heads_k, head_dim_v]
  Layout k_layout, v_layout;
  int head_dim, head_dim_v;
  std::uint32_t* bounds;  // [batch][heads_k][2], zero before
};

// The largest |x| of eight elements, as float bits.
template <DType kDType>
PANTILE_DEVICE std::uint32_t max_abs_bits(const uint4& words) {
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
  std::uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = prim::unpack<kDType>(word[i]);
    result = max(result, max(__float_as_uint(fabsf(pair.x)), __float_as_uint(fabsf(pair.y))));
  }
  return result;
}

// The sum of eight squares.
template <DType kDType>
PANTILE_DEVICE float norm2_of(const uint4& words) {
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
  float result = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = prim::unpack<kDType>(word[i]);
    result += pair.x * pair.x + pair.y * pair.y;
  }
  return result;
}

// Maxima over the attended keys of a head, as float bits: of non-negative floats these order like
// the floats, and a NaN is above all.
template <DType kDType>
__global__ void __launch_bounds__(kPrepareThreads)
    bound_keys(const __grid_constant__ KeyBoundsParams params) {
  prim::allow_next_grid();
  const int number = static_cast<int>(blockIdx.x) / params.heads_k;
  const int head = static_cast<int>(blockIdx.x) % params.heads_k;
  const int batch = params.key_tiles.sequence(number);
  const int tile = number - params.key_tiles.first(batch);
  const core::Sequence queries = core::locate_sequence(params.queries, batch);
  const core::Sequence keys = core::locate_sequence(params.keys, batch);
  const Attended part = attended_part(
      core::Mask{queries.length, keys.length, params.window_left, params.window_right});
  const bool packed = params.keys.cu_seqlens != nullptr;
  const auto rows_of = [&](const void* tensor, const Layout& layout) {
    return static_cast<const std::uint16_t*>(tensor) +
           (packed ? keys.row * layout.seq : batch * layout.batch) + part.first_key * layout.seq +
           head * layout.head;
  };
  const std::uint16_t* k = rows_of(params.k, params.k_layout);
  const std::uint16_t* v = rows_of(params.v, params.v_layout);
  const int begin = tile * params.key_tiles.tile;
  const int end = core::min_of(begin + params.key_tiles.tile, part.mask.keys);
  // row_threads threads read one row, 16 bytes each; a block reads `stride` rows at a time and has
  // kInFlight times as many on their way.
  constexpr int kInFlight = 4;
  const int widest = core::max_of(params.head_dim, params.head_dim_v);
  const int row_threads = widest <= 64 ? 8 : widest <= 128 ? 16 : 32;
  const int stride = kPrepareThreads / row_threads;
  const int column = static_cast<int>(threadIdx.x) % row_threads * 8;
  const int lane = prim::lane_index();
  std::uint32_t max_k = 0;
  std::uint32_t max_v = 0;
  for (int first = begin; first < end; first += kInFlight * stride) {
    uint4 k_words[kInFlight];
    uint4 v_words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int key = first + i * stride + static_cast<int>(threadIdx.x) / row_threads;
      k_words[i] = v_words[i] = make_uint4(0, 0, 0, 0);
      if (key < end && column < params.head_dim) {
        k_words[i] = *reinterpret_cast<const uint4*>(k + key * params.k_layout.seq + column);
      }
      if (key < end && column < params.head_dim_v) {
        v_words[i] = *reinterpret_cast<const uint4*>(v + key * params.v_layout.seq + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      max_k = max(max_k, max_abs_bits<kDType>(k_words[i]));
      float norm2 = norm2_of<kDType>(v_words[i]);
      for (int step = row_threads / 2; step > 0; step /= 2) {
        norm2 += __shfl_xor_sync(prim::kAllLanes, norm2, step);
      }
      max_v = max(max_v, __float_as_uint(fabsf(norm2)));
    }
  }
  max_v = __reduce_max_sync(prim::kAllLanes, max_v);
  max_k = __reduce_max_sync(prim::kAllLanes, max_k);
  if (lane == 0 && begin < end) {
    std::uint32_t* bounds = params.bounds + 2 * (batch * params.heads_k + head);
    atomicMax(bounds, max_k);
    atomicMax(bounds + 1, max_v);
  }
}

}  // namespace pantile::common
