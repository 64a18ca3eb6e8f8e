// Programmatic dependent launch: a kernel may start while the one before it in the stream drains.
// PTX ISA, "griddepcontrol". Both are no-ops in launches without the attribute, and on GPUs before
// compute capability 9.0, which have no such launches.
#pragma once

#include "prim/address.cuh"

namespace pantile::prim {

// Lets the next kernel start once every block of this one has come here or exited.
PANTILE_DEVICE void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernel before has finished and its writes are visible. Whatever that kernel
// writes must not be touched before, and nothing it reads may be written.
PANTILE_DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace pantile::prim
