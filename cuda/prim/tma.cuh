// Bulk asynchronous copies: tiles through tensor maps, plain runs of bytes, and adds into global
// memory. PTX ISA, "Data Movement: cp.async.bulk". One thread issues a copy.
//
// Loads complete on an mbarrier by bytes (rows outside the tensor are zero-filled and counted).
// Stores and reductions belong to the issuing thread's bulk group: commit, then wait.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "prim/address.cuh"
#include "prim/mbarrier.cuh"

namespace pantile::prim {

// Coordinates of a tile's first element, innermost axis first, in maps of three to five axes.
struct TileOrigin3 {
  int c0, c1, c2;
};

struct TileOrigin4 {
  int c0, c1, c2, c3;
};

struct TileOrigin {
  int c0, c1, c2, c3, c4;
};

PANTILE_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

PANTILE_DEVICE void tma_load(void* to, const CUtensorMap* map, Mbarrier& full,
                             const TileOrigin3& origin) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&full)), "r"(origin.c0), "r"(origin.c1), "r"(origin.c2)
      : "memory");
}

PANTILE_DEVICE void tma_load(void* to, const CUtensorMap* map, Mbarrier& full,
                             const TileOrigin4& origin) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&full)), "r"(origin.c0), "r"(origin.c1), "r"(origin.c2),
      "r"(origin.c3)
      : "memory");
}

PANTILE_DEVICE void tma_load(void* to, const CUtensorMap* map, Mbarrier& full,
                             const TileOrigin& origin) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&full)), "r"(origin.c0), "r"(origin.c1), "r"(origin.c2),
      "r"(origin.c3), "r"(origin.c4)
      : "memory");
}

PANTILE_DEVICE void tma_store(const CUtensorMap* map, const void* from, const TileOrigin4& origin) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(origin.c0), "r"(origin.c1), "r"(origin.c2), "r"(origin.c3)
      : "memory");
}

PANTILE_DEVICE void tma_store(const CUtensorMap* map, const void* from, const TileOrigin& origin) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(origin.c0), "r"(origin.c1), "r"(origin.c2), "r"(origin.c3),
      "r"(origin.c4)
      : "memory");
}

// `bytes` is a multiple of 16, both addresses are 16-byte aligned. So for the next two.
PANTILE_DEVICE void bulk_load(void* to, const void* from, int bytes, Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&full))
      : "memory");
}

PANTILE_DEVICE void bulk_add_f32(float* to, const void* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}

PANTILE_DEVICE void bulk_add_u32(std::uint32_t* to, const void* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}

PANTILE_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending of this thread's groups still read their shared-memory source.
template <int kPending>
PANTILE_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// At most kPending of this thread's groups are unfinished.
template <int kPending>
PANTILE_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary writes to shared memory before later asynchronous reads of it (wgmma operands,
// bulk stores): by the writers before the barrier between them and the reader, or by the reader
// after it. It waits for this thread's own memory accesses.
PANTILE_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace pantile::prim
