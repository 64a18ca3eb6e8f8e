// Attention forward on Hopper: O = softmax(Q K^T * scale) V, LSE, in one persistent kernel.
//
// A block works through tiles of 64 rows for each of its math warpgroups; a step is one tile of
// keys, from the last one down. Roles, and the file that holds each:
//   1. loader  claims tiles, loads Q, K and V by TMA                     (load.cuh)
//   2. guards  keep what is not attended to out of V                     (guard.cuh)
//   3. math    S = Q K^T, softmax, O += P V; several warpgroups in turn  (math.cuh)
//   4. storer  sends finished tiles of O to global memory by TMA         (store.cuh)
//
// Shared memory (storage.cuh) and its owners:
//   Q    one buffer or more   written by the loader              read by the math warpgroups
//   K, V two stages or more   written by the loader, V mended by the guards    read by the math
//   O    in Q's or V's place  written by the math warpgroups     read by the storer
//
// More in docs/design/hopper-forward.md (tile shapes, budgets); measurements and variants in
// docs/experiments/hopper-forward.md.
#pragma once

#include "attn/bias_tile.cuh"
#include "hopper/forward/guard.cuh"
#include "hopper/forward/load.cuh"
#include "hopper/forward/math.cuh"
#include "hopper/forward/roles.cuh"
#include "hopper/forward/storage.cuh"
#include "hopper/forward/store.cuh"
#include "hopper/unused_rows.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/registers.cuh"

namespace pantile::hopper {

template <ForwardConfig kConfig>
PANTILE_DEVICE void init_storage(ForwardStorage<kConfig>& s) {
  constexpr int kMathWarps = 4 * kConfig.math_warpgroups;
  for (int i = 0; i < kConfig.q_buffers; ++i) {
    prim::init(s.q_full[i], 1);
    prim::init(s.q_empty[i], kConfig.output_in_q() ? 1 : kMathWarps);
    prim::init(s.o_full[i], kMathWarps);
  }
  prim::init(s.o_empty, 1);
  for (int i = 0; i < kConfig.k_stages; ++i) {
    prim::init(s.k_full[i], 1);
    prim::init(s.k_empty[i], kMathWarps);
  }
  for (int i = 0; i < kConfig.v_stages; ++i) {
    prim::init(s.v_full[i], 1);
    prim::init(s.v_empty[i], kMathWarps);
  }
  for (int i = 0; i < ForwardStorage<kConfig>::kOrders; ++i) {
    prim::init(s.order_full[i], 1);
    prim::init(s.order_done[i], kGuardWarps);
  }
  for (int i = 0; i < ForwardConfig::kTiles; ++i) {
    s.tainted[i] = 0;
    s.needs_repair[i] = 0;
  }
  s.loader = LoaderState{0, 0, 0, 0, true};
  prim::fence_mbarrier_init();
}

// The kernel, whose parameters are the launch's. Shape: a ForwardVariant; Walk: see walk.cuh.
template <class Shape, DType kDType, class Variant, class Walk = SpanWalk,
          KeySource kSource = KeySource{}>
PANTILE_DEVICE void forward_body(const ForwardMaps& maps, const ForwardParams& params,
                                 const attn::VariantParams& variant_params) {
  constexpr ForwardConfig kConfig = Shape::kConfig;
  // Only where tiles may be partly hidden are finished ones scanned, and done again.
  static_assert(Variant::kSharedBytes ==
                (kConfig.bias_tile ? attn::bias_tile_bytes(kConfig.tile_k) : 0));
  static_assert(!Variant::kMasks || Shape::kMask == MaskKind::window);
  static_assert(32 * kGuardWarps == kUnusedRowThreads);
  static_assert(sizeof(ForwardStorage<kConfig>) + tile::kTileAlignment <= kConfig.shared_bytes());
  extern __shared__ unsigned char shared[];
  const std::uint32_t misaligned = prim::shared_address(shared) % tile::kTileAlignment;
  auto& storage = *reinterpret_cast<ForwardStorage<kConfig>*>(
      shared + (tile::kTileAlignment - misaligned) % tile::kTileAlignment);
  const int warp = prim::uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    init_storage<kConfig>(storage);
    prim::prefetch_tensor_map(&maps.q);
    prim::prefetch_tensor_map(&maps.k);
    prim::prefetch_tensor_map(&maps.v);
  }
  prim::allow_next_grid();
  __syncthreads();
  prim::wait_for_previous_grid();

  if (warp < 4) {
    prim::shrink_registers<kConfig.producer_registers()>();
    switch (static_cast<HelperWarp>(warp)) {
      case HelperWarp::load:
        if (prim::elect_one()) {
          Loader<kConfig, Shape::kMask, Walk, kSource, Variant::kMasks>(storage, maps, params,
                                                                        variant_params)
              .run();
        }
        break;
      case HelperWarp::store:
        Storer<kConfig, kDType, Shape::kMask, Walk, kSource, Variant>(storage, maps, params,
                                                                      variant_params)
            .run();
        break;
      case HelperWarp::guard0:
      case HelperWarp::guard1:
        Guard<kConfig, kDType>(storage, warp - static_cast<int>(HelperWarp::guard0)).run();
        if (params.seqused_q != nullptr) {
          write_unused_rows(params, params.output_f32 ? 4 : 2,
                            static_cast<int>(threadIdx.x) % kUnusedRowThreads);
        }
        break;
    }
  } else {
    prim::grow_registers<kConfig.math_registers()>();
    MathWarpgroup<kConfig, kDType, Shape::kMask, Variant, Walk, kSource>(
        storage, params, variant_params, warp / 4 - 1, warp % 4)
        .run();
  }
}

template <class Shape, DType kDType>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardParams params) {
  forward_body<Shape, kDType, attn::NoVariant>(maps, params, attn::VariantParams{});
}

}  // namespace pantile::hopper
