// The loader of the Hopper forward: one thread that claims tiles, describes them to the other roles
// and keeps Q, K and V flowing into shared memory, across the borders of tiles.
#pragma once

#include "core/geometry.h"
#include "hopper/storage.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// Which rows work item `work` stands for. False: none, a slot past the end of its sequence.
//
// Packed queries have no table of tiles. Sequence b owns the slots cu_seqlens[b] / kTileRows + b up
// to the same of b + 1: at least as many as it has tiles, and found by bisection.
template <int kTileRows>
PANTILE_DEVICE bool locate_rows(const ForwardParams& p, int work, TileInfo& info) {
  const core::WorkTile place = p.order.tile(work);
  int row_tile = place.tile;
  int batch = place.batch;
  info.head = place.head;
  info.q_row = 0;
  info.rows = p.seqlen_q;
  if (p.cu_seqlens_q != nullptr) {
    batch = 0;
    for (int above = p.batch; above - batch > 1;) {
      const int middle = (batch + above) / 2;
      if (p.cu_seqlens_q[middle] / kTileRows + middle <= row_tile) {
        batch = middle;
      } else {
        above = middle;
      }
    }
    info.q_row = p.cu_seqlens_q[batch];
    info.rows = p.cu_seqlens_q[batch + 1] - info.q_row;
    row_tile -= info.q_row / kTileRows + batch;
  }
  if (p.seqused_q != nullptr) {
    info.rows = core::clamp(p.seqused_q[batch], 0, info.rows);
  }
  info.batch = batch;
  info.row0 = row_tile * kTileRows;
  return info.row0 < info.rows;
}

// Which keys these rows visit. A tile of rows without keys visits one tile, wholly masked, so that
// its output comes out as zeros like any other.
template <int kTileRows, int kTileKeys>
PANTILE_DEVICE void locate_keys(const ForwardParams& p, TileInfo& info) {
  info.key_head = info.head / p.group;
  info.k_row = 0;
  info.keys = p.seqlen_k;
  if (p.cu_seqlens_k != nullptr) {
    info.k_row = p.cu_seqlens_k[info.batch];
    info.keys = p.cu_seqlens_k[info.batch + 1] - info.k_row;
  }
  if (p.seqused_k != nullptr) {
    info.keys = core::clamp(p.seqused_k[info.batch], 0, info.keys);
  }
  info.shift = info.keys - info.rows;
  const core::Mask mask{info.rows, info.keys, p.window_left, p.window_right};
  const core::Span rows{info.row0, core::min_of(info.row0 + kTileRows, info.rows)};
  core::TilePlan plan = core::plan_row_tile(mask, rows, kTileKeys);
  if (plan.visit.empty()) {
    plan = core::TilePlan{{0, 1}, {0, 0}};
  }
  info.visit_begin = plan.visit.begin;
  info.visit_end = plan.visit.end;
  info.full_begin = plan.full.begin;
  info.full_end = plan.full.end;
}

template <ForwardConfig kConfig>
class Loader {
 public:
  PANTILE_DEVICE Loader(ForwardStorage<kConfig>& storage, const ForwardMaps& maps,
                        const ForwardParams& params)
      : s_(storage), maps_(maps), p_(params), work_(static_cast<int>(blockIdx.x)) {}

  PANTILE_DEVICE void run() {
    bool q_requested = false;
    describe(0);
    for (std::uint32_t tile = 0;; ++tile) {
      const TileInfo& info = described(tile);
      if (info.visit_end > 0) {
        load_k(info, info.visit_end - 1, use_);
      }
      if (!q_requested) {
        request_q(tile, true);
      }
      if (info.visit_end == 0) {
        break;
      }
      q_requested = load_tile(tile);
    }
    finish();
  }

 private:
  static constexpr int kStages = ForwardConfig::kStages;
  static constexpr bool kTwoQ = kConfig.output == OutputPlace::in_q;
  // The next tile is claimed this many steps before the end of the current one, and its Q requested
  // two steps later, when the counter's answer has come. Claiming at the start of a tile undoes the
  // longest-first order (measured: -15 % at head dim 256, causal, 16k).
  static constexpr int kClaimSteps = 5;
  static constexpr int kRequestSteps = kClaimSteps - 2;

  PANTILE_DEVICE void claim() {
    if (p_.counter != nullptr) {
      work_ = static_cast<int>(gridDim.x) + atomicAdd(p_.counter, 1);
    } else {
      work_ += static_cast<int>(gridDim.x);
    }
  }

  // Writes the claimed tile's description, or that of the first tile after it which has rows.
  PANTILE_DEVICE void describe(std::uint32_t tile) {
    TileInfo& info = described(tile);
    for (; work_ < p_.order.count(); claim()) {
      if (locate_rows<kConfig.tile_q()>(p_, work_, info)) {
        locate_keys<kConfig.tile_q(), kConfig.tile_k>(p_, info);
        return;
      }
    }
    info.visit_end = 0;
  }

  PANTILE_DEVICE TileInfo& described(std::uint32_t tile) {
    return s_.tiles[buffer_of<ForwardConfig::kTiles>(tile)];
  }

