// The two matrix products of a step of the Hopper forward, S = Q K^T and O += P V, for one math
// warpgroup, and where their operands lie.
//
// Q, K and V are tiles in shared memory, P is in registers. (P by way of shared memory, which
// leaves registers for 192 keys a step at head dim 64, is slower:
// docs/experiments/hopper-forward.md.)
#pragma once

#include "hopper/forward/storage.cuh"
#include "prim/warp.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper {

template <ForwardConfig kConfig, DType kDType, MaskKind kMask>
class Products {
 public:
  PANTILE_DEVICE Products(ForwardStorage<kConfig>& s, int group) {
    q_ = prim::descriptor(prim::shared_address(s.q[0][group]));
    k_ = prim::descriptor(prim::shared_address(s.k[0]));
    v_ = prim::descriptor(prim::shared_address(s.v[0]), kConfig.v_tile().panel_bytes());
    if constexpr (kConfig.math_warpgroups == 2 || kMask == MaskKind::full) {
      // Opaque from here on, or ptxas works them out anew in every step: 16 instructions of 515 at
      // head dim 64. With a mask, three warpgroups have no registers for that.
      asm volatile("" : "+r"(q_), "+r"(k_), "+r"(v_));
    }
  }

  // S = Q K^T with the `use`-th tile of K.
  PANTILE_DEVICE void issue_scores(float (&S)[kConfig.tile_k / 2], std::uint32_t use,
                                   int q_buffer) const {
    const std::uint32_t k = at(k_, buffer_of<kConfig.k_stages>(use), kConfig.k_tile().bytes());
    const std::uint32_t q = at(q_, q_buffer, kConfig.math_warpgroups * kConfig.q_tile().bytes());
    prim::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kConfig.head_dim / 16; ++step) {
      const std::uint32_t a = q + step_in(kConfig.q_tile(), step);
      const std::uint32_t b = k + step_in(kConfig.k_tile(), step);
      if (step == 0) {
        prim::wgmma_ss_write<kDType, kMajorK, kMajorK>(S, a, b);
      } else {
        prim::wgmma_ss<kDType, kMajorK, kMajorK>(S, a, b);
      }
    }
    prim::wgmma_commit();
  }

  // O += P V with the `use`-th tile of V, or O = P V when `started` is 0.
  PANTILE_DEVICE void issue_output(float (&O)[kConfig.head_dim_v / 2], std::uint32_t use,
                                   int started) const {
    const std::uint32_t v = at(v_, buffer_of<kConfig.v_stages>(use), kConfig.v_tile().bytes());
    prim::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kConfig.tile_k / 16; ++step) {
      const std::uint32_t b = v + prim::descriptor_step(step * 16 * tile::kPanelRowBytes);
      prim::wgmma_rs<kDType, kMajorMN>(O, P[step], b, step == 0 ? started : 1);
    }
    prim::wgmma_commit();
  }

  // The operand of issue_output, which must not be in flight when it is written: columns 16 k to
  // 16 k + 15 of the weights, rounded to 16 bits, are P[k] (prim/wgmma.cuh).
  std::uint32_t P[kConfig.tile_k / 16][4];

 private:
  static constexpr prim::Major kMajorK = prim::Major::k, kMajorMN = prim::Major::mn;

  // Of stage `stage`, in a uniform register.
  PANTILE_DEVICE static std::uint32_t at(std::uint32_t first, int stage, int stage_bytes) {
    return static_cast<std::uint32_t>(
        prim::uniform(static_cast<int>(first + prim::descriptor_step(stage * stage_bytes))));
  }

  // From the begin of a k-major tile to its columns 16 * step.
  PANTILE_DEVICE static constexpr std::uint32_t step_in(tile::PanelTile tile, int step) {
    return prim::descriptor_step(step / 4 * tile.panel_bytes() + step % 4 * 32);
  }

  std::uint32_t q_, k_, v_;  // descriptors of the first buffer or stage
};

}  // namespace pantile::hopper
