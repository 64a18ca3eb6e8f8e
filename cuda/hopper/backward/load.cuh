// The roles of the backward kernels that compute nothing, each one thread: the scheduler claims
// tiles of keys and describes them to the others; the loader loads K and V of a tile once and Q, dO
// with their row terms tile after tile; in the paired kernel, an adder per consumer warpgroup adds
// dQ fragments into global memory.
#pragma once

#include "hopper/backward/params.cuh"
#include "hopper/backward/storage.cuh"
#include "hopper/backward/walk.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// The first `panels` panels of a tile, all that the tensor has (sequence_map.h). Columns past the
// head dim in the last one and rows past the sequence arrive as zeros. kWhole: the tensor has all;
// a branch for each copy costs a sixth of the speed at head dim 256.
template <bool kWhole, int kRows, int kPanels>
PANTILE_DEVICE void load_tile(Tile<kRows, kPanels>& tile, int panels, const CUtensorMap& map,
                              prim::Mbarrier& full, const MapOrigin& origin, int row, int head) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (kWhole || panel < panels) {
      prim::tma_load(
          tile.bytes + panel * tile.kPanelBytes, &map, full,
          prim::TileOrigin{panel * kPanel, origin.row + row, head, origin.start, origin.batch});
    }
  }
}

// Zeros in the panels that a narrower tensor does not have, once: nothing loads them.
template <int kRows, int kPanels>
PANTILE_DEVICE void clear_panels(Tile<kRows, kPanels>& tile, int panels) {
  const int bytes = panels * tile.kPanelBytes;
  for (int i = bytes + static_cast<int>(threadIdx.x) * 16; i < tile.kBytes;
       i += static_cast<int>(blockDim.x) * 16) {
    *reinterpret_cast<uint4*>(tile.bytes + i) = make_uint4(0, 0, 0, 0);
  }
}

// By all threads of a block, before the barrier behind which the first product is issued.
template <class Config, class Storage>
PANTILE_DEVICE void clear_missing_panels(Storage& storage, const BackwardParams& params) {
  const int panels_qk = panels(params.head_dim);
  const int panels_v = panels(params.head_dim_v);
  if (panels_qk < Config::kPanels) {
    clear_panels(storage.k, panels_qk);
    for (auto& stage : storage.q) {
      clear_panels(stage, panels_qk);
    }
  }
  if (panels_v < Config::kPanelsV) {
    clear_panels(storage.v, panels_v);
    for (auto& stage : storage.grad_o) {
      clear_panels(stage, panels_v);
    }
  }
  prim::fence_async_proxy();
}

// False in a second pass that has nothing to repeat.
PANTILE_DEVICE bool has_work(const BackwardParams& params) {
  if (!params.repeats) {
    return true;
  }
  prim::wait_for_previous_grid();
  return *params.measured != 0;
}

template <class Config, MaskKind kMask, SumKind kSum, class Walk>
PANTILE_DEVICE void schedule(WorkQueue& queue, const BackwardParams& params,
                             const attn::VariantParams& variant_params) {
  const Walk walk(variant_params);
  walk.wait_for_lists();
  const auto claim = [&params] {
    prim::wait_for_previous_grid();  // it sets the counter to zero
    return static_cast<int>(gridDim.x) + atomicAdd(params.claimed, 1);
  };
  StageCursor<2> slot;
  std::uint32_t wanted_parity = 0;
  int work = static_cast<int>(blockIdx.x);
  for (;; slot.advance()) {
    KeyTile& key_tile = queue.tiles[slot.stage];
    prim::wait(queue.ring.empty[slot.stage], slot.parity ^ 1);
    while (work < params.work_count &&
           !(walk.template describe<Config, kMask>(params, work, key_tile) &&
             (kSum == SumKind::floating || !params.repeats || is_measured(params, key_tile)))) {
      work = claim();
    }
    if (work >= params.work_count) {
      key_tile.batch = -1;
      prim::arrive(queue.ring.full[slot.stage]);
      return;
    }
    prim::arrive(queue.ring.full[slot.stage]);
    // Later than the rest, so that K and V of the first tile are loaded while the kernel before
    // drains, and those of the others without waiting for this.
    prim::wait_for_previous_grid();
    key_tile.careful = is_careful(params, key_tile);
    prim::arrive(queue.careful_known[slot.stage]);
    // A block that claimed at once would take long tiles out of the order in which they run.
    prim::wait(queue.wanted, wanted_parity);
    wanted_parity ^= 1;
    work = claim();
  }
}

