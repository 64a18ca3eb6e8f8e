// Named CTA barriers (0..15; 0 is __syncthreads). `threads` counts those that sync and those that
// only arrive. PTX ISA, "bar, barrier".
#pragma once

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

PANTILE_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace pantile::prim
