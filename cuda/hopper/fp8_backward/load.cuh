// The roles of the FP8 backward that compute nothing, each one thread: the producer brings images
// into shared memory, an adder for each math warpgroup adds its fragments of dQ into global memory.
#pragma once

#include "hopper/fp8_backward/storage.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// Describes work item `work`: a tile of keys of a key head.
PANTILE_DEVICE void locate_fp8_keys(const Fp8BackwardParams& p, int work, Fp8KeyTile& tile) {
  if (p.keys.cu_seqlens == nullptr) {
    const core::WorkTile place = p.order.tile(work);
    tile.batch = place.batch;
    tile.head = place.head;
    tile.tile = place.tile;
    tile.block =
        place.batch * core::ceil_div(p.keys.max_length, Fp8BackwardConfig::kKeys) + place.tile;
  } else {
    const int slot = work / p.heads_k;
    tile.head = work % p.heads_k;
    tile.batch = core::sequence_of_slot(p.keys.cu_seqlens, p.batch, core::kBlockedRows, slot);
    tile.tile = slot - static_cast<int>(core::first_block(p.keys, tile.batch));
    tile.block = slot;
  }
  core::SequenceSide whole = p.keys;
  whole.seqused = nullptr;
  tile.capacity = core::locate_sequence(whole, tile.batch).length;
  const core::Sequence keys = core::locate_sequence(p.keys, tile.batch);
  const core::Sequence queries = core::locate_sequence(p.queries, tile.batch);
  tile.key_row = static_cast<int>(keys.row);
  tile.keys = keys.length;
  tile.first_row_tile = 2 * static_cast<int>(core::first_block(p.queries, tile.batch));
  tile.mask = core::Mask{queries.length, keys.length, p.window_left, p.window_right};
  const int begin = tile.tile * Fp8BackwardConfig::kKeys;
  const core::Span span{begin, core::min_of(begin + Fp8BackwardConfig::kKeys, keys.length)};
  tile.rows = core::TilePlan{{0, 0}, {0, 0}};
  if (span.empty()) {
    return;
  }
  tile.rows = core::plan_key_tile(tile.mask, span, Fp8BackwardConfig::kRows);
  const float* scales = p.kv_scale + 2 * (std::int64_t{tile.head} * p.k_blocks + tile.block);
  tile.scale_k = scales[0];
  tile.score_factor = p.scale_log2 * tile.scale_k;
  tile.grad_factor = fabsf(scales[1]) * p.value_units / core::kWeightUnits;
  if (span.size() < Fp8BackwardConfig::kKeys) {
    tile.rows.full = core::Span{0, 0};  // keys past the last one are hidden in every step
    return;
  }
  // The ragged last tile of queries, too: rows past the end have terms that make their P zero.
  const int last = tile.rows.visit.end - 1;
  const bool seen =
      core::visible_rows(tile.mask, begin).end == queries.length &&
      core::visible_rows(tile.mask, span.end - 1).begin <= last * Fp8BackwardConfig::kRows;
  if (seen && tile.rows.full.end == last) {
    ++tile.rows.full.end;
  }
}

template <int kDim>
PANTILE_DEVICE void load_fp8_images(Fp8BackwardStorage<kDim>& s, const Fp8BackwardParams& p) {
  using Rows = RowImage<kDim>;
  const Fp8KeyTile& tile = s.tile;
  const auto* keys = reinterpret_cast<const KeyImage<kDim>*>(p.key_images) +
                     (std::int64_t{tile.head} * p.k_blocks + tile.block);
  prim::arrive_and_expect(s.keys_full, sizeof(KeyImage<kDim>));
  prim::bulk_load(&s.keys, keys, sizeof(KeyImage<kDim>), s.keys_full);
  int stage = 0;
  std::uint32_t parity = 0;
  for (int head = tile.head * p.group; head < (tile.head + 1) * p.group; ++head) {
    const auto* rows = reinterpret_cast<const Rows*>(p.row_images) +
                       (std::int64_t{head} * 2 * p.q_blocks + tile.first_row_tile);
    for (int i = tile.rows.visit.begin; i < tile.rows.visit.end; ++i) {
      prim::wait(s.empty[stage], parity ^ 1);
      prim::arrive_and_expect(s.full[stage], Rows::kUsedBytes);
      prim::bulk_load(&s.stages[stage], rows + i, Rows::kUsedBytes, s.full[stage]);
      if (++stage == Fp8BackwardConfig::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Deterministic mode: tiles of keys add to a tile of queries one after the other, the first one
// first. Work is taken in an order in which they ascend, so whoever is waited for is running.
PANTILE_DEVICE void await_turn(const std::int32_t* turn, int number) {
  int found = 0;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
  } while (found != number);
  asm volatile("fence.proxy.async;" ::: "memory");  // the additions before, then ours
}

PANTILE_DEVICE void pass_turn(std::int32_t* turn, int number) {
  prim::bulk_wait<0>();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(number) : "memory");
}

template <int kDim>
PANTILE_DEVICE void add_fp8_queries(Fp8BackwardStorage<kDim>& s, const Fp8BackwardParams& p,
                                    int warpgroup) {
  constexpr int kFragment = Fp8BackwardConfig::kRows * kDim / 2;
  const Fp8KeyTile& tile = s.tile;
  std::uint32_t parity = 0;
  for (int head = tile.head * p.group; head < (tile.head + 1) * p.group; ++head) {
    for (int i = tile.rows.visit.begin; i < tile.rows.visit.end; ++i) {
      const std::int64_t at =
          2 * (std::int64_t{head} * 2 * p.q_blocks + tile.first_row_tile + i) + warpgroup;
      prim::wait(s.dq_full[warpgroup], parity);
      parity ^= 1;
      prim::fence_async_proxy();  // the fragment was written by ordinary stores
      int number = 0;
      if (p.turns != nullptr) {
        const core::Span rows{i * Fp8BackwardConfig::kRows,
                              core::min_of((i + 1) * Fp8BackwardConfig::kRows, tile.mask.rows)};
        number =
            tile.tile - core::plan_row_tile(tile.mask, rows, Fp8BackwardConfig::kKeys).visit.begin;
        await_turn(p.turns + at, number);
      }
      prim::bulk_add_f32(p.dq_sum + at * kFragment, s.dQ[warpgroup], kFragment * 4);
      prim::bulk_commit();
      prim::bulk_wait_read<0>();
      prim::arrive(s.dq_empty[warpgroup]);
      if (p.turns != nullptr) {
        pass_turn(p.turns + at, number + 1);
      }
    }
  }
  prim::bulk_wait<0>();
}

}  // namespace pantile::hopper
