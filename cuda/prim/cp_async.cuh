// cp.async: 16-byte copies from global to shared memory that pass by the registers and complete in
// groups. A thread sees its own copies after waiting for their group; other threads see them after
// a barrier behind that wait. PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

// Both addresses are multiples of 16 bytes. Each copy also asks L2 for the whole 128-byte line.
// Nothing is copied unless `wanted`: a predicate, because a branch would keep the compiler from
// mixing copies with the arithmetic around them.
PANTILE_DEVICE void copy_async_16_if(bool wanted, std::uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;"
      " @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)));
}

// The same, but writes 16 zero bytes unless `exists`; `from` may then point anywhere.
PANTILE_DEVICE void copy_async_16_or_zero_if(bool wanted, std::uint32_t to, const void* from,
                                             bool exists) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;"
      " @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)), "r"(exists ? 16 : 0));
}

// What is read once: its lines leave L2 before others, which are needed again.
PANTILE_DEVICE std::uint64_t read_once_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The first two with a policy.
PANTILE_DEVICE void copy_async_16_if(bool wanted, std::uint32_t to, const void* from,
                                     std::uint64_t policy) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;"
      " @wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)), "l"(policy));
}
PANTILE_DEVICE void copy_async_16_or_zero_if(bool wanted, std::uint32_t to, const void* from,
                                             bool exists, std::uint64_t policy) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;"
      " @wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3, %4; }" ::"r"(
          to),
      "l"(from), "r"(static_cast<int>(wanted)), "r"(exists ? 16 : 0), "l"(policy));
}

// The first `bytes` of 16, 0 to 16, and zeros after them.
PANTILE_DEVICE void copy_async_16_of(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes));
}

// Four bytes, or zeros unless `exists`.
PANTILE_DEVICE void copy_async_4_or_zero(std::uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 4 : 0));
}

PANTILE_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most the `kNewest` last groups of this thread may still be in flight.
template <int kNewest>
PANTILE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace pantile::prim
