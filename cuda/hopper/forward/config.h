// Tile shapes of the Hopper forward and what they cost. The C++ compiler checks the budgets too, so
// a shape that cannot launch does not build on any machine.
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "hopper/limits.h"
#include "pantile/registry.h"
#include "tile/panel.h"

namespace pantile::hopper {

inline constexpr int kRegistersPerThreadAtEntry[] = {0, 0, 168, 128};  // by math warpgroups
inline constexpr int kRowsPerWarpgroup = 64;                           // the M of wgmma

struct ForwardConfig {
  int head_dim;         // of Q and K; smaller ones are padded with zeros by TMA
  int head_dim_v;       // of V and O
  int tile_k;           // keys per step
  int math_warpgroups;  // each has 64 rows of the tile
  // Q buffers. With two or more, a finished tile of O takes the place of the Q it came from and the
  // next tile's Q is already there, so that its first product starts while the last one of this
  // tile runs. With one, O lies in the stages of V: for head dims whose two Q buffers do not fit.
  int q_buffers;
  // Groups of 8 keys whose exponentials a step computes before it waits for the product P V of the
  // step before, in registers of their own: 4 each.
  int ahead_groups;
  // The wait for the product P V of the step before comes before that, not after it: at three math
  // warpgroups, where only the registers of the old P have room for it.
  bool output_first;
  // With one Q buffer: O of warpgroup 0 has a place of its own and that of warpgroup 1 lies in the
  // stage of V used last, so that the next tile's first V can be loaded at once.
  bool o_apart = false;
  int k_stages = 2;
  int v_stages = 2;
  // A place for each warp's part of a tile of a 16-bit bias (attn/bias_tile.cuh).
  bool bias_tile = false;

  static constexpr int kTiles = 8;  // ring of tile descriptions

  constexpr int tile_q() const { return kRowsPerWarpgroup * math_warpgroups; }
  constexpr int threads() const { return kWarpgroupThreads * (math_warpgroups + 1); }
  constexpr bool output_in_q() const { return q_buffers > 1; }

  constexpr tile::PanelTile q_tile() const { return {kRowsPerWarpgroup, head_dim}; }
  constexpr tile::PanelTile o_tile() const { return {kRowsPerWarpgroup, head_dim_v}; }
  constexpr tile::PanelTile k_tile() const { return {tile_k, head_dim}; }
  constexpr tile::PanelTile v_tile() const { return {tile_k, head_dim_v}; }

  // Tiles, then up to 1 KiB of barriers and descriptions, then 1 KiB to align the whole.
  constexpr int bias_bytes() const { return bias_tile ? 2 * tile_q() * tile_k : 0; }
  constexpr int shared_bytes() const {
    return q_buffers * math_warpgroups * q_tile().bytes() + k_stages * k_tile().bytes() +
           v_stages * v_tile().bytes() + (o_apart ? o_tile().bytes() : 0) + bias_bytes() +
           2 * tile::kTileAlignment;
  }

  // setmaxnreg: what the producer's warpgroup gives up, the math warpgroups get.
  constexpr int producer_registers() const { return math_warpgroups == 2 ? 40 : 32; }
  constexpr int math_registers() const { return math_warpgroups == 2 ? 232 : 160; }
  // Accumulators S and O and the operand P, which are alive together.
  constexpr int matrix_registers() const { return tile_k / 2 + head_dim_v / 2 + tile_k / 4; }

  constexpr bool valid() const {
    const int entry = kRegistersPerThreadAtEntry[math_warpgroups];
    return (math_warpgroups == 2 || math_warpgroups == 3) && head_dim % 16 == 0 &&
           head_dim_v % 16 == 0 && tile_k % 16 == 0 && tile_k <= 256 && ahead_groups >= 1 &&
           ahead_groups <= tile_k / 8 && shared_bytes() <= kSharedMemoryBytes &&
           producer_registers() + math_warpgroups * math_registers() <=
               entry * (math_warpgroups + 1) &&
           matrix_registers() + 24 <= math_registers() && q_buffers >= 1 &&
           q_buffers + 2 <= kTiles && output_fits();
  }

