// Tile shapes of the Hopper FP8 forward and what they cost; checked by the C++ compiler too.
#pragma once

#include <cstdint>

#include "attn/fp8_exp.h"
#include "build_options.h"
#include "core/integer.h"
#include "hopper/forward/config.h"
#include "pantile/problem.h"
#include "pantile/registry.h"

namespace pantile::hopper {

// How the output escapes the few bits of the FP8 accumulator.
//   every_step  each step's P V starts from zero and is added to fp32 registers: O = O * a + part
//   folded      P V accumulates for kFoldSteps steps and is then folded, normalised and in fp16,
//               into shared memory; for head dims whose second set of registers does not fit
enum class Fp8Sums { every_step, folded };

struct Fp8Config {
  int head_dim;         // of Q, K, V and O; smaller ones are padded with zeros by TMA
  int math_warpgroups;  // each has 64 rows of the tile
  int stages;           // of K and of V
  int q_buffers;
  bool q_in_registers;  // Q is copied to registers at the start of a tile, which frees its buffer
  Fp8Sums sums;

  static constexpr int kTileK = 128;   // keys of a step, one block of scales
  static constexpr int kOnesRows = 8;  // rows of 1.0 below V^T: their product is the row sum
  static constexpr int kTiles = 4;     // ring of tile descriptions
  static constexpr int kFoldSteps = 8;
  static constexpr int kWarpRows = 16;

  constexpr int tile_q() const { return kRowsPerWarpgroup * math_warpgroups; }
  constexpr int threads() const { return kWarpgroupThreads * (math_warpgroups + 1); }

  // Q and K: rows of 64 or 128 bytes with the swizzle of that width, in panels.
  constexpr int panel_bytes() const { return head_dim < 96 ? 64 : 128; }
  constexpr int panels() const { return core::ceil_div(head_dim, panel_bytes()); }
  constexpr int q_bytes() const { return kRowsPerWarpgroup * panels() * panel_bytes(); }
  constexpr int k_bytes() const { return kTileK * panels() * panel_bytes(); }
  constexpr int k_steps() const { return core::ceil_div(head_dim, 32); }
  // V^T: a row of 128 keys for each dim.
  constexpr int v_rows() const { return head_dim + kOnesRows; }
  constexpr int v_bytes() const { return v_rows() * kTileK; }
  // A warp's rows of O, 16-bit.
  constexpr tile::PanelTile o_tile() const { return {kWarpRows, head_dim}; }

  // Tiles, then up to 1 KiB of barriers and descriptions. NOTE: without room to align the whole,
  // because at head dim 256 there is none; dynamic shared memory starts at a multiple of 1 KiB in
  // kernels that have no static one (the kernel checks).
  constexpr int shared_bytes() const {
    return math_warpgroups * (q_buffers * q_bytes() + 4 * o_tile().bytes()) +
           stages * (k_bytes() + v_bytes()) + tile::kTileAlignment;
  }

  constexpr int producer_registers() const { return math_warpgroups == 2 ? 24 : 32; }
  constexpr int math_registers() const { return math_warpgroups == 2 ? 240 : 160; }

  constexpr bool valid() const {
    return (math_warpgroups == 2 || math_warpgroups == 3) && head_dim % 32 == 0 &&
           v_bytes() % tile::kTileAlignment == 0 && shared_bytes() <= kSharedMemoryBytes &&
           q_buffers + 2 <= kTiles && stages >= 2;
  }
};

// The table. H200, N(0, 1) data, 16384 tokens, hidden 2048; TFLOP/s in
// docs/experiments/fp8.md.
constexpr Fp8Config fp8_config(int head_dim) {
  if (head_dim <= 64) {
    return {64, 3, 4, 2, false, Fp8Sums::every_step};
  }
  if (head_dim <= 96) {
    return {96, 2, 3, 2, true, Fp8Sums::every_step};
  }
  if (head_dim <= 128) {
    return {128, 2, 3, 2, true, Fp8Sums::every_step};
  }
  if (head_dim <= 192) {
    return {192, 2, 2, 1, false, Fp8Sums::folded};
  }
  return {256, 2, 2, 1, false, Fp8Sums::folded};
}

// Trials are compiled with PANTILE_EXPERIMENTS.
constexpr bool fp8_exp_is_built(Fp8Exp exp) {
  return kExperiments || !attn::is_trial(exp);
}

// A kernel's parameters as a type (nvcc 13.0 cannot launch a __global__ template that has a struct
// as a parameter).
template <int kHeadDim, MaskKind kMaskKind, Fp8Exp kExpKind>
struct Fp8Variant {
  static constexpr Fp8Config kConfig = fp8_config(kHeadDim);
  static constexpr MaskKind kMask = kMaskKind;
  static constexpr Fp8Exp kExp = kExpKind;
};

static_assert(fp8_config(64).valid() && fp8_config(96).valid() && fp8_config(128).valid() &&
              fp8_config(192).valid() && fp8_config(256).valid());

}  // namespace pantile::hopper
