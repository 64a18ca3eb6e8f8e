// How a warpgroup hands a fragment of dQ, 64 x 64 values in the register order of an accumulator,
// to the sum in global memory: through shared memory for a bulk addition, or from its registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/integer_sum.h"
#include "hopper/backward_config.h"
#include "prim/global_add.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

// What store_words() multiplies a row of dQ / scale by; the term of its LSE carries it.
PANTILE_DEVICE float held_scale(const uint4& lse_term) {
  return __uint_as_float(lse_term.z) * core::kHeldScale;
}

// Turns a fragment of dQ into words whose sum does not depend on the order (core/integer_sum.h) and
// calls `store`. `row_scale` is that of the thread's two rows. The conversion instruction, last
// resort, takes the unit of the exponentials as long as all those of a step at head dim 128.
// `store` stands in every branch because ptxas gives the words new registers where branches meet.
template <class Store>
PANTILE_DEVICE void store_words(float (&dQ)[32], const float (&row_scale)[2], const Store& store) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dQ[i] = core::hold_term(dQ[i], row_scale[i / 2 % 2]);
    bits |= __float_as_uint(dQ[i]);
  }
  if (__all_sync(prim::kAllLanes, core::all_in_range(bits))) {
    store();
    return;
  }
  bits = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dQ[i] = core::hold_large_term(dQ[i]);
    bits |= core::large_term_bits(dQ[i]);
  }
  if (__all_sync(prim::kAllLanes, core::all_large_in_range(bits))) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      dQ[i] = __uint_as_float(core::large_word(dQ[i]));
    }
    store();
    return;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
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
PANTILE_DEVICE void note_additions(const float (&dQ)[32], const std::uint32_t (&slots)[2],
                                   std::uint32_t* row_max) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
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

// Writes a fragment of dQ to shared memory for a bulk addition, in register order: 16-byte stores
// without conflicts.
template <SumKind kSum>
PANTILE_DEVICE void stage_fragment(float* fragment, float (&dQ)[32], const float (&row_scale)[2]) {
  float4* to = reinterpret_cast<float4*>(fragment) + (threadIdx.x & 127);
  const auto store = [&] {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[j * kWarpgroup] = make_float4(dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2], dQ[4 * j + 3]);
    }
  };
  if constexpr (kSum == SumKind::integer) {
    store_words(dQ, row_scale, store);
  } else {
    store();
  }
}

// Adds 64 x 64 values of dQ to their fragment in global memory.
template <SumKind kSum>
PANTILE_DEVICE void add_fragment(float* fragment, const float (&dQ)[32],
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
