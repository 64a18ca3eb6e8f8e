// Interleaving in the source: where, between the products, pieces of other work go. The compiler
// keeps the order closely enough, and an mma that follows an mma leaves issue slots free.
#pragma once

#include "prim/address.cuh"

namespace pantile::ampere {

// Calls run(unit) for those of `kUnits` equal pieces of work that belong to slot `slot` of
// `kSlots`.
template <int kUnits, int kSlots, class Run>
PANTILE_DEVICE void spread(int slot, Run run) {
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit * kSlots / kUnits == slot) {
      run(unit);
    }
  }
}

}  // namespace pantile::ampere
