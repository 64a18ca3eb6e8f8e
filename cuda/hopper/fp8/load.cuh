// The loader of the Hopper FP8 forward: one thread that claims tiles, describes them to the math
// warps and keeps Q, K and V flowing into shared memory, across the borders of tiles.
#pragma once

#include "core/geometry.h"
#include "core/scaling.h"
#include "hopper/fp8/storage.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

template <Fp8Config kConfig>
class Fp8Loader {
 public:
  PANTILE_DEVICE Fp8Loader(Fp8Storage<kConfig>& storage, const Fp8Maps& maps,
                           const Fp8Params& params)
      : s_(storage), maps_(maps), p_(params) {}

  PANTILE_DEVICE void run() {
    int work = static_cast<int>(blockIdx.x);
    std::uint32_t tile = 0;
    while (work < p_.order.count()) {
      // The answer is needed after this tile's loads: the counter's latency is hidden.
      const int next = atomicAdd(p_.counter, 1) + static_cast<int>(gridDim.x);
      Fp8TileInfo& info = s_.tiles[buffer_of<Fp8Config::kTiles>(tile)];
      await_buffer(tile);
      if (locate(work, info)) {
        load_q(tile, info);
        load_keys(info);
        ++tile;
      }
      work = next;
    }
    await_buffer(tile);
    s_.tiles[buffer_of<Fp8Config::kTiles>(tile)].visit_end = -1;
    prim::arrive(s_.q_full[buffer_of<kQ>(tile)]);
    reset_counter();
  }

 private:
  static constexpr int kQ = kConfig.q_buffers;
  static constexpr int kTileK = Fp8Config::kTileK;
  static constexpr int kTileQ = kConfig.tile_q();
  static constexpr int kPanel = kConfig.panel_bytes();
  static constexpr float kLargestUnit = 7.9228163e28f;  // 2^96: products with it stay finite

  PANTILE_DEVICE void await_buffer(std::uint32_t tile) {
    prim::wait(s_.q_empty[buffer_of<kQ>(tile)], parity_of<kQ>(tile) ^ 1);
  }

  // Which rows work item `work` stands for, and which keys they visit. False: no rows, a slot past
  // the end of its sequence. Packed sequence b owns the slots cu_seqlens[b] / kTileQ + b and on:
  // at least as many as it has tiles, and found by bisection.
  PANTILE_DEVICE bool locate(int work, Fp8TileInfo& info) {
    const core::WorkTile place = p_.order.tile(work);
    int row_tile = place.tile;
    int batch = place.batch;
    info.head = place.head;
    info.q_row = 0;
    info.rows = p_.seqlen_q;
    info.q_block = batch * core::scale_blocks(p_.seqlen_q, kTileK);
    if (p_.cu_seqlens_q != nullptr) {
      batch = core::sequence_of_slot(p_.cu_seqlens_q, p_.batch, kTileQ, row_tile);
      info.q_row = p_.cu_seqlens_q[batch];
      info.rows = p_.cu_seqlens_q[batch + 1] - info.q_row;
      info.q_block = static_cast<int>(core::first_packed_block(info.q_row, batch, kTileK));
      row_tile -= info.q_row / kTileQ + batch;
    }
    info.q_block += info.head * p_.q_blocks;
    if (p_.seqused_q != nullptr) {
      info.rows = core::clamp(p_.seqused_q[batch], 0, info.rows);
    }
    info.batch = batch;
    info.row0 = row_tile * kTileQ;
    if (info.row0 >= info.rows) {
      return false;
    }
    locate_keys(info);
    take_q_scales(info);
    return true;
  }

  // 64 rows lie in one block of scales.
  PANTILE_DEVICE void take_q_scales(Fp8TileInfo& info) {
    if (p_.q_scale_rows < kRowsPerWarpgroup) {
      return;
    }
#pragma unroll
    for (int group = 0; group < kConfig.math_warpgroups; ++group) {
      const int row = info.row0 + group * kRowsPerWarpgroup;
      if (row < info.rows) {
        info.q_scale[group] = p_.q_scale[(info.q_block * kTileK + row) / p_.q_scale_rows];
      }
    }
  }

