// What the paired backward kernel does for variants between its products (attn/variant_grad.cuh).
#pragma once

#include "attn/variant_grad.cuh"
#include "hopper/backward/fragment.cuh"
#include "hopper/backward/params.cuh"
#include "hopper/backward/storage.cuh"
#include "prim/convert.cuh"
#include "prim/math.cuh"

namespace pantile::hopper {

// Where a thread's fragment of tile `tile` of rows lies. Worked out anew where it is used: it would
// cost registers that the accumulators need.
template <class Config>
PANTILE_DEVICE attn::TransposedPlace place_of(const KeyTile& key_tile, int tile, int warpgroup) {
  const int thread = fresh_thread();
  const int row = tile * Config::kTileQ + 2 * (thread & 3);
  const int key =
      key_tile.tile * Config::kTileK + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
  const core::Mask& mask = key_tile.mask;
  return attn::TransposedPlace{key_tile.first_row + row, key_tile.first_key + key,
                               key_tile.first_row + mask.rows, key_tile.first_key + mask.keys,
                               key - row - mask.shift()};
}

// Whether tiles begin with a cell of the dropout mask: not where rows or keys before them, which
// see nothing, are no multiple of 16.
PANTILE_DEVICE bool begins_with_cell(const attn::VariantParams& params, const KeyTile& key_tile) {
  const std::uint32_t row = params.row_offset + static_cast<std::uint32_t>(key_tile.first_row);
  const std::uint32_t key = params.key_offset + static_cast<std::uint32_t>(key_tile.first_key);
  return prim::uniform(static_cast<int>((row | key) % 16)) == 0;
}

// Additive terms: from raw scores, base-2 logits.
template <int kCount, class Variant>
PANTILE_DEVICE void added_logits(float (&S)[kCount], float scale_log2, const Variant& variant,
                                 const attn::VariantParams& params,
                                 const attn::TransposedPlace& at) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    S[i] *= scale_log2;
  }
  variant.add_terms(params, at, S);
}

// Softcap: from its function in S, the weights and, in S, weights times the slope.
template <int kCount, class Variant, class Terms>
PANTILE_DEVICE void capped_weights(float (&P)[kCount], float (&S)[kCount], const Terms& lse,
                                   const Variant& variant, const attn::VariantParams& params,
                                   const attn::TransposedPlace& at) {
  const int first = 2 * (fresh_thread() & 3);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float lse_log2 = __uint_as_float(lse.row[attn::column_of(i) + first].x);
    P[i] = fmaf(S[i], params.cap_log2, -lse_log2);
  }
  variant.add_terms(params, at, P);
  variant.hide_raw(params, at, S, P);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    P[i] = prim::exp2_approx(P[i]);
    S[i] = P[i] * fmaf(-S[i], S[i], 1.0f);
  }
}

// A score that is not additive: the same from its values in P and its slopes in S.
template <int kCount, class Variant, class Terms>
PANTILE_DEVICE void scored_weights(float (&P)[kCount], float (&S)[kCount], const Terms& lse,
                                   const Variant& variant, const attn::VariantParams& params,
                                   const attn::TransposedPlace& at) {
  variant.hide_raw(params, at, S, P);
  const int first = 2 * (fresh_thread() & 3);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float lse_log2 = __uint_as_float(lse.row[attn::column_of(i) + first].x);
    P[i] = prim::exp2_approx(fmaf(P[i], params.cap_log2, -lse_log2));
    S[i] = Variant::kBoundedSlopes || P[i] != 0.0f ? P[i] * S[i] : 0.0f;
  }
}

// From raw scores in S of tile `tile` of rows the weights and, in S, weights times the slope.
// `masked`: the window or the mask of the walk hides some of it.
template <class Config, MaskKind kMask, attn::GradHooks kHooks, int kCount, class Walk,
          class Variant, class Terms>
PANTILE_DEVICE void raw_weights(float (&P)[kCount], float (&S)[kCount], bool masked,
                                const Walk& walk, const KeyTile& key_tile, int tile, int warpgroup,
                                const Terms& lse, const Variant& variant,
                                const attn::VariantParams& params) {
  const attn::TransposedPlace at = place_of<Config>(key_tile, tile, warpgroup);
  const core::Mask& mask = key_tile.mask;
  const int key = key_tile.tile * Config::kTileK + warpgroup * 64;
  const int row = tile * Config::kTileQ;
  const auto hide = [&](float (&x)[kCount], float value) {
    mask_scores<kMask>(x, mask, key, row, value);
    walk.hide(x, value);
  };
  if constexpr (kHooks.raw_score) {
    variant.weigh(params, at, S, P);
    if (masked) {
      hide(P, attn::kHiddenCapped);
      hide(S, 0.0f);
    }
    scored_weights(P, S, lse, variant, params, at);
  } else {
    variant.cap(params, S);
    if (masked) {
      hide(S, attn::kHiddenCapped);
    }
    capped_weights(P, S, lse, variant, params, at);
  }
}

// Minus delta / keep_scale of the query of register i: dP of a weight that dropout removed.
template <class Terms>
PANTILE_DEVICE float minus_delta(const Terms& delta, int i) {
  return __uint_as_float(delta.row[attn::column_of(i) + 2 * (fresh_thread() & 3)].w);
}

// The sum of a warp for the gradient of a head's slope.
PANTILE_DEVICE void store_slope_part(const attn::VariantParams& variant,
                                     const BackwardParams& params, const KeyTile& key_tile,
                                     int head, int warp, float sum) {
  constexpr int kWarps = 8;
  if (prim::lane_index() == 0) {
    const std::int64_t tile = params.key_tiles.first(key_tile.batch) + key_tile.tile;
    variant.grad_alibi_parts[(head * variant.key_tile_count + tile) * kWarps + warp] = sum;
  }
}

}  // namespace pantile::hopper
