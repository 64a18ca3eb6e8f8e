// What the roles of the Hopper forward share: kernel parameters, tile descriptions, shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/integer.h"
#include "core/tile_order.h"
#include "hopper/forward/config.h"
#include "hopper/forward/roles.cuh"
#include "prim/mbarrier.cuh"

namespace pantile::hopper {

// Packed tensors have one batch.
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
  MapSteps q_steps, k_steps, o_steps;  // V is stepped like K
  int qk_panels, v_panels;             // that one copy moves: of Q and K; of V and O
  float scale, scale_log2;

  float* lse;                        // null when not wanted
  std::int64_t lse_batch, lse_head;  // distances; 0 batch for packed
  float* max_logit;                  // [batch][heads_q]; null when not wanted

  std::int32_t* counter;  // [0] claimed tiles, [1] finished blocks; null: static order
  bool no_keys;           // K and V have no rows at all, perhaps no memory
  bool zero_tail;         // rows of V past a sequence's end may hold anything
  bool clipped;           // TMA cuts O at the end of every sequence

  // For what TMA cannot store and for the repair of non-finite values.
  bool output_f32;  // O is fp32, and TMA stores none of it
  int head_dim_v;
  void* o;
  std::int8_t* o_low;  // null when not wanted
  const void* v;
  Strides o_strides, v_strides;
  Strides low_strides;  // of o_low, which is contiguous

  const float* sinks;  // [heads_q], natural logits, unscaled; or null

  // Of other key sources than rows of sequences (key_source.cuh).
  const std::int32_t *k_begin, *mask_shift, *block_table;
  std::int64_t table_stride;  // between rows of the table
  core::FastDivmod page_size;
  int page_chunk;  // keys of a tile that lie in one page: divides page_size and the tile
  int pages;       // of the tensors
};

// One tile of rows of one head, written by the loader, read by all others. `visit_end` 0 stands for
// a mark instead of a tile: finish what is under way; then, if `keys` is not 0, wait for the next
// description.
struct alignas(16) TileInfo {
  int k_row, k_head, k_batch;  // where its keys begin in the maps of K and V
  int visit_end;               // key tiles, last one first
  int visit_begin;
  int full_begin, full_end;  // those that need no mask
  int careful;               // the guards look through all masked tiles of V (guard.cuh)
  int row0;                  // first row, within its sequence
  int rows, keys;            // of the sequence
  int q_row;                 // rows before the sequence in packed tensors, else 0
  int head, batch;
  int clear_tail;  // the first key tile visited has rows of V that the guards must clear
  int o_stage;     // with o_apart: the stage of V in which O of warpgroup 1 will lie
};
static_assert(sizeof(TileInfo) == 64);  // ring positions are shifts

// What the guards have to do before a tile of V may be multiplied.
struct GuardOrder {
  int stage;
  std::uint32_t parity;  // of v_full when the tile has arrived
  int keep_rows;         // rows from here on become 0; negative: no more orders
  int scan;              // replace non-finite values
  int tile;              // index in the ring of tiles
};

// The loader's own. It has few registers, and these are seldom needed.
struct LoaderState {
  std::uint32_t tile;      // being loaded
  std::uint32_t finished;  // the outputs of all tiles before this one are complete
  std::uint32_t checked;   // tiles before this one are not tainted, or done again
  std::uint32_t orders;    // given to the guards
  bool has_claim;          // on work that no tile has been described for
};

// A tile of a bias, where variants have one: the part of each math warp.
template <ForwardConfig kConfig, bool kHasOne = kConfig.bias_tile>
struct BiasStorage {
  PANTILE_DEVICE static std::uint32_t bias_part(int, int) { return 0; }
};

template <ForwardConfig kConfig>
struct BiasStorage<kConfig, true> {
  static constexpr int kWarps = 4;  // of a warpgroup
  static constexpr int kBytes = kConfig.bias_bytes() / kConfig.math_warpgroups / kWarps;

  alignas(tile::kTileAlignment) unsigned char bias[kConfig.math_warpgroups][kWarps][kBytes];

  PANTILE_DEVICE std::uint32_t bias_part(int group, int warp) const {
    return prim::shared_address(bias[group][warp]);
  }
};

template <ForwardConfig kConfig>
struct ForwardStorage : BiasStorage<kConfig> {
  static constexpr int kGroups = kConfig.math_warpgroups;
  static constexpr int kOrders = kConfig.v_stages;  // fewer, and a phase could pass unseen
  using Byte = unsigned char;

  alignas(tile::kTileAlignment) Byte q[kConfig.q_buffers][kGroups][kConfig.q_tile().bytes()];
  alignas(tile::kTileAlignment) Byte k[kConfig.k_stages][kConfig.k_tile().bytes()];
  alignas(tile::kTileAlignment) Byte v[kConfig.v_stages][kConfig.v_tile().bytes()];
  alignas(kConfig.o_apart ? tile::kTileAlignment
                          : 16) Byte o[kConfig.o_apart ? kConfig.o_tile().bytes() : 16];

  // full: data has arrived. empty: it may be overwritten. Indexed by buffer or stage.
  prim::Mbarrier q_full[kConfig.q_buffers], q_empty[kConfig.q_buffers];
  prim::Mbarrier o_full[kConfig.q_buffers], o_empty;  // o_empty: only when O lies in V
  prim::Mbarrier k_full[kConfig.k_stages], k_empty[kConfig.k_stages];
  prim::Mbarrier v_full[kConfig.v_stages], v_empty[kConfig.v_stages];
  prim::Mbarrier order_full[kOrders], order_done[kOrders];  // guard orders: given, carried out

  TileInfo tiles[ForwardConfig::kTiles];
  GuardOrder orders[kOrders];
  int tainted[ForwardConfig::kTiles];       // the output holds NaN or Inf: do the tile again
  int needs_repair[ForwardConfig::kTiles];  // the guards have replaced values of V
  LoaderState loader;

  // `place`: the Q buffer, or with o_apart the stage of V.
  PANTILE_DEVICE Byte* o_tile(int place, int warpgroup) {
    if constexpr (kConfig.output_in_q()) {
      return q[place][warpgroup];
    } else if constexpr (kConfig.o_apart) {
      return warpgroup == 0 ? o : v[place];
    } else {
      return v[0] + warpgroup * kConfig.o_tile().bytes();
    }
  }
};

// Buffer and phase parity of the use-th use of a ring of buffers.
template <int kBuffers>
PANTILE_DEVICE constexpr int buffer_of(std::uint32_t use) {
  return static_cast<int>(use % kBuffers);
}
template <int kBuffers>
PANTILE_DEVICE constexpr std::uint32_t parity_of(std::uint32_t use) {
  return use / kBuffers & 1;
}

}  // namespace pantile::hopper