  constexpr bool output_fits() const {
    if (output_in_q()) {
      return !o_apart && o_tile().bytes() <= q_tile().bytes();
    }
    return v_stages == 2 &&
           (o_apart ? math_warpgroups == 2 && o_tile().bytes() <= v_tile().bytes()
                    : math_warpgroups * o_tile().bytes() <= v_stages * v_tile().bytes());
  }
};

// A row of the kernel table holds one or two shapes; the second one serves some sequence lengths.
struct ForwardShapes {
  ForwardConfig main;
  ForwardConfig other;
  bool has_other;
};

// ------------------------------------------------------------------------------------------------
// The table. H200, bf16, 16384 tokens, hidden 2048; TFLOP/s in
// docs/experiments/hopper-forward.md.

constexpr ForwardShapes forward_shapes(int head_dim, int head_dim_v, MaskKind mask) {
  const bool full = mask == MaskKind::full;
  if (head_dim <= 64 && head_dim_v <= 64) {
    return {{64, 64, 128, 3, 3, 4, true, false, 4, 4},
            {64, 64, 128, 2, 4, 6, false, false, 4, 4},
            !full};
  }
  if (head_dim <= 80 && head_dim_v <= 80) {  // one sixth less work than in the tiles of 96 columns
    return {{80, 80, 128, 2, 3, 6, false}, {80, 80, 160, 2, 2, 4, false}, full};
  }
  if (head_dim <= 96 && head_dim_v <= 96) {
    return {{96, 96, 128, 2, 3, 6, false}, {96, 96, 160, 2, 2, 4, false}, full};
  }
  if (head_dim <= 128 && head_dim_v <= 128) {
    // Without a mask the third Q buffer is worth less than a third stage of V.
    return {full ? ForwardConfig{128, 128, 128, 2, 2, 6, false, false, 2, 3}
                 : ForwardConfig{128, 128, 128, 2, 3, 6, false},
            {},
            false};
  }
  if (head_dim <= 192 && head_dim_v <= 128) {
    return {{192, 128, 128, 2, 1, 6, false}, {}, false};
  }
  if (head_dim <= 192 && head_dim_v <= 192) {
    return {{192, 192, 96, 2, 1, 6, false, true}, {}, false};
  }
  return {{256, 256, 64, 2, 1, 4, false, true}, {}, false};
}

// Whether a tile of a bias of 16 bits has a place beside those of a shape, and the shape with it.
constexpr bool has_bias_tile(const ForwardConfig& config) {
  return config.tile_k == 128 && config.math_warpgroups == 2 && config.output_in_q();
}

constexpr ForwardConfig with_bias_tile(ForwardConfig config) {
  config.bias_tile = true;
  const int columns = config.head_dim > config.head_dim_v ? config.head_dim : config.head_dim_v;
  if (columns > tile::kPanelColumns) {
    config.q_buffers = 2;
    config.k_stages = 2;
    config.v_stages = 2;
  }
  return config;
}

// Does the second shape serve these lengths better?
constexpr bool prefers_other_shape(int head_dim, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  if (head_dim <= 64) {
    return seqlen_q <= 1024;  // tiles of 128 rows waste less on the edge of the mask
  }
  return seqlen_k >= 2048;  // more keys per step: fewer steps, but a larger ragged end
}

// A kernel's shape and mask as a type (nvcc 13.0 cannot launch a __global__ template that has a
// struct as a parameter).
template <int kHeadDim, int kHeadDimV, MaskKind kMaskKind, bool kOtherShape>
struct ForwardVariant {
  static constexpr MaskKind kMask = kMaskKind;
  static constexpr ForwardConfig kConfig =
      kOtherShape ? forward_shapes(kHeadDim, kHeadDimV, kMaskKind).other
                  : forward_shapes(kHeadDim, kHeadDimV, kMaskKind).main;
};

// The same with a place for a bias.
template <class Shape>
struct WithBiasTile {
  static constexpr MaskKind kMask = Shape::kMask;
  static constexpr ForwardConfig kConfig = with_bias_tile(Shape::kConfig);
};

namespace detail {
constexpr bool all_shapes_valid() {
  const int dims[][2] = {{64, 64},   {80, 80},   {96, 96},  {128, 128},
                         {192, 128}, {192, 192}, {256, 256}};
  const MaskKind masks[] = {MaskKind::full, MaskKind::causal, MaskKind::window};
  for (const auto& dim : dims) {
    for (const MaskKind mask : masks) {
      const ForwardShapes shapes = forward_shapes(dim[0], dim[1], mask);
      if (!shapes.main.valid() || (shapes.has_other && !shapes.other.valid())) {
        return false;
      }
      if (has_bias_tile(shapes.main) && !with_bias_tile(shapes.main).valid()) {
        return false;
      }
      if (has_bias_tile(shapes.other) && !with_bias_tile(shapes.other).valid()) {
        return false;
      }
    }
  }
  return true;
}
}  // namespace detail
static_assert(detail::all_shapes_valid());

}  // namespace pantile::hopper
