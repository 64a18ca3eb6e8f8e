// What the roles of the Hopper forward share: kernel parameters, tile descriptions, shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/tile_order.h"
#include "hopper/config.h"
#include "hopper/roles.cuh"
#include "prim/mbarrier.cuh"

namespace pantile::hopper {

// Tensors as {dim, row, head, batch}; boxes are one panel of a tile. Packed tensors have one batch.
struct ForwardMaps {
  CUtensorMap q, k, v, o;
};

// Distances in elements; `batch` is 0 for packed tensors.
struct Strides {
  std::int64_t batch, seq, head;
};

// Steps of a head or a batch index in a tensor map: 1, or 0 for an expanded or packed axis.
struct MapSteps {
  int head, batch;
};

struct ForwardParams {
  core::TileOrder order;  // of row tiles; packed Q: of the slots of all sequences
  int heads_q, group;     // group: query heads per key head
  int batch;
  int seqlen_q, seqlen_k;
  int window_left, window_right;  // core::kNoBound lifts a side
  const std::int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  MapSteps q_steps, k_steps, v_steps, o_steps;
  float scale, scale_log2;

  float* lse;                        // null when not wanted
  std::int64_t lse_batch, lse_head;  // distances; 0 batch for packed

  std::int32_t* counter;  // [0] claimed tiles, [1] finished blocks; null: static order
  bool guarded;           // the guard warps run
  bool zero_tail;         // rows of V past a sequence's end may hold anything
  bool clipped;           // TMA cuts O at the end of every sequence

  // For what TMA cannot store and for the repair of non-finite values.
  int head_dim_v;
  void* o;
  const void* v;
  Strides o_strides, v_strides;
};

// One tile of rows of one head, written by the loader, read by all others.
struct alignas(16) TileInfo {
  int row0;                    // first row, within its sequence
  int shift;                   // keys - rows of the sequence
  int visit_begin, visit_end;  // key tiles, last one first; visit_end == 0: no more tiles
  int full_begin, full_end;    // those that need no mask
  int rows, keys;              // of the sequence
  int head, key_head, batch;
  int q_row, k_row;  // rows before the sequence in packed tensors, else 0
};

// What the guard has to do with a stage of V.
struct GuardOrder {
  int keep_rows;  // rows from here on become 0; negative: no more tiles
  int scan;       // look for non-finite values: some rows do not attend to some of these keys
  int tile;       // index in the ring of tiles
};

template <ForwardConfig kConfig>
struct ForwardStorage {
  static constexpr int kStages = ForwardConfig::kStages;
  static constexpr int kGroups = kConfig.math_warpgroups;
  using Byte = unsigned char;

  alignas(tile::kTileAlignment) Byte q[kConfig.q_buffers()][kGroups][kConfig.q_tile().bytes()];
  alignas(tile::kTileAlignment) Byte k[kStages][kConfig.k_tile().bytes()];
  alignas(tile::kTileAlignment) Byte v[kStages][kConfig.v_tile().bytes()];

  // full: data has arrived. empty: it may be overwritten. Indexed by buffer or stage.
  prim::Mbarrier q_full[2], q_empty[2];
  prim::Mbarrier o_full[2], o_empty;
  prim::Mbarrier k_full[kStages], k_empty[kStages];
  prim::Mbarrier v_full[kStages], v_empty[kStages];
  prim::Mbarrier v_ready[kStages];  // the guard has done its work

  TileInfo tiles[ForwardConfig::kTiles];
  GuardOrder guard_orders[kStages];
  int needs_repair[ForwardConfig::kTiles];  // a tile of V held non-finite values, now zeros

  PANTILE_DEVICE Byte* o_tile(int buffer, int warpgroup) {
    if constexpr (kConfig.output == OutputPlace::in_q) {
      return q[buffer][warpgroup];
    } else {
      return v[0] + warpgroup * kConfig.o_tile().bytes();
    }
  }
};

// Stage and phase parity of the use-th use of a ring of buffers.
template <int kBuffers>
PANTILE_DEVICE constexpr int buffer_of(std::uint32_t use) {
  return static_cast<int>(use % kBuffers);
}
template <int kBuffers>
PANTILE_DEVICE constexpr std::uint32_t parity_of(std::uint32_t use) {
  return use / kBuffers & 1;
}

}  // namespace pantile::hopper