template <class Config, class Storage, class Walk>
class Loader {
 public:
  PANTILE_DEVICE Loader(Storage& storage, const BackwardMaps& maps, const BackwardParams& params,
                        const attn::VariantParams& variant_params)
      : storage_(storage),
        maps_(maps),
        params_(params),
        panels_qk_(panels(params.head_dim)),
        panels_v_(panels(params.head_dim_v)),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    prim::prefetch_tensor_map(&maps_.q);
    prim::prefetch_tensor_map(&maps_.grad_o);
    if (panels_qk_ == Config::kPanels && panels_v_ == Config::kPanelsV) {
      load_tiles<true>();
    } else {
      load_tiles<false>();
    }
  }

 private:
  using Terms = RowTerms<Config::kTileQ>;
  static constexpr int kKeyPanelBytes = Config::kTileK * 128;
  static constexpr int kRowPanelBytes = Config::kTileQ * 128;

  template <bool kWhole>
  PANTILE_DEVICE void load_tiles() {
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      if (!key_tile->rows.empty()) {
        load_keys<kWhole>(*key_tile);
        prim::wait_for_previous_grid();  // it writes the row terms
        load_rows<kWhole>(*key_tile);
      }
      prim::arrive(storage_.work.wanted);
      work.done(true);
    }
  }

  template <bool kWhole>
  PANTILE_DEVICE int panels_qk() const {
    return kWhole ? Config::kPanels : panels_qk_;
  }
  template <bool kWhole>
  PANTILE_DEVICE int panels_v() const {
    return kWhole ? Config::kPanelsV : panels_v_;
  }

  template <bool kWhole>
  PANTILE_DEVICE void load_keys(const KeyTile& key_tile) {
    const int key = key_tile.tile * Config::kTileK;
    prim::wait(storage_.key.empty[0], key_.parity ^ 1);
    prim::arrive_and_expect(storage_.key.full[0], panels_qk<kWhole>() * kKeyPanelBytes);
    load_tile<kWhole>(storage_.k, panels_qk<kWhole>(), maps_.k, storage_.key.full[0],
                      key_tile.key_origin, key, key_tile.key_head);
    prim::wait(storage_.value.empty[0], key_.parity ^ 1);
    prim::arrive_and_expect(storage_.value.full[0], panels_v<kWhole>() * kKeyPanelBytes);
    load_tile<kWhole>(storage_.v, panels_v<kWhole>(), maps_.v, storage_.value.full[0],
                      key_tile.key_origin, key, key_tile.key_head);
    key_.advance();
  }

  // Q runs ahead of dO by as much as the rings allow.
  template <bool kWhole>
  PANTILE_DEVICE void load_rows(const KeyTile& key_tile) {
    for (int g = 0; g < params_.group; ++g) {
      const int head = key_tile.key_head * params_.group + g;
      const std::int64_t first_tile = head * params_.row_tile_count + key_tile.first_row_tile;
      walk_.begin_head(key_tile, head);
      for (int i = walk_.begin(key_tile); i < walk_.end(key_tile); ++i) {
        const int tile = walk_.tile(i);
        const std::int64_t terms = (first_tile + tile) * Config::kTileQ;
        const int row = tile * Config::kTileQ;
        prim::wait(storage_.query.empty[query_.stage], query_.parity ^ 1);
        prim::Mbarrier& query_full = storage_.query.full[query_.stage];
        prim::arrive_and_expect(query_full, panels_qk<kWhole>() * kRowPanelBytes + Terms::kBytes);
        load_tile<kWhole>(storage_.q[query_.stage], panels_qk<kWhole>(), maps_.q, query_full,
                          key_tile.query_origin, row, head);
        prim::bulk_load(&storage_.lse[query_.stage], params_.lse_terms + terms, Terms::kBytes,
                        query_full);
        query_.advance();
        prim::wait(storage_.grad.empty[grad_.stage], grad_.parity ^ 1);
        prim::Mbarrier& grad_full = storage_.grad.full[grad_.stage];
        prim::arrive_and_expect(grad_full, panels_v<kWhole>() * kRowPanelBytes + Terms::kBytes);
        load_tile<kWhole>(storage_.grad_o[grad_.stage], panels_v<kWhole>(), maps_.grad_o, grad_full,
                          key_tile.query_origin, row, head);
        prim::bulk_load(&storage_.delta[grad_.stage], params_.delta_terms + terms, Terms::kBytes,
                        grad_full);
        grad_.advance();
      }
    }
  }

  Storage& storage_;
  const BackwardMaps& maps_;
  const BackwardParams& params_;
  const int panels_qk_, panels_v_;  // of 64 columns, that the tensors have
  StageCursor<sizeof(Storage::q) / sizeof(Storage::q[0])> query_;
  StageCursor<sizeof(Storage::grad_o) / sizeof(Storage::grad_o[0])> grad_;
  StageCursor<1> key_;  // K and V
  Walk walk_;
};

