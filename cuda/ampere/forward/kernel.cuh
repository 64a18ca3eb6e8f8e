// Attention forward for every GPU from sm_80 on: cp.async, ldmatrix, mma.sync. One thread block
// computes O and LSE of `tile_q` query rows of one head; each warp owns 16 or 32 of the rows from
// scores to output, so that the softmax needs no exchange between warps.
//
//   1 locate     block -> (row tile, head, sequence); which key tiles are seen, and which by all
//   2 fetch      Q once, then K and V tile by tile, from the last seen key down, by all threads
//   3 for each key tile
//       S = Q K^T     K through ldmatrix, Q from registers or through ldmatrix
//       variant       changes S; plain attention has none (variant.cuh)
//       mask          only in tiles that some row of the block does not see in full
//       softmax       references, exponentials, P to 16 bits (softmax.cuh)
//       O += P V      P stays in registers, V through ldmatrix.trans
//   4 store      O by way of the warp's own rows of Q's buffer, LSE from registers
//
//   buffer              written by              read by                    until
//   storage.q           cp.async, all threads   the warp that owns a row   its last S; then O
//   storage.stages[].k  cp.async, all threads   all warps                  barrier after their S
//   storage.stages[].v  cp.async, all threads   all warps                  barrier after their P V
//
// The three loops below differ in when tiles are fetched and in how one warp's products, exponents
// and maxima are interleaved. All go through the tiles in the same order and give the same bits.
#pragma once

#include "ampere/forward/block.cuh"
#include "ampere/forward/params.cuh"
#include "ampere/storage.cuh"
#include "prim/cp_async.cuh"

