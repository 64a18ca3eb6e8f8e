// Shared-memory addresses as PTX wants them: 32-bit offsets into the shared window.
#pragma once

#include <cstdint>

#define PANTILE_DEVICE __device__ __forceinline__

namespace pantile::prim {

PANTILE_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace pantile::prim
