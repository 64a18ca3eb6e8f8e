// Tile shapes of the Hopper forward and what they cost. The C++ compiler checks the budgets too, so
// a shape that cannot launch does not build on any machine.
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "pantile/registry.h"
#include "tile/panel.h"

namespace pantile::hopper {

inline constexpr int kSharedMemoryBytes = 232448;  // that one block may have (227 KiB)
inline constexpr int kRegistersPerThreadAtEntry[] = {0, 0, 168, 128};  // by math warpgroups
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kRowsPerWarpgroup = 64;  // the M of wgmma

// Where a finished tile of O waits for its TMA store.
enum class OutputPlace : std::uint8_t {
  in_q,  // two Q buffers; O takes the place of the Q it came from. The next tile's Q is already
         // there, so its first product starts while the last one of this tile runs.
  in_v,  // one Q buffer; O lies in the stages of V. For head dims whose two Q buffers do not fit.
};

struct ForwardConfig {
  int head_dim;         // of Q and K; smaller ones are padded with zeros by TMA
  int head_dim_v;       // of V and O
  int tile_k;           // keys per step
  int math_warpgroups;  // each has 64 rows of the tile
  OutputPlace output;
  // Quarters of a step's exponentials that run before the wait for the product P V of the step
  // before; the rest runs after it, together with the conversion of P.
  int early_quarters;

  static constexpr int kStages = 2;  // of K and of V; more did not help
  static constexpr int kTiles = 4;   // ring of tile descriptions

  constexpr int tile_q() const { return kRowsPerWarpgroup * math_warpgroups; }
  constexpr int threads() const { return kWarpgroupThreads * (math_warpgroups + 1); }
  constexpr int q_buffers() const { return output == OutputPlace::in_q ? 2 : 1; }

  constexpr tile::PanelTile q_tile() const { return {kRowsPerWarpgroup, head_dim}; }
  constexpr tile::PanelTile o_tile() const { return {kRowsPerWarpgroup, head_dim_v}; }
  constexpr tile::PanelTile k_tile() const { return {tile_k, head_dim}; }
  constexpr tile::PanelTile v_tile() const { return {tile_k, head_dim_v}; }

  // Tiles, then up to 1 KiB of barriers and descriptions, then 1 KiB to align the whole.
  constexpr int shared_bytes() const {
    return q_buffers() * math_warpgroups * q_tile().bytes() +
           kStages * (k_tile().bytes() + v_tile().bytes()) + 2 * tile::kTileAlignment;
  }

  // setmaxnreg: what the producer's warpgroup gives up, the math warpgroups get.
  constexpr int producer_registers() const { return math_warpgroups == 2 ? 40 : 32; }
  constexpr int math_registers() const { return math_warpgroups == 2 ? 232 : 160; }
  // Accumulators S and O and the operand P, which are alive together.
  constexpr int matrix_registers() const { return tile_k / 2 + head_dim_v / 2 + tile_k / 4; }

  constexpr bool valid() const {
    const int entry = kRegistersPerThreadAtEntry[math_warpgroups];
    return (math_warpgroups == 2 || math_warpgroups == 3) && head_dim % 16 == 0 &&
           head_dim_v % 16 == 0 && tile_k % 16 == 0 && tile_k <= 256 && early_quarters >= 0 &&
           early_quarters <= 4 && shared_bytes() <= kSharedMemoryBytes &&
           producer_registers() + math_warpgroups * math_registers() <=
               entry * (math_warpgroups + 1) &&
           matrix_registers() + 24 <= math_registers() &&
           (output == OutputPlace::in_q
                ? o_tile().bytes() <= q_tile().bytes()
                : math_warpgroups * o_tile().bytes() <= kStages * v_tile().bytes());
  }
};

// A row of the kernel table holds one or two shapes; the second one serves some sequence lengths.
struct ForwardShapes {
  ForwardConfig main;
  ForwardConfig other;
  bool has_other;
};

// ------------------------------------------------------------------------------------------------
// The table. H200, bf16, 16384 tokens, hidden 2048; TFLOP/s in docs/hopper.md.

constexpr ForwardShapes forward_shapes(int head_dim, int head_dim_v, MaskKind mask) {
  constexpr OutputPlace in_q = OutputPlace::in_q;
  constexpr OutputPlace in_v = OutputPlace::in_v;
  const bool full = mask == MaskKind::full;
  if (head_dim <= 64 && head_dim_v <= 64) {
    return {{64, 64, 128, 3, in_q, 4}, {64, 64, 128, 2, in_q, 2}, true};
  }
  if (head_dim <= 96 && head_dim_v <= 96) {
    return {{96, 96, 128, 2, in_q, 2}, {96, 96, 160, 2, in_q, 2}, full};
  }
  if (head_dim <= 128 && head_dim_v <= 128) {
    return {{128, 128, 128, 2, in_q, 2}, {128, 128, 160, 2, in_q, 2}, full};
  }
  if (head_dim <= 192 && head_dim_v <= 128) {
    return {{192, 128, 128, 2, in_v, 2}, {}, false};
  }
  if (head_dim <= 192 && head_dim_v <= 192) {
    return {{192, 192, full ? 112 : 96, 2, in_v, 2}, {}, false};
  }
  return {{256, 256, full ? 80 : 64, 2, in_v, 2}, {}, false};
}

// Does the second shape serve these lengths better?
constexpr bool prefers_other_shape(int head_dim, MaskKind mask, std::int64_t seqlen_q,
                                   std::int64_t seqlen_k) {
  if (head_dim <= 64) {
    return mask != MaskKind::full && seqlen_q <= 1024;  // tiles of 128 rows waste less diagonal
  }
  return seqlen_k >= 8192;  // more keys per step: fewer steps, but a larger ragged end
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

namespace detail {
constexpr bool all_shapes_valid() {
  const int dims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
  const MaskKind masks[] = {MaskKind::full, MaskKind::causal, MaskKind::window};
  for (const auto& dim : dims) {
    for (const MaskKind mask : masks) {
      const ForwardShapes shapes = forward_shapes(dim[0], dim[1], mask);
      if (!shapes.main.valid() || (shapes.has_other && !shapes.other.valid())) {
        return false;
      }
    }
  }
  return true;
}
}  // namespace detail
static_assert(detail::all_shapes_valid());

}  // namespace pantile::hopper