  // All steps of one tile, the first K excepted; returns whether the next tile's Q was requested.
  PANTILE_DEVICE bool load_tile(std::uint32_t tile) {
    const TileInfo& info = described(tile);
    const int steps = info.visit_end - info.visit_begin;
    if constexpr (!kTwoQ) {
      if (steps > 1) {
        load_k(info, info.visit_end - 2, use_ + 1);
      }
      if (tile > 0) {
        prim::wait(s_.o_empty, parity_of<1>(tile - 1));  // O of the tile before lay in V's stages
      }
    }
    bool q_requested = false;
    for (int left = steps - 1; left >= 0; --left, ++use_) {  // steps after this one
      const int key_tile = info.visit_begin + left;
      if (left == core::min_of(steps - 1, kClaimSteps)) {
        claim();
      }
      if (left > 0 && (kTwoQ || left < steps - 1)) {
        load_k(info, key_tile - 1, use_ + 1);
      }
      const int request_at = core::clamp(steps - 2, 0, kRequestSteps);
      if (kTwoQ && left <= request_at && !q_requested) {
        if (left == request_at) {
          describe(tile + 1);
        }
        q_requested = request_q(tile + 1, false);
      }
      load_v(info, tile, key_tile);
    }
    if constexpr (!kTwoQ) {
      describe(tile + 1);
    }
    return q_requested;
  }

  PANTILE_DEVICE void load_k(const TileInfo& info, int key_tile, std::uint32_t use) {
    const int stage = buffer_of<kStages>(use);
    prim::wait(s_.k_empty[stage], parity_of<kStages>(use) ^ 1);
    prim::arrive_and_expect(s_.k_full[stage], kConfig.k_tile().bytes());
#pragma unroll
    for (int panel = 0; panel < kConfig.k_tile().panels(); ++panel) {
      prim::tma_load(
          s_.k[stage] + panel * kConfig.k_tile().panel_bytes(), &maps_.k, s_.k_full[stage],
          prim::TileOrigin4{panel * tile::kPanelColumns, info.k_row + key_tile * kConfig.tile_k,
                            info.key_head * p_.k_steps.head, info.batch * p_.k_steps.batch});
    }
  }

  PANTILE_DEVICE void load_v(const TileInfo& info, std::uint32_t tile, int key_tile) {
    const int stage = buffer_of<kStages>(use_);
    prim::wait(s_.v_empty[stage], parity_of<kStages>(use_) ^ 1);
    if (p_.guarded) {
      const int keys_left = info.keys - key_tile * kConfig.tile_k;
      const bool masked = key_tile >= info.full_end || key_tile < info.full_begin;
      s_.guard_orders[stage] =
          GuardOrder{p_.zero_tail ? core::max_of(keys_left, 0) : kConfig.tile_k, masked,
                     buffer_of<ForwardConfig::kTiles>(tile)};
    }
    prim::arrive_and_expect(s_.v_full[stage], kConfig.v_tile().bytes());
#pragma unroll
    for (int panel = 0; panel < kConfig.v_tile().panels(); ++panel) {
      prim::tma_load(
          s_.v[stage] + panel * kConfig.v_tile().panel_bytes(), &maps_.v, s_.v_full[stage],
          prim::TileOrigin4{panel * tile::kPanelColumns, info.k_row + key_tile * kConfig.tile_k,
                            info.key_head * p_.v_steps.head, info.batch * p_.v_steps.batch});
    }
  }

  // Requests the Q of a described tile, which publishes the description. False: the buffer is still
  // in use and `block` is false.
  PANTILE_DEVICE bool request_q(std::uint32_t tile, bool block) {
    const int buffer = kTwoQ ? buffer_of<2>(tile) : 0;
    const std::uint32_t parity = (kTwoQ ? parity_of<2>(tile) : parity_of<1>(tile)) ^ 1;
    if (block) {
      prim::wait(s_.q_empty[buffer], parity);
    } else if (!prim::test(s_.q_empty[buffer], parity)) {
      return false;
    }
    const TileInfo& info = described(tile);
    if (info.visit_end == 0) {
      prim::arrive(s_.q_full[buffer]);
      return true;
    }
    const int row = info.q_row + info.row0;
    prim::arrive_and_expect(s_.q_full[buffer], kConfig.math_warpgroups * kConfig.q_tile().bytes());
#pragma unroll
    for (int group = 0; group < kConfig.math_warpgroups; ++group) {
#pragma unroll
      for (int panel = 0; panel < kConfig.q_tile().panels(); ++panel) {
        prim::tma_load(
            s_.q[buffer][group] + panel * kConfig.q_tile().panel_bytes(), &maps_.q,
            s_.q_full[buffer],
            prim::TileOrigin4{panel * tile::kPanelColumns, row + group * kRowsPerWarpgroup,
                              info.head * p_.q_steps.head, info.batch * p_.q_steps.batch});
      }
    }
    return true;
  }

  // Sends the guard home, and leaves the counter as it was found when this block is the last.
  PANTILE_DEVICE void finish() {
    if (p_.guarded) {
      const int stage = buffer_of<kStages>(use_);
      prim::wait(s_.v_empty[stage], parity_of<kStages>(use_) ^ 1);
      s_.guard_orders[stage].keep_rows = -1;
      prim::arrive(s_.v_full[stage]);
    }
    if (p_.counter != nullptr && atomicAdd(p_.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p_.counter[0] = 0;
      p_.counter[1] = 0;
    }
  }

  ForwardStorage<kConfig>& s_;
  const ForwardMaps& maps_;
  const ForwardParams& p_;
  int work_;               // claimed last
  std::uint32_t use_ = 0;  // of the rings of K and V, over all tiles
};

}  // namespace pantile::hopper
