// From the accumulators of the Hopper FP8 forward to O in global memory. Each warp has its 16 rows
// and a place for them in shared memory; nothing here waits for another warp.
#pragma once

#include "attn/fp8_nonfinite.cuh"
#include "core/geometry.h"
#include "hopper/fp8/storage.cuh"
#include "prim/convert.cuh"
#include "prim/matrix.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

// O * factor as 16-bit numbers to the warp's place.
template <DType kDType, Fp8Config kConfig, class Sums>
PANTILE_DEVICE void stage_output(std::uint32_t place, const Sums& sums, const float (&factor)[2],
                                 int lane) {
#pragma unroll
  for (int j = 0; j < kConfig.head_dim / 16; ++j) {
    std::uint32_t packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int k = 8 * j + 2 * r;
      packed[r] =
          prim::pack<kDType>(sums.output(k) * factor[r & 1], sums.output(k + 1) * factor[r & 1]);
    }
    const int column = 16 * j + lane / 16 * 8;
    prim::store_matrix_x4(place + kConfig.o_tile().offset(lane & 15, column), packed[0], packed[1],
                          packed[2], packed[3]);
  }
}

// What a warp does with its rows of a finished tile once they lie in its place. Used in rare or
// last steps only: keeps nothing in registers across the kernel.
template <Fp8Config kConfig, MaskKind kMask>
class Fp8RowStore {
 public:
  // row0: first row of the warp, within its sequence.
  PANTILE_DEVICE Fp8RowStore(const Fp8Params& params, const Fp8TileInfo& info, unsigned char* place,
                             int row0, int lane)
      : p_(params), info_(info), place_(place), row0_(row0), lane_(lane) {}

  // Quantised V holds 0 where V was not finite; rows that attend to such a key become NaN here, and
  // no other row is touched. Rare and slow.
  PANTILE_DEVICE void restore_nonfinite() {
    const core::Mask mask{info_.rows, info_.keys, p_.window_left, p_.window_right};
#pragma unroll 1
    for (int step = info_.visit_begin; step < info_.visit_end; ++step) {
      const std::int64_t block = info_.k_block + step;
      if (__float_as_int(p_.kv_scale[block].y) >= 0) {  // the sign bit, of -0 too
        continue;
      }
#pragma unroll 1
      for (int column = lane_; column < p_.head_dim_v; column += 32) {
        const uint4 keys = p_.v_nonfinite[block * p_.head_dim_v + column];
        if ((keys.x | keys.y | keys.z | keys.w) != 0) {
          mark_rows(mask, keys, step * Fp8Config::kTileK, column);
        }
      }
    }
    __syncwarp();
  }

  PANTILE_DEVICE void store(const CUtensorMap& map) {
    const int rows = info_.rows - row0_;
    if (rows <= 0) {
      return;
    }
    const int row = info_.q_row + row0_;
    if (p_.clipped || rows >= Fp8Config::kWarpRows) {
      if (lane_ == 0) {
        store_whole(map, row);
      }
    } else {
      store_rows(row, rows);
    }
  }

 private:
  PANTILE_DEVICE void mark_rows(const core::Mask& mask, const uint4& keys, int first_key,
                                int column) {
    constexpr std::uint16_t kNaN = 0x7fff;  // in bf16 and in fp16
#pragma unroll 1
    for (int r = 0; r < Fp8Config::kWarpRows; ++r) {
      if (attn::attends(core::visible_keys(mask, row0_ + r), keys, first_key)) {
        *reinterpret_cast<std::uint16_t*>(place_ + kConfig.o_tile().offset(r, column)) = kNaN;
      }
    }
  }

  PANTILE_DEVICE void store_whole(const CUtensorMap& map, int row) {
#pragma unroll 1
    for (int panel = 0; panel < kConfig.o_tile().panels(); panel += p_.o_panels) {
      prim::tma_store(&map, place_ + panel * kConfig.o_tile().panel_bytes(),
                      prim::TileOrigin{panel * tile::kPanelColumns, row, 0, info_.head,
                                       info_.batch * p_.o_steps.batch});
    }
  }

  // The last rows of a sequence that the next one follows in memory.
  PANTILE_DEVICE void store_rows(int row, int rows) {
    constexpr int kRowChunks = kConfig.head_dim / tile::kChunkColumns;
    auto* to = static_cast<std::uint16_t*>(p_.o) + info_.batch * p_.o_strides.batch +
               info_.head * p_.o_strides.head + row * p_.o_strides.seq;
#pragma unroll 1
    for (int i = lane_; i < rows * kRowChunks; i += 32) {
      const int r = i / kRowChunks;
      const int column = i % kRowChunks * tile::kChunkColumns;
      if (column < p_.head_dim_v) {
        *reinterpret_cast<uint4*>(to + r * p_.o_strides.seq + column) =
            *reinterpret_cast<const uint4*>(place_ + kConfig.o_tile().offset(r, column));
      }
    }
  }

  const Fp8Params& p_;
  const Fp8TileInfo& info_;
  unsigned char* place_;
  int row0_, lane_;
};

}  // namespace pantile::hopper
