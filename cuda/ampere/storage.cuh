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

template <class Config>
struct BackwardStorage {
  struct Stage {
    alignas(128) std::uint16_t q[Config::kTileQ * Config::kHeadDim];
    alignas(128) std::uint16_t grad_o[Config::kTileQ * Config::kHeadDimV];
    alignas(128) float row_terms[kRowTerms][Config::kTileQ];
  };
  // K and V; at the end dK and dV on their way to global memory.
  alignas(128) std::uint16_t k[Config::kTileK * Config::kHeadDim];
  alignas(128) std::uint16_t v[Config::kTileK * Config::kHeadDimV];
  Stage stages[Config::kStages];
  // dS and, if warps share it, P. Transposed: one row a key, one column a query row.
  alignas(
      128) std::uint16_t weights[Config::kSharesWeights ? 2 : 1][Config::kTileK * Config::kTileQ];
};

}  // namespace pantile::ampere
