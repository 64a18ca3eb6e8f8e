// Shared memory of the ampere kernels: one struct a kernel.
#pragma once

#include <cstdint>

#include "ampere/config.h"

namespace pantile::ampere {

template <class Config>
struct ForwardStorage {
  struct Stage {
    alignas(128) std::uint16_t k[Config::kTileK * Config::kHeadDim];
    alignas(128) std::uint16_t v[Config::kTileK * Config::kHeadDimV];
  };
  // Q; at the end each warp turns the rows it owns into O on their way to global memory.
  alignas(128) std::uint16_t q[Config::kTileQ * Config::kHeadDim];
  Stage stages[Config::kStages];
};

}  // namespace pantile::ampere
