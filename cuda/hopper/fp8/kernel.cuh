// FP8 attention forward on Hopper: O = softmax(Q K^T * scale) V and LSE from e4m3 codes with a
// scale for each block of 128 rows, as the quantiser (common/quantize.cuh) lays them out.
//
// A persistent block works through tiles of 64 rows for each of its math warpgroups. Roles:
//   1. loader  claims tiles, loads Q, K and V by TMA                        (load.cuh)
//   2. math    S = Q K^T, softmax, O = O a + P V; each warp stores its rows (math.cuh)
//   3. two warps beside the loader write the rows that seqused_q leaves out (unused_rows.cuh)
//
// Shared memory (storage.cuh) and its owners:
//   Q, K, V  in rings     written by the loader    read by the math warpgroups
//   ones     below V^T    written once, here       read with V
//   O        a place a warp, written and stored by that warp
//
// Scale algebra and layouts: docs/design/fp8.md. Measured and rejected: docs/experiments/fp8.md.
#pragma once

#include "hopper/fp8/load.cuh"
#include "hopper/fp8/math.cuh"
#include "hopper/fp8/storage.cuh"
#include "hopper/unused_rows.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/registers.cuh"

namespace pantile::hopper {

template <Fp8Config kConfig>
PANTILE_DEVICE void init_storage(Fp8Storage<kConfig>& s) {
  constexpr int kMathWarps = 4 * kConfig.math_warpgroups;
  constexpr int kMathThreads = kWarpgroupThreads * kConfig.math_warpgroups;
  for (int i = 0; i < kConfig.q_buffers; ++i) {
    prim::init(s.q_full[i], 1);
    prim::init(s.q_empty[i], kMathThreads);
  }
  for (Fp8Stage& stage : s.stages) {
    prim::init(stage.k_full, 1);
    prim::init(stage.k_empty, kMathThreads);
    prim::init(stage.v_full, 1);
    prim::init(stage.v_empty, kMathWarps);
  }
  prim::fence_mbarrier_init();
}

template <Fp8Config kConfig>
PANTILE_DEVICE void write_ones(Fp8Storage<kConfig>& s) {
  constexpr std::uint32_t kOnes = 0x38383838u;  // four times 1.0
  constexpr int kWords = Fp8Config::kOnesRows * Fp8Config::kTileK / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kConfig.stages * kWords; i += kConfig.threads()) {
    auto* ones =
        reinterpret_cast<std::uint32_t*>(s.v[i / kWords] + kConfig.head_dim * Fp8Config::kTileK);
    ones[i % kWords] = kOnes;
  }
  prim::fence_async_proxy();
}

template <class Variant>
PANTILE_DEVICE void run_fp8_block(const Fp8Maps& maps, const Fp8Params& params) {
  constexpr Fp8Config kConfig = Variant::kConfig;
  static_assert(sizeof(Fp8Storage<kConfig>) <= kConfig.shared_bytes());
  extern __shared__ unsigned char shared[];
  if (prim::shared_address(shared) % tile::kTileAlignment != 0) {
    __trap();
  }
  auto& storage = *reinterpret_cast<Fp8Storage<kConfig>*>(shared);
  const int warp = prim::uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    init_storage<kConfig>(storage);
  }
  write_ones<kConfig>(storage);
  __syncthreads();
  prim::wait_for_previous_grid();

  if (warp < 4) {
    prim::shrink_registers<kConfig.producer_registers()>();
    if (warp == 0 && prim::elect_one()) {
      Fp8Loader<kConfig>(storage, maps, params).run();
    } else if (warp >= 2 && params.seqused_q != nullptr) {
      write_unused_rows(params, 2, static_cast<int>(threadIdx.x) - 2 * 32);
    }
  } else {
    prim::grow_registers<kConfig.math_registers()>();
    Fp8MathWarpgroup<Variant>(storage, maps, params, warp / 4 - 1, warp % 4).run();
  }
}

template <class Variant>
__global__ void __launch_bounds__(Variant::kConfig.threads(), 1)
    forward_fp8_kernel(const __grid_constant__ Fp8Maps maps,
                       const __grid_constant__ Fp8Params params) {
  run_fp8_block<Variant>(maps, params);
}

// The same under the name of kernels that are built with PANTILE_EXPERIMENTS only.
template <class Variant>
__global__ void __launch_bounds__(Variant::kConfig.threads(), 1)
    trial_forward_fp8_kernel(const __grid_constant__ Fp8Maps maps,
                             const __grid_constant__ Fp8Params params) {
  run_fp8_block<Variant>(maps, params);
}

}  // namespace pantile::hopper
