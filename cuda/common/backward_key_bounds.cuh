// Before prepare_rows in deterministic mode: what is known of the keys of each head
// (core/integer_unit.h), for the units of the integers that dQ is summed as.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/attended.h"
#include "core/integer_unit.h"
#include "core/sequence.h"
#include "pantile/problem.h"
#include "prim/grid_dependency.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

inline constexpr int kBoundThreads = 256;

struct KeyBoundsParams {
  core::SequenceSide queries, keys;  // lengths only
  TileNumbers key_tiles;
  int heads_k;
  int window_left, window_right;
  const void* k;  // [keys, heads_k, head_dim]
  const void* v;  // [keys, heads_k, head_dim_v]
  Layout k_layout, v_layout;
  int head_dim, head_dim_v;
  core::KeyBounds* bounds;  // [batch][heads_k], zero before
};

// The largest |x| of eight elements, as float bits: of non-negative floats these order like the
// floats, and a NaN is above all.
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

// The sum of the squares of eight elements times `factor`.
template <DType kDType>
PANTILE_DEVICE float norm2_of(const uint4& words, float factor) {
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
  float result = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = prim::unpack<kDType>(word[i]);
    const float x = pair.x * factor;
    const float y = pair.y * factor;
    result += x * x + y * y;
  }
  return result;
}

// The Euclidean norm of a row that kThreads neighbouring lanes hold eight elements each of. Where
// it is not finite the mantissa is not. All of those lanes get it.
template <DType kDType, int kThreads>
PANTILE_DEVICE core::Magnitude row_norm(const uint4& words) {
  float plain = norm2_of<kDType>(words, 1.0f);
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    plain += __shfl_xor_sync(prim::kAllLanes, plain, step);
  }
  // Squares that vanish are then below 2^-28 of the sum.
  if (__all_sync(prim::kAllLanes, plain > 0x1p-90f && plain < 0x1p120f)) {
    return core::magnitude_of(sqrtf(plain));
  }
  std::uint32_t most = max_abs_bits<kDType>(words);
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    most = max(most, __shfl_xor_sync(prim::kAllLanes, most, step));
  }
  const core::Magnitude largest = core::magnitude_of(__uint_as_float(most));
  // Between 2^-120 and 2^120, so that it has an inverse; elements are then below 2^8 and squares
  // that vanish are below 2^-60 of the largest.
  const int exponent = core::clamp(largest.exponent, -120, 120);
  const float factor = __uint_as_float(static_cast<std::uint32_t>(127 - exponent) << 23);
  float norm2 = norm2_of<kDType>(words, factor);
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    norm2 += __shfl_xor_sync(prim::kAllLanes, norm2, step);
  }
  if (!core::is_finite_bits(most)) {
    return core::Magnitude{__uint_as_float(most), 0};
  }
  core::Magnitude norm = core::magnitude_of(sqrtf(norm2));
  norm.exponent += exponent;
  return norm;
}

// As float bits, no more than the largest finite float for a finite norm.
PANTILE_DEVICE std::uint32_t norm_bits(const core::Magnitude& norm) {
  if (!core::is_finite_bits(__float_as_uint(norm.mantissa))) {
    return __float_as_uint(norm.mantissa);
  }
  if (norm.mantissa == 0.0f || norm.exponent < -126) {
    return norm.mantissa == 0.0f ? 0u : 1u << 23;
  }
  return norm.exponent > 127
             ? 0x7f7fffffu
             : __float_as_uint(norm.mantissa) + (static_cast<std::uint32_t>(norm.exponent) << 23);
}

// Some keys of a head, begin..end of the attended ones, which `k` and `v` start with. kRowThreads
// threads read one row, 16 bytes each; a block reads kStride rows at a time and has kInFlight
// times as many on their way.
template <DType kDType, int kRowThreads>
PANTILE_DEVICE core::KeyBounds bounds_of(const KeyBoundsParams& params, const std::uint16_t* k,
                                         const std::uint16_t* v, int begin, int end) {
  constexpr int kInFlight = 4;
  constexpr int kStride = kBoundThreads / kRowThreads;
  const int column = static_cast<int>(threadIdx.x) % kRowThreads * 8;
  core::KeyBounds seen{};
  const auto count = [column](std::uint32_t bits, std::uint32_t& most, std::int32_t& number_of,
                              std::int32_t& exponents) {
    most = max(most, bits);
    if (column == 0 && bits != 0 && core::is_finite_bits(bits)) {
      ++number_of;
      exponents += core::magnitude_of(__uint_as_float(bits)).exponent;
    }
  };
  for (int first = begin; first < end; first += kInFlight * kStride) {
    uint4 k_words[kInFlight];
    uint4 v_words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int key = first + i * kStride + static_cast<int>(threadIdx.x) / kRowThreads;
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
      std::uint32_t max_k = max_abs_bits<kDType>(k_words[i]);
#pragma unroll
      for (int step = kRowThreads / 2; step > 0; step /= 2) {
        max_k = max(max_k, __shfl_xor_sync(prim::kAllLanes, max_k, step));
      }
      count(max_k, seen.max_k, seen.keys_k, seen.exponents_k);
      count(norm_bits(row_norm<kDType, kRowThreads>(v_words[i])), seen.max_v, seen.keys_v,
            seen.exponents_v);
    }
  }
  return seen;
}

// A block takes a tile of attended keys of a head.
template <DType kDType>
__global__ void __launch_bounds__(kBoundThreads)
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
  const int widest = core::max_of(params.head_dim, params.head_dim_v);
  core::KeyBounds seen = widest <= 64    ? bounds_of<kDType, 8>(params, k, v, begin, end)
                         : widest <= 128 ? bounds_of<kDType, 16>(params, k, v, begin, end)
                                         : bounds_of<kDType, 32>(params, k, v, begin, end);
  seen.max_k = __reduce_max_sync(prim::kAllLanes, seen.max_k);
  seen.max_v = __reduce_max_sync(prim::kAllLanes, seen.max_v);
  seen.keys_k = __reduce_add_sync(prim::kAllLanes, seen.keys_k);
  seen.keys_v = __reduce_add_sync(prim::kAllLanes, seen.keys_v);
  seen.exponents_k = __reduce_add_sync(prim::kAllLanes, seen.exponents_k);
  seen.exponents_v = __reduce_add_sync(prim::kAllLanes, seen.exponents_v);
  __shared__ core::KeyBounds block;
  if (threadIdx.x == 0) {
    block = core::KeyBounds{};
  }
  __syncthreads();
  const auto unite = [&seen](core::KeyBounds& bounds) {
    atomicMax(&bounds.max_k, seen.max_k);
    atomicMax(&bounds.max_v, seen.max_v);
    atomicAdd(&bounds.keys_k, seen.keys_k);
    atomicAdd(&bounds.keys_v, seen.keys_v);
    atomicAdd(&bounds.exponents_k, seen.exponents_k);
    atomicAdd(&bounds.exponents_v, seen.exponents_v);
  };
  if (prim::lane_index() == 0) {
    unite(block);
  }
  __syncthreads();
  if (threadIdx.x == 0 && begin < end) {
    seen = block;
    unite(params.bounds[batch * params.heads_k + head]);
  }
}

}  // namespace pantile::common
