// The products S^T and dP^T of the paired backward kernel.
#pragma once

#include "prim/wgmma.cuh"
#include "prim/wgmma_row_terms.cuh"

namespace pantile::hopper {

// A x B^T over the head dim, both k-major, for the 64 keys of a warpgroup and a tile of rows.
// `terms` (of rows) times `ones` are added if kTerms: descriptors where the steps have 128 rows,
// else `ones` is a word of a fragment.
template <class Config, bool kTerms>
PANTILE_DEVICE void issue_scores(float (&to)[Config::kTileQ / 2], std::uint32_t ones,
                                 std::uint32_t a, std::uint32_t b, std::uint32_t terms) {
  constexpr DType kDType = Config::kDType;
  constexpr int kRowPanel = Config::kTileQ * 128;  // bytes of a panel of q and grad_o
  prim::wgmma_fence();
  if constexpr (!kTerms) {
    prim::wgmma_ss_write<kDType, prim::Major::k, prim::Major::k>(to, a, b);
  } else if constexpr (Config::kTileQ == 128) {
    prim::wgmma_terms_ss(to, ones, terms);
  } else {
    prim::wgmma_terms_rs(to, ones, 0u, terms);
  }
#pragma unroll
  for (int k = kTerms ? 0 : 1; k < Config::kHeadDim / 16; ++k) {
    prim::wgmma_ss<kDType, prim::Major::k, prim::Major::k>(
        to, a + prim::descriptor_step(k / 4 * Config::kTileK * 128 + k % 4 * 32),
        b + prim::descriptor_step(k / 4 * kRowPanel + k % 4 * 32));
  }
  prim::wgmma_commit();
}

}  // namespace pantile::hopper
