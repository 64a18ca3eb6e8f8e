// The two accumulating roles of the pipeline kernel: products of 64 x 64 and sums of 64 keys x the
// head dim.
#pragma once

#include "hopper/backward/fragment.cuh"
#include "hopper/backward/storage.cuh"
#include "prim/registers.cuh"
#include "prim/wgmma.cuh"
#include "prim/wgmma_row_terms.cuh"

namespace pantile::hopper::pipeline {

// One lane of each warp reports for the warp, after all its lanes are done.
PANTILE_DEVICE void arrive_warp(prim::Mbarrier& barrier) {
  __syncwarp();
  if (prim::lane_index() == 0) {
    prim::arrive(barrier);
  }
}

// `arrive_warp` for buffers that only wgmma reads: the wait for it is already warp-wide.
PANTILE_DEVICE void release(prim::Mbarrier& barrier) {
  if (prim::lane_index() == 0) {
    prim::arrive(barrier);
  }
}

// to = A B^T over kDim columns of two k-major tiles, and terms.
template <class Config, int kDim, bool kTerms>
PANTILE_DEVICE void issue_square(float (&to)[32], std::uint32_t ones, std::uint32_t terms,
                                 std::uint32_t a, std::uint32_t b) {
  prim::wgmma_fence();
  if constexpr (kTerms) {
    prim::wgmma_terms_ss(to, ones, terms);
  } else {
    prim::wgmma_ss_write<Config::kDType, prim::Major::k, prim::Major::k>(to, a, b);
  }
#pragma unroll
  for (int k = kTerms ? 0 : 1; k < kDim / 16; ++k) {
    prim::wgmma_ss<Config::kDType, prim::Major::k, prim::Major::k>(
        to, a + prim::descriptor_step(k / 4 * Config::kTileK * 128 + k % 4 * 32),
        b + prim::descriptor_step(k / 4 * Config::kTileQ * 128 + k % 4 * 32));
  }
  prim::wgmma_commit();
}

// dK or dV of the block: 64 keys x kColumns. Cut in two above 192 columns, because one product of
// N = 256 needs more registers than a thread has at kernel entry (ptxas C7602).
template <class Config, int kColumns>
class Accumulator {
 public:
  PANTILE_DEVICE void clear() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        values_[part][i] = 0.0f;
      }
    }
  }

  // += fragment x rows; the sum runs over the 64 rows of `rows`, an mn-major tile.
  PANTILE_DEVICE void issue(const std::uint32_t (&fragment)[4][4], std::uint32_t rows) {
    prim::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        prim::wgmma_rs<Config::kDType, prim::Major::mn>(
            values_[part], fragment[k],
            rows + prim::descriptor_step(k * 2048 + part * kPart / kPanel * Config::kTileQ * 128));
      }
    }
    prim::wgmma_commit();
  }

  PANTILE_DEVICE void finish() {
    prim::wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      prim::pin(values_[part]);
    }
  }

  PANTILE_DEVICE void store(void* gradient, const Layout& layout, int columns, float scale,
                            const BackwardParams& params, const KeyTile& key_tile) {
    const bool packed = params.keys.cu_seqlens != nullptr;
    std::uint16_t* rows = gradient_rows(gradient, layout, key_tile, packed, key_tile.first_key);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_fragment<Config::kDType>(rows + part * kPart, layout.seq, values_[part], scale,
                                     key_tile.tile * Config::kTileK, key_tile.mask.keys,
                                     columns - part * kPart);
    }
    zero_unattended_keys<Config::kTileK, kWarpgroup>(gradient, layout, columns, key_tile, packed,
                                                     static_cast<int>(threadIdx.x) % kWarpgroup);
  }

 private:
  static constexpr int kParts = kColumns > 192 ? 2 : 1;
  static constexpr int kPart = kColumns / kParts;
  float values_[kParts][kPart / 2];
};

}  // namespace pantile::hopper::pipeline
