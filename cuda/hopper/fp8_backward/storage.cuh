// Images of queries and keys, the shared memory of the FP8 backward, and what its kernels are told.
//
// An image is written by prepare.cuh into global memory in the layout of shared memory, swizzles
// included, so that a bulk copy brings it without a tensor map.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/blocked.h"
#include "core/geometry.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "hopper/fp8_backward/config.h"
#include "pantile/problem.h"
#include "prim/address.cuh"
#include "prim/mbarrier.cuh"

namespace pantile::hopper {

// 64 queries. Rows are [query][channel]; the transposed forms [channel][query], with the queries of
// each 16 in the order of core::value_column: that in which a thread holds P^T and dS^T.
template <int kDim>
struct alignas(1024) RowImage {
  std::uint8_t q[Fp8BackwardConfig::kRows * fp8_row_bytes(kDim)];
  std::uint8_t grad[Fp8BackwardConfig::kRows * fp8_row_bytes(kDim)];  // dO
  std::uint8_t q_t[kDim * Fp8BackwardConfig::kRows];                  // 64-byte swizzle
  std::uint8_t grad_t[kDim * Fp8BackwardConfig::kRows];
  // log2(kWeightUnits) - LSE of Q (K - mean) in log2 units, -inf for a row without keys; and
  // -delta / kWeightUnits.
  float lse[Fp8BackwardConfig::kRows], delta[Fp8BackwardConfig::kRows];
  float scale_q, scale_grad;
  float unused[126];

  static constexpr int kUsedBytes =
      Fp8BackwardConfig::kRows * (2 * (fp8_row_bytes(kDim) + kDim) + 8) + 16;
};
static_assert(sizeof(RowImage<128>) == fp8_row_image_bytes(128));

// 128 keys. In k_t key u of each 16 has place 2 (u % 8) + u / 8, see Fp8BackwardMath::store_dS.
template <int kDim>
struct alignas(1024) KeyImage {
  std::uint8_t k[Fp8BackwardConfig::kKeys * fp8_row_bytes(kDim)];
  std::uint8_t v[Fp8BackwardConfig::kKeys * fp8_row_bytes(kDim)];  // times value_row_factor
  std::uint8_t k_t[kDim * Fp8BackwardConfig::kKeys];               // [channel][key]
};
static_assert(sizeof(KeyImage<128>) == fp8_key_image_bytes(128));

// The tile of keys of a block of threads.
struct Fp8KeyTile {
  int batch, head, tile;  // batch -1: nothing to do
  int block;              // of the operands, among those of a head
  int first_row_tile;     // of the sequence, among those of a head
  int key_row;            // packed: rows before the sequence
  int keys, capacity;     // of the sequence, in use or not
  core::Mask mask;
  core::TilePlan rows;  // tiles of queries
  // Of its codes: the scale of K, this in log2 units of scores, and the factor of dP. Read where
  // they are used: the math warps have no registers to spare.
  float scale_k, score_factor, grad_factor;
};

struct Fp8BackwardParams {
  core::SequenceSide queries, keys;  // lengths
  core::TileOrder order;             // of dense keys
  int heads_q, heads_k, group, batch;
  int window_left, window_right;
  int q_blocks, k_blocks;  // of a head
  int head_dim;            // of the tensors, at most the kernel's
  float scale_log2;        // softmax scale times log2(e)
  float scale_q, scale_k;  // what dQ and dK are multiplied by
  float value_units;       // 1 / value_row_factor
  const float* kv_scale;   // [heads_k][k_blocks][2]
  const std::uint8_t *row_images, *key_images;
  float* dq_sum;
  std::int32_t *turns, *ticket;  // null unless deterministic
  std::uint16_t *grad_k, *grad_v;
  Layout grad_k_layout, grad_v_layout;
  bool is_f16;
};

// Owners: the producer thread fills `keys` and the stages; each math warpgroup half of dS (its
// keys) and one fragment of dQ, which an adder thread empties into global memory.
template <int kDim>
struct Fp8BackwardStorage {
  using Config = Fp8BackwardConfig;
  KeyImage<kDim> keys;
  RowImage<kDim> stages[Config::kStages];
  alignas(1024) std::uint8_t dS[Config::kBuffers][Config::kRows * 128];  // [query][key]
  alignas(128) float dQ[2][Config::kRows * kDim / 2];  // 64 x kDim / 2 each, register order
  alignas(16) std::uint32_t largest_dS[8];             // of a step, a warp each
  Fp8KeyTile tile;
  prim::Mbarrier keys_full, full[Config::kStages], empty[Config::kStages];
  prim::Mbarrier dq_full[2], dq_empty[2];
};

template <int kDim>
inline constexpr int kFp8BackwardSharedBytes =
    static_cast<int>(sizeof(Fp8BackwardStorage<kDim>)) + 1024;
static_assert(kFp8BackwardSharedBytes<128> <= kSharedMemoryBytes);

}  // namespace pantile::hopper
