// ldmatrix and stmatrix: four 8x8 blocks of 16-bit elements between a warp's registers and shared
// memory. Lane l supplies the address of row l % 8 of block l / 8; register r holds block r, whose
// row i lies in lanes 4i..4i+3, two elements each. PTX ISA, "ldmatrix", "stmatrix".
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE void load_matrix_x4(std::uint32_t (&blocks)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}

PANTILE_DEVICE void load_matrix_x4_transposed(std::uint32_t (&blocks)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}

PANTILE_DEVICE void store_matrix_x4(std::uint32_t address, std::uint32_t b0, std::uint32_t b1,
                                    std::uint32_t b2, std::uint32_t b3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(b0), "r"(b1), "r"(b2), "r"(b3)
               : "memory");
}

PANTILE_DEVICE void store_matrix_x4_transposed(std::uint32_t address, std::uint32_t b0,
                                               std::uint32_t b1, std::uint32_t b2,
                                               std::uint32_t b3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(b0), "r"(b1), "r"(b2), "r"(b3)
      : "memory");
}

}  // namespace pantile::prim
