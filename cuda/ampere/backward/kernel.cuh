// Attention backward for every GPU from sm_80 on: cp.async, ldmatrix, mma.sync. One thread block
// computes dK and dV of `tile_k` keys of one key head and adds its share to dQ. It walks over the
// rows that see its keys, of all query heads that share the key head, and recomputes P from LSE.
//
//   1 locate     block -> (key tile, key head, sequence); which row tiles see it, which in full
//   2 fetch      K and V once; Q, dO and the row terms step by step
//   3 for each row tile of each query head
//       S^T  = K Q^T            P^T  = exp2(S^T * scale - LSE)
//       dP^T = V dO^T - delta   dS^T = P^T * dP^T        (exponentials run under this product)
//       dV += P^T dO            dK += dS^T Q             in registers, fp32
//       dQ += dS K              into fp32 (or integer) sums in global memory, of this step's rows
//                               or of those before
//   4 store      dK and dV by way of the buffers of K and V
//
//   buffer                  written by                read by                until
//   storage.k, storage.v    cp.async, all threads     all warps              the end, then dK, dV
//   storage.stages[]        cp.async, all threads     all warps              the next barrier
//   storage.weights, P      the warps of these keys   the same warps         the next barrier
//   storage.weights, dS     the warps of these keys   the same; dQ: all      dQ of their step
//
// If one warp owns all columns of its keys' dK and dV, P^T and dS^T are A operands as they are. If
// several do, each computes the weights of a part of the rows and takes those from its registers,
// the others' from shared memory.
//
// dQ of a step needs the dS of all warps: behind a barrier of its own, or, with a second buffer of
// dS, anywhere in the next step (config.h: GradQueries).
#pragma once

#include "ampere/backward/block.cuh"
#include "ampere/backward/params.cuh"
#include "ampere/backward/variant.cuh"
#include "ampere/storage.cuh"
#include "prim/cp_async.cuh"

namespace pantile::ampere {

// The weights of step i, and from registers what one warp can do with them.
template <class Config, class Block>
PANTILE_DEVICE void compute_weights(Block& block, RowStep step, int i) {
  if constexpr (Config::kSharesWeights) {
    const int first_row = block.column_warp() * Config::kWarpRows;
    typename Block::Weights p;
    typename Block::Weights grad_s;
    block.weights(p, grad_s, step, i, first_row);
    block.share_weights(p, block.shared_p(), first_row);
    block.share_weights(grad_s, block.shared_grad_s(i), first_row);
    block.add_values(p, i, first_row);
    block.add_keys(grad_s, i, first_row);
    block.wait_for_shared_weights();
    block.add_shared_values(i);
    block.add_shared_keys(i);
  } else {
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) {
      const int first_row = pass * Config::kWarpRows;
      typename Block::Weights p;
      typename Block::Weights grad_s;
      block.weights(p, grad_s, step, i, first_row);
      block.add_values(p, i, first_row);
      block.add_keys(grad_s, i, first_row);
      block.share_weights(grad_s, block.shared_grad_s(i), first_row);
    }
  }
}

// With two stages the rows of the next step are fetched under the whole of this one, with one stage
// under its dQ.
template <class Config, class Block>
PANTILE_DEVICE void run_backward(Block& block) {
  constexpr bool kTwoStages = Config::kStages == 2;
  constexpr GradQueries kGradQueries = Config::kGradQueries;
  if (block.steps() == 0) {
    return;
  }
  const auto fetch_next = [&](RowStep step, int i) {
    if (i + 1 < block.steps()) {
      block.fetch_rows(block.next(step), i + 1);
      prim::commit_copies();
    }
  };
  block.fetch_keys();
  RowStep step = block.first_step();
  block.fetch_rows(step, 0);
  prim::commit_copies();
#pragma unroll 1
  for (int i = 0; i < block.steps(); ++i) {
    prim::wait_copies<0>();
    __syncthreads();
    if constexpr (kTwoStages) {
      fetch_next(step, i);
    }
    if (kGradQueries == GradQueries::before_next_scores && i > 0) {
      block.add_queries(block.previous(step), i - 1);
    }
    compute_weights<Config>(block, step, i);
    if (kGradQueries == GradQueries::after_next_products && i > 0) {
      block.add_queries(block.previous(step), i - 1);
    }
    if constexpr (kGradQueries == GradQueries::own_step) {
      __syncthreads();
      if constexpr (!kTwoStages) {
        fetch_next(step, i);
      }
      block.add_queries(step, i);
    }
    step = block.next(step);
  }
  __syncthreads();
  if constexpr (kGradQueries != GradQueries::own_step) {
    block.add_queries(block.previous(step), block.steps() - 1);
    __syncthreads();
  }
}

template <class Config, DType kDType, MaskKind kMask>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  if (params.repeats && !BackwardKeys<Config, kMask>::is_measured(params)) {
    return;
  }
  BackwardBlock<Config, kDType, kMask> block(params,
                                             *reinterpret_cast<BackwardStorage<Config>*>(shared));
  block.clear_missing_columns();
  run_backward<Config>(block);
  block.store();
}

// The same with a variant, compiled at the first call that asks for it.
template <class Config, DType kDType, MaskKind kMask, attn::GradHooks kHooks>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    variant_backward_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ attn::VariantParams variant) {
  extern __shared__ __align__(1024) char shared[];
  if (params.repeats && !BackwardKeys<Config, kMask>::is_measured(params)) {
    return;
  }
  using Block = VariantBackwardBlock<Config, kDType, kMask, kHooks>;
  Block block(params, variant, *reinterpret_cast<typename Block::Storage*>(shared));
  block.clear_missing_columns();
  run_backward<Config>(block);
  block.store();
}

}  // namespace pantile::ampere
