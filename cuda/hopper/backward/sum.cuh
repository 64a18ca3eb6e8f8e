// How a warpgroup hands a fragment of dQ, 64 x 64 values in the register order of an accumulator,
// to the sum in global memory: through shared memory for a bulk addition, or from its registers.
//
// A thread has 32 values of dQ. In careful steps there are 4 sums of dS over keys behind them,
// products with ones: two of each of its rows, the same in all lanes of a quad. A tile of rows has
// as many sums of a row as fragments with that row, each over some of the keys.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/integer_sum.h"
#include "hopper/backward/storage.cuh"
#include "prim/global_add.cuh"
#include "prim/warp.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

inline constexpr int kFragmentValues = 32;
inline constexpr int kFragmentSums = 4;
template <bool kCareful>
using QueryGradient = float[kFragmentValues + (kCareful ? kFragmentSums : 0)];

// The accumulators of the product of dS with columns of K, or with these and ones.
template <bool kWithOnes, int kCount>
PANTILE_DEVICE auto& columns_of(float (&dQ)[kCount]) {
  return reinterpret_cast<float (&)[kWithOnes ? kCount : kFragmentValues]>(dQ);
}

PANTILE_DEVICE float (&sums_of(QueryGradient<true>& dQ))
    [kFragmentSums] { return reinterpret_cast<float (&)[kFragmentSums]>(dQ[kFragmentValues]); }

// So that integers of the sums have the unit of their row of dQ.
PANTILE_DEVICE void scale_sums(QueryGradient<true>& dQ, float row_sum_unit) {
#pragma unroll
  for (int i = 0; i < kFragmentSums; ++i) {
    dQ[kFragmentValues + i] *= row_sum_unit;
  }
}

// The sums of dS over kSteps times 16 keys, from `a` on; `ones`: descriptor of the panel of ones.
template <DType kDType, int kSteps>
PANTILE_DEVICE void sum_keys(float (&sums)[kFragmentSums], std::uint32_t a, std::uint32_t ones) {
  prim::wgmma_ss_write<kDType, prim::Major::k, prim::Major::mn>(sums, a, ones);
#pragma unroll
  for (int k = 1; k < kSteps; ++k) {
    prim::wgmma_ss<kDType, prim::Major::k, prim::Major::mn>(sums, a + prim::descriptor_step(k * 32),
                                                            ones);
  }
}

// What store_words() multiplies a row of dQ / scale by; the term of its LSE carries it.
PANTILE_DEVICE float held_scale(const uint4& lse_term) {
  return __uint_as_float(lse_term.z) * core::kHeldScale;
}

// Turns a fragment of dQ into words whose sum does not depend on the order (core/integer_sum.h) and
// calls `store`. `row_scale` is that of the thread's two rows. The conversion instruction, last
// resort, takes the unit of the exponentials as long as all those of a step at head dim 128.
// `store` stands in every branch because ptxas gives the words new registers where branches meet.
template <int kCount, class Store>
PANTILE_DEVICE void store_words(float (&dQ)[kCount], const float (&row_scale)[2],
                                const Store& store) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dQ[i] = core::hold_term(dQ[i], row_scale[i / 2 % 2]);
    bits |= __float_as_uint(dQ[i]);
  }
  if (__all_sync(prim::kAllLanes, core::all_in_range(bits))) {
    store();
    return;
  }
  bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dQ[i] = core::hold_large_term(dQ[i]);
    bits |= core::large_term_bits(dQ[i]);
  }
  if (__all_sync(prim::kAllLanes, core::all_large_in_range(bits))) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dQ[i] = __uint_as_float(core::large_word(dQ[i]));
    }
    store();
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dQ[i] = __uint_as_float(core::converted_word(dQ[i]));
  }
  store();
}

// Rows that are measured have a negative scale in the pass that does so.
PANTILE_DEVICE bool is_measuring(const float (&row_scale)[2]) {
  return __any_sync(prim::kAllLanes, row_scale[0] < 0.0f || row_scale[1] < 0.0f);
}

// Raises the largest addition of each of the thread's rows, which have the slots `slots` in
// `row_max`: of the absolute values, as bits, so that NaN is above all.
PANTILE_DEVICE void note_additions(const QueryGradient<true>& dQ, const std::uint32_t (&slots)[2],
                                   std::uint32_t* row_max) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < (kFragmentValues + kFragmentSums) / 4; ++j) {
      most = max(most, max(__float_as_uint(fabsf(dQ[4 * j + 2 * i])),
                           __float_as_uint(fabsf(dQ[4 * j + 2 * i + 1]))));
    }
    most = max(most, __shfl_xor_sync(prim::kAllLanes, most, 1));
    most = max(most, __shfl_xor_sync(prim::kAllLanes, most, 2));
    if ((prim::lane_index() & 3) == 0) {
      atomicMax(row_max + slots[i], most);
    }
  }
}

// The lane of a quad that hands over the sums of its rows, and the first of these two rows.
PANTILE_DEVICE bool hands_over_sums() {
  return (prim::lane_index() & 3) == 0;
}

PANTILE_DEVICE int summed_row() {
  return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + prim::lane_index() / 4;
}

// Writes a fragment of dQ to shared memory for a bulk addition, in register order: 16-byte stores
// without conflicts.
template <SumKind kSum, int kCount>
PANTILE_DEVICE void stage_fragment(QueryGradientFragment& fragment, float (&dQ)[kCount],
                                   const float (&row_scale)[2]) {
  float4* to = reinterpret_cast<float4*>(fragment.values) + (threadIdx.x & 127);
  const auto store = [&] {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[j * kWarpgroup] = make_float4(dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2], dQ[4 * j + 3]);
    }
    if constexpr (kCount > kFragmentValues) {
      if (hands_over_sums()) {
        float* const sums = fragment.row_sums + summed_row();
        sums[0] = dQ[kFragmentValues];
        sums[8] = dQ[kFragmentValues + 2];
      }
    }
  };
  if constexpr (kSum == SumKind::integer) {
    store_words(dQ, row_scale, store);
  } else {
    store();
  }
}

// Adds a thread's sums of dS, to those of 64 rows in global memory.
template <SumKind kSum>
PANTILE_DEVICE void add_sums(float* row_sums, const QueryGradient<true>& dQ,
                             const float (&row_scale)[2]) {
  if (!hands_over_sums()) {
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* const to = row_sums + summed_row() + 8 * i;
    const float sum = dQ[kFragmentValues + 2 * i];
    if constexpr (kSum == SumKind::integer) {
      prim::global_add(reinterpret_cast<int*>(to), __float2int_rn(sum * row_scale[i]));
    } else {
      prim::global_add(to, sum);
    }
  }
}

// Adds 64 x 64 values of dQ to their fragment in global memory.
template <SumKind kSum, int kCount>
PANTILE_DEVICE void add_fragment(float* fragment, const float (&dQ)[kCount],
                                 const float (&row_scale)[2]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  if constexpr (kSum == SumKind::integer) {
    std::uint64_t* to = reinterpret_cast<std::uint64_t*>(fragment) + thread;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float scale = row_scale[j % 2];
      prim::global_add_pair(to + j * kWarpgroup, __float2int_rn(dQ[2 * j] * scale),
                            __float2int_rn(dQ[2 * j + 1] * scale));
    }
  } else {
    float* to = fragment + thread * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      prim::global_add(to + j * 4 * kWarpgroup, dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2],
                       dQ[4 * j + 3]);
    }
  }
}

}  // namespace pantile::hopper
