// The storer of the Hopper forward: one warp that sends finished tiles of O from shared to global
// memory and then frees their place.
#pragma once

#include "hopper/forward/guard.cuh"
#include "hopper/forward/storage.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

template <ForwardConfig kConfig, DType kDType, MaskKind kMask, class Walk, KeySource kSource,
          class Variant>
class Storer {
 public:
  PANTILE_DEVICE Storer(ForwardStorage<kConfig>& storage, const ForwardMaps& maps,
                        const ForwardParams& params, const attn::VariantParams& variant_params)
      : s_(storage),
        maps_(maps),
        p_(params),
        variant_params_(variant_params),
        walk_(variant_params) {}

  PANTILE_DEVICE void run() {
    const bool leader = prim::elect_one();
    for (std::uint32_t tile = 0;; ++tile) {
      const int buffer = buffer_of<kQ>(tile);
      prim::wait(s_.o_full[buffer], parity_of<kQ>(tile));
      const int ring = buffer_of<ForwardConfig::kTiles>(tile);
      const TileInfo& info = s_.tiles[ring];
      if (info.visit_end > 0) {
        const int place = kConfig.o_apart ? info.o_stage : buffer;
        if ((kMask != MaskKind::full || Walk::kListed) && info.careful) {
          prepare_again(info, ring, place, leader);
        }
        if (!p_.output_f32) {
          store_tile(info, place, leader);
        }
      } else if (info.keys == 0) {
        break;
      }
      __syncwarp();
      if (leader) {
        prim::bulk_commit();
        prim::bulk_wait_read<0>();
        prim::arrive(kConfig.output_in_q() ? s_.q_empty[buffer] : s_.o_empty);
      }
    }
    if (leader) {
      prim::bulk_wait<0>();
    }
  }

 private:
  static constexpr int kQ = kConfig.q_buffers;

  // A tile that is done again: its first, spoilt output must be stored before this one.
  PANTILE_DEVICE void prepare_again(const TileInfo& info, int ring, int place, bool leader) {
    if (leader) {
      prim::bulk_wait<0>();
    }
    __syncwarp();
    if (s_.needs_repair[ring] != 0) {
      walk_.template begin<kConfig.tile_q()>(p_, info);
      repair<kConfig, kDType, Walk, Variant, kSource>(s_, p_, variant_params_, info, place, walk_);
      if (p_.output_f32) {
        repair_float32<kConfig, kDType>(s_, p_, info, place);
      }
      s_.needs_repair[ring] = 0;
    }
  }

  PANTILE_DEVICE void store_tile(const TileInfo& info, int place, bool leader) {
#pragma unroll 1
    for (int group = 0; group < kConfig.math_warpgroups; ++group) {
      const int row0 = info.row0 + group * kRowsPerWarpgroup;
      const int rows = info.rows - row0;
      if (rows <= 0) {
        return;
      }
      if (p_.clipped || rows >= kRowsPerWarpgroup) {
        if (leader) {
          store_whole(info, s_.o_tile(place, group), info.q_row + row0);
        }
      } else {
        store_rows(info, s_.o_tile(place, group), info.q_row + row0, rows);
      }
    }
  }

  PANTILE_DEVICE void store_whole(const TileInfo& info, const unsigned char* from, int row) {
#pragma unroll 1
    for (int panel = 0; panel < kConfig.o_tile().panels(); panel += p_.v_panels) {
      prim::tma_store(&maps_.o, from + panel * kConfig.o_tile().panel_bytes(),
                      prim::TileOrigin{panel * tile::kPanelColumns, row, 0, info.head,
                                       info.batch * p_.o_steps.batch});
    }
  }

  // The last rows of a sequence that the next one follows in memory.
  PANTILE_DEVICE void store_rows(const TileInfo& info, const unsigned char* from, int row,
                                 int rows) {
    constexpr int kRowChunks = kConfig.head_dim_v / tile::kChunkColumns;
    auto* to = static_cast<std::uint16_t*>(p_.o) + info.batch * p_.o_strides.batch +
               info.head * p_.o_strides.head + row * p_.o_strides.seq;
#pragma unroll 1
    for (int i = prim::lane_index(); i < rows * kRowChunks; i += 32) {
      const int r = i / kRowChunks;
      const int column = i % kRowChunks * tile::kChunkColumns;
      if (column < p_.head_dim_v) {
        *reinterpret_cast<uint4*>(to + r * p_.o_strides.seq + column) =
            *reinterpret_cast<const uint4*>(from + kConfig.o_tile().offset(r, column));
      }
    }
  }

  ForwardStorage<kConfig>& s_;
  const ForwardMaps& maps_;
  const ForwardParams& p_;
  const attn::VariantParams& variant_params_;
  Walk walk_;
};

}  // namespace pantile::hopper
