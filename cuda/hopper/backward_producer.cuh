// The copying side of the backward kernels: one thread loads K, V once and Q, dO with their row
// terms tile after tile; the paired kernel has another thread per consumer warpgroup that adds dQ
// fragments into global memory.
#pragma once

#include "hopper/backward_params.cuh"
#include "hopper/backward_storage.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// All panels of a tile; columns past the head dim and rows past the sequence arrive as zeros.
template <int kRows, int kPanels>
PANTILE_DEVICE void load_tile(Tile<kRows, kPanels>& tile, const CUtensorMap& map,
                              prim::Mbarrier& full, const MapOrigin& origin, int row, int head) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    prim::tma_load(
        tile.bytes + panel * tile.kPanelBytes, &map, full,
        prim::TileOrigin{panel * kPanel, origin.row + row, head, origin.start, origin.batch});
  }
}

// Called by one thread. Q runs ahead of dO by as much as the rings allow.
template <class Config, class Storage>
PANTILE_DEVICE void load_tiles(Storage& storage, const BackwardMaps& maps,
                               const BackwardParams& params, const KeyTile& key_tile) {
  using Terms = RowTerms<Config::kTileQ>;
  constexpr int kQueryBytes = sizeof(storage.q[0]) + Terms::kBytes;
  constexpr int kGradBytes = sizeof(storage.grad_o[0]) + Terms::kBytes;
  StageCursor<sizeof(storage.q) / sizeof(storage.q[0])> query;
  StageCursor<sizeof(storage.grad_o) / sizeof(storage.grad_o[0])> grad;
  prim::prefetch_tensor_map(&maps.q);
  prim::prefetch_tensor_map(&maps.grad_o);
  if (!key_tile.rows.empty()) {
    const int key = key_tile.tile * Config::kTileK;
    prim::arrive_and_expect(storage.k_full, sizeof(storage.k));
    load_tile(storage.k, maps.k, storage.k_full, key_tile.key_origin, key, key_tile.key_head);
    prim::arrive_and_expect(storage.v_full, sizeof(storage.v));
    load_tile(storage.v, maps.v, storage.v_full, key_tile.key_origin, key, key_tile.key_head);
  }
  prim::wait_for_previous_grid();  // it writes the row terms
  for (int g = 0; g < params.group; ++g) {
    const int head = key_tile.key_head * params.group + g;
    const std::int64_t first_tile = head * params.row_tile_count + key_tile.first_row_tile;
    for (int tile = key_tile.rows.begin; tile < key_tile.rows.end; ++tile) {
      const std::int64_t terms = (first_tile + tile) * Config::kTileQ;
      const int row = tile * Config::kTileQ;
      prim::wait(storage.query.empty[query.stage], query.parity ^ 1);
      prim::Mbarrier& query_full = storage.query.full[query.stage];
      prim::arrive_and_expect(query_full, kQueryBytes);
      load_tile(storage.q[query.stage], maps.q, query_full, key_tile.query_origin, row, head);
      prim::bulk_load(&storage.lse[query.stage], params.lse_terms + terms, Terms::kBytes,
                      query_full);
      query.advance();
      prim::wait(storage.grad.empty[grad.stage], grad.parity ^ 1);
      prim::Mbarrier& grad_full = storage.grad.full[grad.stage];
      prim::arrive_and_expect(grad_full, kGradBytes);
      load_tile(storage.grad_o[grad.stage], maps.grad_o, grad_full, key_tile.query_origin, row,
                head);
      prim::bulk_load(&storage.delta[grad.stage], params.delta_terms + terms, Terms::kBytes,
                      grad_full);
      grad.advance();
    }
  }
}

// Called by one thread for each consumer warpgroup: adds the warpgroup's fragment of every dQ tile.
template <class Config, SumKind kSum, class Storage>
PANTILE_DEVICE void add_query_gradients(Storage& storage, const BackwardParams& params,
                                        const KeyTile& key_tile, int warpgroup) {
  constexpr int kFragment = 64 * 64;
  constexpr int kTileFloats = Config::kConsumers * kFragment;
  // Columns past the head dim lie at the end of the second fragment.
  constexpr int kLastColumns = Config::kHeadDim - (Config::kPanels - 1) * kPanel;
  constexpr bool kColumnSplit = Config::kPanels == Config::kConsumers;
  const int bytes = 64 * 4 * (kColumnSplit && warpgroup > 0 ? kLastColumns : kPanel);
  std::uint32_t parity = 0;
  prim::wait_for_previous_grid();
  for (int g = 0; g < params.group; ++g) {
    const int head = key_tile.key_head * params.group + g;
    float* to = params.dq_sum +
                (head * params.row_tile_count + key_tile.first_row_tile) * kTileFloats +
                warpgroup * kFragment;
    for (int tile = key_tile.rows.begin; tile < key_tile.rows.end; ++tile) {
      prim::wait(storage.dq_full[warpgroup], parity);
      parity ^= 1;
      float* fragment = to + static_cast<std::int64_t>(tile) * kTileFloats;
      if constexpr (kSum == SumKind::integer) {
        prim::bulk_add_u32(reinterpret_cast<std::uint32_t*>(fragment), storage.dQ[warpgroup],
                           bytes);
      } else {
        prim::bulk_add_f32(fragment, storage.dQ[warpgroup], bytes);
      }
      prim::bulk_commit();
      prim::bulk_wait_read<0>();
      prim::arrive(storage.dq_empty[warpgroup]);
    }
  }
  prim::bulk_wait<0>();
}

}  // namespace pantile::hopper