  PANTILE_DEVICE void locate_keys(Fp8TileInfo& info) {
    info.keys = p_.seqlen_k;
    info.k_block = info.batch * core::scale_blocks(p_.seqlen_k, kTileK);
    if (p_.cu_seqlens_k != nullptr) {
      const int begin = p_.cu_seqlens_k[info.batch];
      info.keys = p_.cu_seqlens_k[info.batch + 1] - begin;
      info.k_block = static_cast<int>(core::first_packed_block(begin, info.batch, kTileK));
    }
    if (p_.seqused_k != nullptr) {
      info.keys = core::clamp(p_.seqused_k[info.batch], 0, info.keys);
    }
    info.k_block += info.head / p_.group * p_.k_blocks;
    const core::Mask mask{info.rows, info.keys, p_.window_left, p_.window_right};
    const core::Span rows{info.row0, core::min_of(info.row0 + kTileQ, info.rows)};
    const core::TilePlan plan = core::plan_row_tile(mask, rows, kTileK);
    info.visit_begin = plan.visit.begin;
    info.visit_end = plan.visit.empty() ? 0 : plan.visit.end;
  }

  PANTILE_DEVICE void load_q(std::uint32_t tile, const Fp8TileInfo& info) {
    const int buffer = buffer_of<kQ>(tile);
    const int row = info.q_block * kTileK + info.row0;
    if (info.visit_end == 0) {
      prim::arrive(s_.q_full[buffer]);
      return;
    }
    prim::arrive_and_expect(s_.q_full[buffer], kConfig.math_warpgroups * kConfig.q_bytes());
    for (int group = 0; group < kConfig.math_warpgroups; ++group) {
      for (int panel = 0; panel < kConfig.panels(); ++panel) {
        prim::tma_load(s_.q[buffer][group] + panel * kRowsPerWarpgroup * kPanel, &maps_.q,
                       s_.q_full[buffer],
                       prim::TileOrigin3{panel * kPanel, row + group * kRowsPerWarpgroup, 0});
      }
    }
  }

  PANTILE_DEVICE void load_keys(Fp8TileInfo& info) {
    if (info.visit_end == 0) {
      return;
    }
    // Scales travel with K through shared memory: a load in the math warps, even one long before
    // its use, ends up above the products, which then wait for it.
    float2 next_scale = p_.kv_scale[info.k_block + info.visit_end - 1];
    float v_before = core::kSmallestScale;  // the unit of O; O is 0
    float v_most = 0.0f;                    // of the units so far
    bool nonfinite = false;
    for (int step = info.visit_end - 1; step >= info.visit_begin; --step, place_ = place_.after()) {
      const float2 scale = next_scale;
      if (step > info.visit_begin) {
        next_scale = p_.kv_scale[info.k_block + step - 1];
      }
      nonfinite = nonfinite || __float_as_int(scale.y) < 0;  // of -0 too
      const float v = core::value_unit(fabsf(scale.y), v_before);
      const float unit = fminf(__fdividef(v_before, v), kLargestUnit);
      v_before = v;
      v_most = fmaxf(v_most, v);
      Fp8Stage& stage = s_.stages[place_.stage];
      prim::wait(stage.k_empty, place_.parity ^ 1);
      stage.scales = {scale.x, unit, v, v_most};
      if (step == info.visit_begin) {
        info.v_scale = v;
        info.v_nonfinite = nonfinite;
      }
      load_step(stage, info.k_block + step);
    }
  }

  // K and V of a block, of which K's stage is free.
  PANTILE_DEVICE void load_step(Fp8Stage& stage, int block) {
    prim::arrive_and_expect(stage.k_full, kConfig.k_bytes());
    for (int panel = 0; panel < kConfig.panels(); ++panel) {
      prim::tma_load(s_.k[place_.stage] + panel * kTileK * kPanel, &maps_.k, stage.k_full,
                     prim::TileOrigin3{panel * kPanel, block * kTileK, 0});
    }
    prim::wait(stage.v_empty, place_.parity ^ 1);
    prim::arrive_and_expect(stage.v_full, kConfig.head_dim * kTileK);
    prim::tma_load(s_.v[place_.stage], &maps_.v, stage.v_full, prim::TileOrigin3{0, 0, block});
  }

  // The last block leaves the counter as it was found.
  PANTILE_DEVICE void reset_counter() {
    if (atomicAdd(p_.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p_.counter[0] = 0;
      p_.counter[1] = 0;
    }
  }

  Fp8Storage<kConfig>& s_;
  const Fp8Maps& maps_;
  const Fp8Params& p_;
  Fp8Place<kConfig.stages> place_;
};

}  // namespace pantile::hopper
