// Backward of attention on FP8 operands, all five products of e4m3 numbers, head dims to 128. A
// block of threads has a tile of 128 keys and walks over all tiles of 64 queries that see them, of
// all query heads that share the head:
//
//   1 producer    images of the keys and of each tile of queries     -> keys, stages
//   2 math        S^T = K Q^T, dP^T = V dO^T                            (fp16 registers)
//   3             P^T = 2^(S^T * scales - LSE), dS^T = P^T (dP^T scales - delta), masked
//   4             P^T to e4m3, a scale for the 16 keys of a warp        (registers)
//   5             dV += P^T dO, half of the columns at a time, from zero and times its scales
//   6             the largest dS of the block; dS^T to e4m3          -> dS, and registers
//   7             dQ  = dS K, half of the columns each warpgroup     -> dQ
//   8             dK += dS^T Q, as dV
//   9 adders      dQ is added into global memory
//  10 math        dK, dV                                             -> global memory
//
// The FP8 adder loses bits of long sums (prim/wgmma_e4m3.cuh): none is longer than 128 here, and
// those over queries or keys are of fp32 additions.
#pragma once

#include "hopper/fp8_backward/load.cuh"
#include "hopper/fp8_backward/math.cuh"

namespace pantile::hopper {

// Sets up barriers and finds the block's tile of keys; false where there is nothing to do.
template <int kDim>
PANTILE_DEVICE bool begin_fp8_backward(Fp8BackwardStorage<kDim>& s, const Fp8BackwardParams& p) {
  if (threadIdx.x == 0) {
    prim::init(s.keys_full, 1);
    for (int i = 0; i < Fp8BackwardConfig::kStages; ++i) {
      prim::init(s.full[i], 1);
      prim::init(s.empty[i], 4 * Fp8BackwardConfig::kMathWarpgroups);
    }
    for (int i = 0; i < 2; ++i) {
      prim::init(s.dq_full[i], 4);
      prim::init(s.dq_empty[i], 1);
    }
    prim::fence_mbarrier_init();
    prim::wait_for_previous_grid();
    const int work = p.ticket == nullptr ? static_cast<int>(blockIdx.x) : atomicAdd(p.ticket, 1);
    locate_fp8_keys(p, work, s.tile);
  }
  __syncthreads();
  return s.tile.tile * Fp8BackwardConfig::kKeys < s.tile.capacity;
}

// Of keys that no query sees.
PANTILE_DEVICE void write_zero_keys(const Fp8BackwardParams& p, const Fp8KeyTile& tile) {
  const int first = tile.tile * Fp8BackwardConfig::kKeys;
  const int rows = core::min_of(tile.capacity - first, Fp8BackwardConfig::kKeys);
  const int chunks = p.head_dim / 8;
  const bool packed = p.keys.cu_seqlens != nullptr;
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += Fp8BackwardConfig::kThreads) {
    const auto clear = [&](std::uint16_t* out, const Layout& layout) {
      const std::int64_t at = (packed ? tile.key_row * layout.seq : tile.batch * layout.batch) +
                              tile.head * layout.head + (first + i / chunks) * layout.seq;
      *reinterpret_cast<uint4*>(out + at + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    };
    clear(p.grad_k, p.grad_k_layout);
    clear(p.grad_v, p.grad_v_layout);
  }
}

template <int kDim>
__global__ void __launch_bounds__(Fp8BackwardConfig::kThreads, 1)
    backward_fp8(const __grid_constant__ Fp8BackwardParams p) {
  extern __shared__ std::uint8_t dynamic_smem[];
  const std::uint32_t misalignment = prim::shared_address(dynamic_smem) & 1023;
  auto& s =
      *reinterpret_cast<Fp8BackwardStorage<kDim>*>(dynamic_smem + ((1024 - misalignment) & 1023));
  if (!begin_fp8_backward(s, p)) {
    return;
  }
  if (s.tile.rows.visit.empty()) {
    write_zero_keys(p, s.tile);
    return;
  }
  const int warp = __shfl_sync(prim::kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    prim::shrink_registers<Fp8BackwardConfig::kProducerRegisters>();
    if (prim::elect_one()) {
      if (warp == 0) {
        load_fp8_images(s, p);
      } else if (warp <= Fp8BackwardConfig::kMathWarpgroups) {
        add_fp8_queries(s, p, warp - 1);
      }
    }
  } else {
    prim::grow_registers<Fp8BackwardConfig::kMathRegisters>();
    Fp8BackwardMath<kDim>(s, p, warp / 4 - 1).run();
  }
}

}  // namespace pantile::hopper
