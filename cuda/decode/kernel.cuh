// Decode: a few queries of each sequence against its cache, bound by the bytes of K and V. One
// persistent grid, one launch; docs/design/decode.md.
//
//   1 find_range     which tiles this block owns, from the lengths
//   2 load           cp.async, kStages - 1 tiles ahead, across the borders of pieces
//   3 step           S^T, softmax, O^T of a slice; no barrier between teams
//   4 sum_slices     at the end of a piece, O over the slices
//   5 store_piece    O, or a part for the workspace; the last to arrive merges
//
// The ring belongs to the teams, slice by slice; output, reference and sum to the whole block,
// within 4 and 5, which begin with a barrier.
#pragma once

#include "decode/finish.cuh"
#include "decode/load.cuh"
#include "prim/grid_dependency.cuh"

namespace pantile::decode {

template <class Config, DType kDType>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Storage<Config>& storage = *reinterpret_cast<Storage<Config>*>(shared);
  const int warp = prim::uniform(static_cast<int>(threadIdx.x) / 32);
  const int slice = warp / Config::kTeam;
  const int member = warp % Config::kTeam;

  prim::wait_for_previous_grid();
  find_range<Config>(p, storage.range);
  prim::allow_next_grid();
  if (storage.range.count == 0) {
    return;
  }
  clear_tails(p, storage);
  Walk<Config> walk;
  walk.start(p, storage.range);
  Math<Config, kDType> math(p, slice, member);
  math.ask_for_q(walk, storage);
  Loader<Config> loader(p, walk, storage, slice, member);
  // One loop for the first copies too: code that runs once comes from memory.
  int stage = 0;                      // the next copies go there; behind it is the oldest tile
  int missing = Config::kStages - 1;  // copies to ask for before the first product
  int stored = 0;
  bool new_q = true;
  math.clear();
#pragma unroll 1
  while (true) {
    if (missing == 0) {
      prim::wait_copies<Config::kStages - 2>();
      sync_team<Config>(slice);
    }
    loader.load_next(stage);
    stage = stage == Config::kStages - 1 ? 0 : stage + 1;
    if (missing > 0) {
      --missing;
      continue;
    }
    if (walk.piece_begins()) {
      math.start_piece(walk, storage, new_q);
    }
    math.step(storage.ring[stage][slice], walk.s, walk.tile);
    ++walk.tile;
    if (!walk.piece_ends()) {
      continue;
    }
    sum_slices(math, storage, slice, member * Config::kWarpColumns);
    new_q = !walk.pair_goes_on();
    store_piece(p, walk, storage, stored);
    walk.next_piece(p);
    if (!walk.more) {
      break;
    }
    math.clear();
    __syncthreads();  // output, references and sums are free
    if (Config::kQShared || new_q) {
      math.ask_for_q(walk, storage);
      prim::wait_copies<0>();
    }
  }
}

}  // namespace pantile::decode
