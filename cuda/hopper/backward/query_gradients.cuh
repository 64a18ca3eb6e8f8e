// Stage 6 of the backward pipeline: dQ = dS K, added into global memory.
#pragma once

#include "hopper/backward/accumulator.cuh"
#include "hopper/backward/storage.cuh"
#include "hopper/backward/sum.cuh"
#include "hopper/backward/walk.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

namespace pantile::hopper::pipeline {

// A warpgroup multiplies, 64 columns at a time. Fragments go from its registers into global memory,
// or where shared memory allows it (Config::kBulkAdds) to an adder.
template <class Config, SumKind kSum, class Walk>
class QueryGradients {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE QueryGradients(Storage& storage, const BackwardParams& params,
                                const attn::VariantParams& variant_params)
      : storage_(storage),
        params_(params),
        dS_(prim::descriptor(prim::shared_address(storage.dS))),
        k_columns_(prim::descriptor(prim::shared_address(&storage.k))),
        key_ones_(prim::descriptor(prim::shared_address(&storage.key_ones))),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    prim::wait_for_previous_grid();  // it sets the sums to zero
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      const int begin = prim::uniform(key_tile->rows.begin);
      const int end = prim::uniform(key_tile->rows.end);
      if (begin < end) {
        prim::wait(storage_.key.full[0], keys_.parity);
        keys_.advance();
        if (prim::uniform(work.is_careful()) != 0) {
          add_rows<true>(*key_tile, begin, end);
        } else {
          add_rows<false>(*key_tile, begin, end);
        }
        release(storage_.key.empty[0]);
      }
      __syncwarp();
      work.done(prim::lane_index() == 0);
    }
  }

 private:
  static constexpr int kFragment = common::kFragmentFloats;
  static constexpr int kTileFloats = Config::kPanels * kFragment;
  // The panels share the work of summing dS: with each, the sums over so many steps of 16 keys are
  // made. At head dim 192 the third makes sums that are not used.
  static constexpr int kSteps = Config::kTileK / 16;
  static constexpr int kSumSteps = core::ceil_div(kSteps, Config::kPanels);

  static constexpr bool kUnusedSums = kSumSteps * Config::kPanels > kSteps;

  template <bool kCareful>
  PANTILE_DEVICE void add_rows(const KeyTile& key_tile, int begin, int end) {
    const int first_head = prim::uniform(key_tile.key_head) * params_.group;
    const int first_number = prim::uniform(key_tile.first_row_tile);
#pragma unroll 1
    for (int g = 0; g < params_.group; ++g) {
      const std::int64_t index = (first_head + g) * params_.row_tile_count + first_number;
      if constexpr (Walk::kListed) {
        walk_.begin_head(key_tile, first_head + g);
        end = walk_.end(key_tile);
      }
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        add_tile<kCareful>(key_tile, index + walk_.tile(i));
      }
    }
  }

  // `index` of the tile of rows: [head][number].
  template <bool kCareful>
  PANTILE_DEVICE void add_tile(const KeyTile& key_tile, std::int64_t index) {
    float row_scale[2] = {};
    if constexpr (kSum == SumKind::integer) {
      const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + prim::lane_index() / 4;
      const uint4* terms = params_.lse_terms + index * Config::kTileQ + row;
      row_scale[0] = Config::kBulkAdds ? held_scale(terms[0]) : __uint_as_float(terms[0].z);
      row_scale[1] = Config::kBulkAdds ? held_scale(terms[8]) : __uint_as_float(terms[8].z);
    }
    float* fragment = params_.dq_sum + index * kTileFloats;
    prim::wait(storage_.ds.full[cursor_.stage], cursor_.parity);
    const std::uint32_t a = dS_ + prim::descriptor_step(cursor_.stage * sizeof(storage_.dS[0]));
    // Unrolled, ptxas keeps several slices in registers and serialises all products (C7512).
#pragma unroll 1
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      QueryGradient<kCareful> dQ;
      constexpr std::uint32_t kPanelStep = prim::descriptor_step(Storage::kKeyPanelBytes);
      const std::uint32_t b = k_columns_ + panel * kPanelStep;
      prim::wgmma_fence();
      auto& columns = columns_of<false>(dQ);
      prim::wgmma_ss_write<Config::kDType, prim::Major::k, prim::Major::mn>(columns, a, b);
#pragma unroll
      for (int k = 1; k < kSteps; ++k) {
        prim::wgmma_ss<Config::kDType, prim::Major::k, prim::Major::mn>(
            columns, a + prim::descriptor_step(k * 32), b + prim::descriptor_step(k * 2048));
      }
      if constexpr (kCareful) {
        sum_keys<Config::kDType, kSumSteps>(
            sums_of(dQ), a + panel * kSumSteps % kSteps * prim::descriptor_step(32), key_ones_);
      }
      prim::wgmma_commit();
      prim::wgmma_wait<0>();
      prim::pin(dQ);
      if constexpr (kCareful && kUnusedSums) {
#pragma unroll
        for (int i = 0; i < kFragmentSums; ++i) {
          dQ[kFragmentValues + i] = panel * kSumSteps < kSteps ? dQ[kFragmentValues + i] : 0.0f;
        }
      }
      if (panel == Config::kPanels - 1) {
        release(storage_.ds.empty[cursor_.stage]);
      }
      if constexpr (kCareful && kSum == SumKind::integer) {
        scale_sums(dQ, row_sum_unit(params_, key_tile));
        if (is_measuring(row_scale)) {
          const int row =
              static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + prim::lane_index() / 4;
          const auto slot = static_cast<std::uint32_t>(index * Config::kTileQ + row);
          note_additions(dQ, {slot, slot + 8}, params_.row_max);
        }
      }
      if constexpr (Config::kBulkAdds) {
        send_fragment(dQ, row_scale);
      } else {
        add_fragment<kSum>(fragment + panel * kFragment, dQ, row_scale);
        if constexpr (kCareful) {
          if (params_.row_sums != nullptr) {
            add_sums<kSum>(params_.row_sums + (index * Config::kPanels + panel) * 64, dQ,
                           row_scale);
          }
        }
      }
    }
    cursor_.advance();
  }

  template <int kCount>
  PANTILE_DEVICE void send_fragment(float (&dQ)[kCount], const float (&row_scale)[2]) {
    prim::wait(storage_.dQ.ring.empty[staged_.stage], staged_.parity ^ 1);
    stage_fragment<kSum>(storage_.dQ.fragment[staged_.stage], dQ, row_scale);
    arrive_warp(storage_.dQ.ring.full[staged_.stage]);
    staged_.advance();
  }

  Storage& storage_;
  const BackwardParams& params_;
  const std::uint32_t dS_, k_columns_, key_ones_;
  StageCursor<Config::kScoreGradStages> cursor_;
  StageCursor<1> keys_;
  StageCursor<Config::kBulkAdds ? Config::kPanels : 1> staged_;
  Walk walk_;
};

