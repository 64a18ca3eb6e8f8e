// One fp32 word a lane from shared memory.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE float load_shared(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace pantile::prim
