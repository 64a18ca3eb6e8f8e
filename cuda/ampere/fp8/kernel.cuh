// FP8 attention forward by mma.sync, for GPUs from compute capability 8.9 on: O = softmax(Q K^T *
// scale) V and LSE from e4m3 codes with a scale for each block of 128 rows, as the quantiser
// (common/quantize.cuh) lays them out. One kernel for all masks. One thread block has up to 128
// query rows of one head; each warp owns 32 of them from scores to output.
//
//   1 locate     block -> (row tile, head, sequence); which tiles of 64 keys are seen
//   2 fetch      Q once, then K and V tile by tile, from the last seen key down, by all threads
//   3 for each key tile that the warp sees
//       S = Q K^T     in fp16, both operands through ldmatrix
//       mask          only in tiles that some row of the warp does not see in full
//       softmax       P as e4m3 codes (attn/fp8_softmax.cuh)
//       O = O a + P V V^T through ldmatrix; its keys stand in the order in which the registers of S
//                     come, so that P goes from accumulators to operand without a shuffle
//   4 store      O by way of shared memory, LSE from registers
//
//   buffer              written by              read by                    until
//   storage.q           cp.async, all threads   the warp that owns a row   its last S
//   storage.stages[]    cp.async, all threads   all warps                  the next barrier; then O
//
// Scale algebra: docs/design/fp8.md.
#pragma once

#include "ampere/fp8/block.cuh"
#include "ampere/fp8/output.cuh"
#include "ampere/fp8/params.cuh"
#include "prim/cp_async.cuh"

namespace pantile::ampere {

// Tile n lies in stage n % 2: one barrier a tile. Behind it, all warps are done with the stage that
// is refilled.
template <class Block>
PANTILE_DEVICE void run_fp8_tiles(Block& block, const typename Block::Storage& storage,
                                  const Fp8Work& work) {
  const core::Span tiles = block.block_tiles();
  int n = tiles.end - 1;
  float2 next{1.0f, 1.0f};
  if (n >= tiles.begin) {
    block.fetch_queries(work);
    block.fetch(n);
    prim::commit_copies();
    next = block.scales(n, work.k_block);
  }
#pragma unroll 1
  for (; n >= tiles.begin; --n) {
    prim::wait_copies<0>();
    __syncthreads();
    block.fetch(n - 1);
    prim::commit_copies();
    const float2 scale = next;
    next = block.scales(n - 1, storage.work.k_block);
    block.step(n, scale);
  }
  __syncthreads();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_fp8_kernel(const __grid_constant__ Fp8ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Fp8Work work = locate_fp8(params, Config::kTileQ);
  if (work.row0 >= work.sequence.allocated) {
    return;  // packed sequences are shorter than the grid allows for
  }
  auto& storage = *reinterpret_cast<Fp8Storage<Config>*>(shared);
  Fp8Block<Config> block(params, storage, work);
  run_fp8_tiles(block, storage, work);
  Fp8Output<Config>(params, storage, block).store();
}

}  // namespace pantile::ampere
