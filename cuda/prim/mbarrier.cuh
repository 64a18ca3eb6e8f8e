// mbarrier: shared-memory barriers whose phases threads wait for by parity and that asynchronous
// copies complete by bytes. PTX ISA, "Parallel Synchronization and Communication: mbarrier".
//
// A fresh barrier is in phase 0. wait(barrier, p) returns once a phase of parity p has completed:
// a consumer waits with parity (use / stages) & 1, a producer that waits for an empty stage with
// the opposite, which a fresh barrier passes at once. A waiter must see every phase: a barrier that
// completes two phases between two looks shows the old parity again, and the waiter hangs.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

struct alignas(8) Mbarrier {
  std::uint64_t state;
};

// `arrivals` per phase, counting the one that arrive_and_expect() makes.
PANTILE_DEVICE void init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy; a CTA barrier must follow.
PANTILE_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PANTILE_DEVICE void arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives and makes the current phase wait for `bytes` of asynchronous copies as well.
PANTILE_DEVICE void arrive_and_expect(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

PANTILE_DEVICE void wait(Mbarrier& barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Has a phase of this parity completed? Does not block.
PANTILE_DEVICE bool test(Mbarrier& barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace pantile::prim