namespace pantile::ampere {

// Of the scores of tile n, all of which are there: mask, maxima, references.
template <bool kMasked, class Block>
PANTILE_DEVICE void finish_scores(Block& block, typename Block::Scores& s, int n) {
  block.change_scores(s, n);
  if constexpr (kMasked) {
    block.keys.mask_scores(s, n);
  }
  block.softmax.take_max(s);
  block.raise_references(s);
}

template <bool kMasked, class Config, class Block>
PANTILE_DEVICE void value_product(Block& block, typename Block::Scores& s, int stage, int n,
                                  int groups) {
  if constexpr (Config::kLongRows) {
    block.template long_value_product<kMasked>(s, stage, n);
  } else {
    block.template value_product<kMasked>(s, stage, n, groups);
  }
  if constexpr (!kMasked) {
    block.set_sums_apart(n);
  }
}

// Two stages, tile n in stage n % 2: one barrier a tile. Behind it, all warps are done with the
// stage that is refilled.
template <bool kMasked, class Config, class Block>
PANTILE_DEVICE void staged_tiles(Block& block, int& n, int last) {
#pragma unroll 1
  for (; n >= last; --n) {
    prim::wait_copies<0>();
    block.publish_values(n & 1, n, kMasked);
    block.template fetch_keys<false>(n - 1, (n - 1) & 1);
    block.template fetch_values<false>(n - 1, (n - 1) & 1);
    prim::commit_copies();

    typename Block::Scores s;
    const int groups = kMasked ? block.keys.seen_groups(n) : Block::kKeyGroups;
    block.template score_product<kMasked>(s, n & 1, groups);
    finish_scores<kMasked>(block, s, n);
    value_product<kMasked, Config>(block, s, n & 1, n, groups);
  }
}

// One stage: V is fetched under S, the next K under P V; two barriers a tile.
template <bool kMasked, class Config, class Block>
PANTILE_DEVICE void single_stage_tiles(Block& block, int& n, int last) {
#pragma unroll 1
  for (; n >= last; --n) {
    block.template fetch_values<kMasked>(n, 0);
    prim::commit_copies();

    typename Block::Scores s;
    const int groups = kMasked ? block.keys.seen_groups(n) : Block::kKeyGroups;
    block.template score_product<kMasked>(s, 0, groups);
    prim::wait_copies<0>();
    block.publish_values(0, n, kMasked);
    block.template fetch_keys<false>(n - 1, 0);
    prim::commit_copies();
    finish_scores<kMasked>(block, s, n);
    value_product<kMasked, Config>(block, s, 0, n, groups);
    prim::wait_copies<0>();
    __syncthreads();
  }
}

template <bool kMasked, class Config, class Block>
PANTILE_DEVICE void sequential_tiles(Block& block, int& n, int last) {
  if constexpr (Config::kStages == 1) {
    single_stage_tiles<kMasked, Config>(block, n, last);
  } else {
    staged_tiles<kMasked, Config>(block, n, last);
  }
}

template <class Config, class Block>
PANTILE_DEVICE void run_sequential(Block& block) {
  const core::TilePlan& tiles = block.keys.tiles();
  int n = tiles.visit.end - 1;
  if constexpr (Config::kStages == 1) {
    block.template fetch_keys<true>(n, 0);
  } else {
    block.template fetch_keys<true>(n, n & 1);
    block.template fetch_values<true>(n, n & 1);
  }
  prim::commit_copies();
  prim::wait_copies<0>();
  block.publish_queries();
  sequential_tiles<true, Config>(block, n, tiles.full.end);
  sequential_tiles<false, Config>(block, n, tiles.full.begin);
  if constexpr (Block::Keys::kLeftBound) {
    sequential_tiles<true, Config>(block, n, tiles.visit.begin);
  }
}

// Pipelined: S of tile n - 1 and P V of tile n in one stream, half a tile of keys at a time. On
// entry `s` holds the masked scores of tile n and the references cover them; on exit the same holds
// for tile n - 1. Tile n lies in stage n % 2; K of a tile arrives with V of the tile after it.
// `groups`: of tile n that are seen, and then of tile n - 1; counted anew in each step by the
// kernels that would spill over a register for it.
template <bool kMasked, bool kNextMasked, class Config, class Block>
PANTILE_DEVICE void pipelined_step(Block& block, typename Block::Scores& s, int n, int& groups) {
  constexpr int kStep = Block::kKeyGroups / 2;  // groups of 16 keys
  constexpr int kSlots = kStep * (Block::kDepthSteps + Block::kValueSteps);
  constexpr int kUnits = kStep * 2 * Config::kRowTiles;  // 16 x 8 scores each
  prim::wait_copies<0>();
  block.publish_values(n & 1, n, kMasked);
  block.template fetch_values<false>(n - 1, (n - 1) & 1);
  block.template fetch_keys<false>(n - 2, n & 1);
  prim::commit_copies();

  if constexpr (Block::kCountsAnew) {
    groups = kMasked ? block.keys.seen_groups(n) : Block::kKeyGroups;
  }
  const int next_groups = kNextMasked ? block.keys.seen_groups(n - 1) : Block::kKeyGroups;
  if constexpr (kMasked && Block::kCalmEdges) {
    block.template value_product<kMasked>(s, n & 1, n, groups);
    block.template score_product<kNextMasked>(s, (n - 1) & 1, next_groups);
    groups = next_groups;
    finish_scores<kNextMasked>(block, s, n - 1);
    return;
  }
  block.template begin_exponentials<kMasked>(n);
  typename Block::Weights p[2][kStep];
  const auto exponentials = [&](int step, int unit) {
    const int group = step * kStep + unit / (2 * Config::kRowTiles);
    const int m = unit % (2 * Config::kRowTiles) / 2;
    block.softmax.template exponentials<kMasked>(s, m, 2 * group + unit % 2);
    if (unit % 2 == 1) {
      block.softmax.template pack<kMasked>(s, m, group, p[step][group % kStep][m]);
    }
  };
  const auto maxima = [&](int step, int unit) {
    const int group = step * kStep + unit / (2 * Config::kRowTiles);
    block.softmax.take_max(s, unit % (2 * Config::kRowTiles) / 2, 2 * group + unit % 2);
  };
  spread<kUnits, 1>(0, [&](int unit) { exponentials(0, unit); });
  block.softmax.begin_max();
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Block::Softmax::keep_order();
    const auto between = [&](int slot) {
      spread<kUnits, kSlots>(slot, [&](int unit) {
        if (step == 0) {
          exponentials(1, unit);
        } else if (!kNextMasked) {
          maxima(0, unit);
        }
      });
    };
    block.template score_groups<kNextMasked, kStep>(s, (n - 1) & 1, step * kStep, next_groups,
                                                    between);
    block.template value_groups<kMasked>(p[step], n & 1, step * kStep, groups, [&](int slot) {
      between(kStep * Block::kDepthSteps + slot);
    });
  }
  groups = next_groups;
  if constexpr (kNextMasked) {
    finish_scores<true>(block, s, n - 1);
  } else {
    spread<kUnits, 1>(0, [&](int unit) { maxima(1, unit); });
    block.raise_references(s);
  }
}

