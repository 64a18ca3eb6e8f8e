// movmatrix: an 8x8 block of 16-bit elements, transposed within a warp's registers. Lane 4 i + j
// holds elements 2 j and 2 j + 1 of row i. PTX ISA, "movmatrix".
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE std::uint32_t transpose_8x8(std::uint32_t block) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(block));
  return result;
}

}  // namespace pantile::prim
