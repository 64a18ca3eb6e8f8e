// How a warpgroup of the paired backward kernel writes dK and dV of its 64 keys.
#pragma once

#include "attn/variant_params.h"
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/params.cuh"
#include "hopper/backward/storage.cuh"

namespace pantile::hopper {

template <class Config, bool kDropout, int kCount>
PANTILE_DEVICE void store_key_gradients(const BackwardParams& params,
                                        const attn::VariantParams& variant_params,
                                        const KeyTile& key_tile, int warpgroup,
                                        const float (&dK)[kCount], const float (&dV)[kCount]) {
  constexpr DType kDType = Config::kDType;
  constexpr int kThreads = Config::kConsumers * kWarpgroup;
  const bool packed = params.keys.cu_seqlens != nullptr;
  const int key = key_tile.tile * Config::kTileK + warpgroup * 64;
  const int first_key = key_tile.first_key;
  const int keys = key_tile.mask.keys;
  store_fragment<kDType>(
      gradient_rows(params.grad_v, params.grad_v_layout, key_tile, packed, first_key),
      params.grad_v_layout.seq, dV, kDropout ? variant_params.keep_scale : 1.0f, key, keys,
      params.head_dim_v);
  store_fragment<kDType>(
      gradient_rows(params.grad_k, params.grad_k_layout, key_tile, packed, first_key),
      params.grad_k_layout.seq, dK,
      kDropout ? variant_params.keep_scale * params.scale : params.scale, key, keys,
      params.head_dim);
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  zero_unattended_keys<Config::kTileK, kThreads>(params.grad_v, params.grad_v_layout,
                                                 params.head_dim_v, key_tile, packed, thread);
  zero_unattended_keys<Config::kTileK, kThreads>(params.grad_k, params.grad_k_layout,
                                                 params.head_dim, key_tile, packed, thread);
}

}  // namespace pantile::hopper