template <class Config, class Block>
PANTILE_DEVICE void run_pipelined(Block& block) {
  const core::TilePlan& tiles = block.keys.tiles();
  int n = tiles.visit.end - 1;
  block.template fetch_keys<true>(n, n & 1);
  prim::commit_copies();
  block.template fetch_values<true>(n, n & 1);
  block.template fetch_keys<false>(n - 1, (n - 1) & 1);
  prim::commit_copies();
  prim::wait_copies<1>();
  block.publish_queries();
  if (n < tiles.visit.begin) {
    return;
  }
  typename Block::Scores s;
  int groups = block.keys.seen_groups(n);
  block.template score_product<true>(s, n & 1, groups);
  finish_scores<true>(block, s, n);
#pragma unroll 1
  for (; n > tiles.visit.begin && n > tiles.full.end; --n) {
    pipelined_step<true, true, Config>(block, s, n, groups);
  }
  if (n > tiles.full.begin) {
    pipelined_step<true, false, Config>(block, s, n, groups);
    --n;
  }
#pragma unroll 1
  for (; n > tiles.full.begin; --n) {
    block.set_sums_apart(n);
    pipelined_step<false, false, Config>(block, s, n, groups);
  }
  if constexpr (Block::Keys::kLeftBound) {
#pragma unroll 1
    for (; n > tiles.visit.begin; --n) {
      pipelined_step<true, true, Config>(block, s, n, groups);
    }
  }
  prim::wait_copies<0>();
  block.publish_values(n & 1, n, true);
  if constexpr (Block::kCountsAnew) {
    groups = block.keys.seen_groups(n);
  }
  block.template value_product<true>(s, n & 1, n, groups);
}

template <class Config, class Block>
PANTILE_DEVICE void run_tiles(Block& block) {
  // A variant is one more step between S and the maxima.
  if constexpr (Config::kSchedule == Schedule::pipelined && !Config::kLongRows && Block::kIsPlain) {
    run_pipelined<Config>(block);
  } else {
    run_sequential<Config>(block);
  }
}

template <class Config, DType kDType, MaskKind kMask, class Variant = PlainForward>
PANTILE_DEVICE void run_block(const ForwardParams& params,
                              const attn::VariantParams& variant = attn::VariantParams{}) {
  static_assert(Config::kSoftmax.tensor_quarters == 0 || !Variant::kAny);
  static_assert(!Config::kSoftmax.fast_scale || !Variant::kAny);
  extern __shared__ __align__(1024) char shared[];
  using Block = ForwardBlock<Config, kDType, kMask, Variant>;
  const ForwardWork work = Block::locate(params);
  if (work.row0 >= work.sequence.allocated) {
    return;  // packed sequences are shorter than the grid allows for
  }
  auto& storage = *reinterpret_cast<typename Block::Storage*>(shared);
  Block::fetch_queries(params, storage, work);
#pragma unroll 1
  for (bool again = false;; again = true) {
    Block block(params, variant, storage, work);
    if (again) {
      block.run_again();
    } else {
      block.clear_missing_columns();
    }
    run_tiles<Config>(block);
    // A score that is not finite has made NaN of a neighbouring row too: once more, on vector
    // units.
    const bool kept = Config::kSoftmax.tensor_quarters == 0 || again ||
                      __syncthreads_or(block.softmax.holds_nan()) == 0;
    if (kept) {
      block.store();
      return;
    }
  }
}

// One kernel, under five names by the kind of softmax, for long rows and with a variant, so that
// reports tell them apart.
template <class Config, DType kDType, MaskKind kMask>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  run_block<Config, kDType, kMask>(params);
}

template <class Config, DType kDType, MaskKind kMask>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    long_forward_kernel(const __grid_constant__ ForwardParams params) {
  run_block<Config, kDType, kMask>(params);
}

template <class Config, DType kDType, MaskKind kMask>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    tensor_forward_kernel(const __grid_constant__ ForwardParams params) {
  run_block<Config, kDType, kMask>(params);
}

template <class Config, DType kDType, MaskKind kMask>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    trial_forward_kernel(const __grid_constant__ ForwardParams params) {
  run_block<Config, kDType, kMask>(params);
}

// Compiled at the first call that asks for the variant.
template <class Config, DType kDType, MaskKind kMask, class Variant>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    variant_forward_kernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ attn::VariantParams variant) {
  run_block<Config, kDType, kMask, Variant>(params, variant);
}

}  // namespace pantile::ampere