// Adds staged fragments of integers into global memory; one thread. While one addition reads its
// fragment the next one is requested.
template <class Config, class Walk>
class FragmentAdder {
 public:
  using Storage = PipelineStorage<Config>;

  PANTILE_DEVICE FragmentAdder(Storage& storage, const BackwardParams& params,
                               const attn::VariantParams& variant_params)
      : storage_(storage), params_(params), walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    prim::wait_for_previous_grid();  // it sets the sums to zero
    WorkReader work(storage_.work);
    while (const KeyTile* key_tile = work.next()) {
      has_sums_ = params_.row_sums != nullptr && work.is_careful();
      for (int g = 0; g < params_.group; ++g) {
        const int head = key_tile->key_head * params_.group + g;
        const std::int64_t index = head * params_.row_tile_count + key_tile->first_row_tile;
        walk_.begin_head(*key_tile, head);
        for (int i = walk_.begin(*key_tile); i < walk_.end(*key_tile); ++i) {
          for (int panel = 0; panel < Config::kPanels; ++panel) {
            add((index + walk_.tile(i)) * Config::kPanels + panel);
          }
        }
      }
      work.done(true);
    }
    prim::bulk_wait<0>();
  }

 private:
  static constexpr int kFragment = common::kFragmentFloats;

  // `number` of the fragment: [head][number of the tile][panel].
  PANTILE_DEVICE void add(std::int64_t number) {
    prim::wait(storage_.dQ.ring.full[cursor_.stage], cursor_.parity);
    prim::fence_async_proxy();  // the fragment was written by ordinary stores
    const QueryGradientFragment& fragment = storage_.dQ.fragment[cursor_.stage];
    prim::bulk_add_u32(reinterpret_cast<std::uint32_t*>(params_.dq_sum + number * kFragment),
                       fragment.values, sizeof(fragment.values));
    if (has_sums_) {
      prim::bulk_add_u32(reinterpret_cast<std::uint32_t*>(params_.row_sums + number * 64),
                         fragment.row_sums, sizeof(fragment.row_sums));
    }
    prim::bulk_commit();
    prim::bulk_wait_read<1>();  // the one before
    if (requested_) {
      prim::arrive(storage_.dQ.ring.empty[previous_]);
    }
    previous_ = cursor_.stage;
    requested_ = true;
    cursor_.advance();
  }

  Storage& storage_;
  const BackwardParams& params_;
  StageCursor<Config::kPanels> cursor_;
  int previous_ = 0;
  bool requested_ = false;
  bool has_sums_ = false;
  Walk walk_;
};

}  // namespace pantile::hopper::pipeline