// Adds a consumer warpgroup's fragment of every dQ tile into global memory.
template <class Config, SumKind kSum, class Storage, class Walk>
class QueryGradientAdder {
 public:
  PANTILE_DEVICE QueryGradientAdder(Storage& storage, const BackwardParams& params,
                                    const attn::VariantParams& variant_params, int warpgroup)
      : storage_(storage), params_(params), warpgroup_(warpgroup), walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    prim::wait_for_previous_grid();  // it sets the sums to zero
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      has_sums_ = params_.row_sums != nullptr && work.is_careful();
      for (int g = 0; g < params_.group; ++g) {
        add_head(*key_tile, key_tile->key_head * params_.group + g);
      }
      work.done(true);
    }
    prim::bulk_wait<0>();
  }

 private:
  static constexpr int kFragment = common::kFragmentFloats;
  static constexpr int kTileFloats = Config::kConsumers * kFragment;
  static constexpr int kTileSums = common::row_sum_floats(kTileFloats);

  // Columns past the head dim lie at the end of the second fragment.
  PANTILE_DEVICE int bytes() const {
    constexpr int kLastColumns = Config::kHeadDim - (Config::kPanels - 1) * kPanel;
    constexpr bool kColumnSplit = Config::kPanels == Config::kConsumers;
    return 64 * 4 * (kColumnSplit && warpgroup_ > 0 ? kLastColumns : kPanel);
  }

  // To the sum of dQ or of dS.
  PANTILE_DEVICE static void add(float* to, const float* from, int bytes) {
    if constexpr (kSum == SumKind::integer) {
      prim::bulk_add_u32(reinterpret_cast<std::uint32_t*>(to), from, bytes);
    } else {
      prim::bulk_add_f32(to, from, bytes);
    }
  }

  PANTILE_DEVICE void add_head(const KeyTile& key_tile, int head) {
    const std::int64_t index = head * params_.row_tile_count + key_tile.first_row_tile;
    float* const to = params_.dq_sum + index * kTileFloats + warpgroup_ * kFragment;
    float* const row_sums = params_.row_sums + index * kTileSums + warpgroup_ * 64;
    walk_.begin_head(key_tile, head);
    for (int i = walk_.begin(key_tile); i < walk_.end(key_tile); ++i) {
      const int tile = walk_.tile(i);
      prim::wait(storage_.dq_full[warpgroup_], parity_);
      parity_ ^= 1;
      prim::fence_async_proxy();  // the fragment was written by ordinary stores
      const QueryGradientFragment& fragment = storage_.dQ[warpgroup_];
      add(to + static_cast<std::int64_t>(tile) * kTileFloats, fragment.values, bytes());
      if (has_sums_) {
        add(row_sums + static_cast<std::int64_t>(tile) * kTileSums, fragment.row_sums,
            sizeof(fragment.row_sums));
      }
      prim::bulk_commit();
      prim::bulk_wait_read<0>();
      prim::arrive(storage_.dq_empty[warpgroup_]);
    }
  }

  Storage& storage_;
  const BackwardParams& params_;
  const int warpgroup_;
  std::uint32_t parity_ = 0;
  bool has_sums_ = false;
  Walk walk_;
};

}  // namespace pantile::hopper
