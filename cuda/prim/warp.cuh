// Warp-wide helpers: electing one lane, and telling ptxas that a value is the same in all lanes.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

inline constexpr unsigned kAllLanes = 0xffffffffu;

PANTILE_DEVICE int lane_index() {
  return static_cast<int>(threadIdx.x & 31);
}

// True in exactly one lane of a converged warp.
PANTILE_DEVICE bool elect_one() {
  std::uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

// Returns `value`, which must be equal in all 32 lanes, in a uniform register.
// REDUX writes a uniform register, so everything derived from the result stays on the uniform
// datapath; ptxas takes a value read from shared memory for divergent and would move each wgmma
// descriptor derived from it with R2UR instead (measured: 4-6 % of the forward at head dim 128).
PANTILE_DEVICE int uniform(int value) {
  return static_cast<int>(__reduce_max_sync(kAllLanes, static_cast<unsigned>(value)));
}

// As uniform(), but not moved below the waits that follow, where ptxas likes to have it.
PANTILE_DEVICE int uniform_here(int value) {
  int result;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value) : "memory");
  return result;
}

// Whether `condition` holds in some lane. Also for one that is the same in all lanes: ptxas takes a
// branch on it for uniform only then, and keeps descriptors in uniform registers across it.
PANTILE_DEVICE bool any(bool condition) {
  return __any_sync(kAllLanes, condition) != 0;
}

}  // namespace pantile::prim
