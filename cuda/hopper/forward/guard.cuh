// Keeps what a row does not attend to out of its output, without cost for finite data. P is exactly
// 0 there, but 0 * NaN and 0 * Inf are NaN, so that a non-finite value in an unattended row of V
// spoils the product.
//
// 1. Rows of V past the end of a sequence (a neighbour in a packed tensor, the unused part of a
//    cache) are set to zero before the product. TMA has done so already where the tensor itself
//    ends.
// 2. A tile of V on the edge of a mask is attended to by some of the rows only. Nobody looks at it
//    beforehand; but when a finished output holds NaN or Inf, the loader has its tile done again,
//    carefully: non-finite values of such tiles of V are set to zero before the product...
// 3. ...and, once the tile of O lies finished in shared memory, added to those rows that do attend
//    to them. All other elements come out bit for bit as if the values had been finite.
//
// Where all rows see all keys of a tile, non-finite values propagate by themselves. K needs no
// care: the mask replaces its scores. Two warps carry out 1 and 2 on order of the loader; 3 is the
// storer's.
#pragma once

#include "attn/mask.cuh"
#include "attn/variant.cuh"
#include "core/geometry.h"
#include "hopper/forward/key_source.cuh"
#include "hopper/forward/output.cuh"
#include "hopper/forward/storage.cuh"
#include "hopper/forward/walk.cuh"
#include "prim/nonfinite.cuh"
#include "prim/tma.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

template <ForwardConfig kConfig, DType kDType>
class Guard {
 public:
  PANTILE_DEVICE Guard(ForwardStorage<kConfig>& storage, int guard)
      : s_(storage), thread_(guard * 32 + prim::lane_index()) {}

  PANTILE_DEVICE void run() {
    constexpr int kOrders = ForwardStorage<kConfig>::kOrders;
    for (std::uint32_t count = 0;; ++count) {
      const int slot = buffer_of<kOrders>(count);
      prim::wait(s_.order_full[slot], parity_of<kOrders>(count));
      const GuardOrder order = s_.orders[slot];
      if (order.keep_rows < 0) {
        return;
      }
      prim::wait(s_.v_full[order.stage], order.parity);
      if (order.keep_rows < kConfig.tile_k) {
        clear_rows(order.stage, order.keep_rows);
      }
      if (order.scan) {
        replace_nonfinite(order.stage, order.tile);
      }
      prim::fence_async_proxy();
      __syncwarp();
      if (prim::lane_index() == 0) {
        prim::arrive(s_.order_done[slot]);
      }
    }
  }

 private:
  static constexpr int kThreads = 32 * kGuardWarps;
  static constexpr int kChunks = kConfig.v_tile().bytes() / core::kChunkBytes;

  PANTILE_DEVICE uint4& chunk(int stage, int index) {
    return reinterpret_cast<uint4*>(s_.v[stage])[index];
  }

  // A panel's rows are contiguous, so the swizzle inside a row does not matter here. Each thread
  // always works on the same chunks: the guards need no barrier between them.
  PANTILE_DEVICE void clear_rows(int stage, int first_row) {
    constexpr int kRowChunks = tile::kPanelRowBytes / core::kChunkBytes;
    constexpr int kPanelChunks = kConfig.tile_k * kRowChunks;
    static_assert(kPanelChunks % kThreads == 0);
#pragma unroll 1
    for (int i = thread_; i < kChunks; i += kThreads) {
      if (i % kPanelChunks >= first_row * kRowChunks) {
        chunk(stage, i) = uint4{0, 0, 0, 0};
      }
    }
  }

  PANTILE_DEVICE void replace_nonfinite(int stage, int tile) {
    bool found = false;
#pragma unroll 1
    for (int i = thread_; i < kChunks; i += kThreads) {
      const uint4 values = chunk(stage, i);
      const uint4 finite{
          prim::zero_nonfinite<kDType>(values.x), prim::zero_nonfinite<kDType>(values.y),
          prim::zero_nonfinite<kDType>(values.z), prim::zero_nonfinite<kDType>(values.w)};
      if (finite.x != values.x || finite.y != values.y || finite.z != values.z ||
          finite.w != values.w) {
        chunk(stage, i) = finite;
        found = true;
      }
    }
    if (found) {
      s_.needs_repair[tile] = 1;
    }
  }

  ForwardStorage<kConfig>& s_;
  int thread_;
};

// Adds to the finished tile of O the non-finite values of V that the guards took out. One warp;
// rare and slow. Lanes share the columns.
template <ForwardConfig kConfig, DType kDType, class Walk, class Variant, KeySource kSource>
PANTILE_DEVICE void repair(ForwardStorage<kConfig>& s, const ForwardParams& p,
                           [[maybe_unused]] const attn::VariantParams& variant_params,
                           const TileInfo& info, int place, const Walk& walk) {
  const auto mask = mask_of<kSource>(p, info);
  const int row_end = core::min_of(info.row0 + kConfig.tile_q(), info.rows);
  const std::uint16_t* const v = kSource.pages ? nullptr : value_row<kSource>(p, info, 0);
#pragma unroll 1
  for (int step = info.visit_begin; step < info.visit_end; ++step) {
    if (step >= info.full_begin && step < info.full_end) {
      continue;
    }
    const int key_tile = walk.tile(step);
    const int key_end = core::min_of((key_tile + 1) * kConfig.tile_k, info.keys);
#pragma unroll 1
    for (int key = key_tile * kConfig.tile_k; key < key_end; ++key) {
      const std::uint16_t* const paged = kSource.pages ? value_row<kSource>(p, info, key) : nullptr;
#pragma unroll 1
      for (int column = prim::lane_index(); column < p.head_dim_v; column += 32) {
        const std::uint16_t bits =
            kSource.pages ? paged[column] : v[key * p.v_strides.seq + column];
        if (!prim::is_nonfinite<kDType>(bits)) {
          continue;
        }
        const core::Span seen_by = core::visible_rows(mask, key);
        const int first = core::max_of(seen_by.begin, info.row0);
        const int last = core::min_of(seen_by.end, row_end);
#pragma unroll 1
        for (int row = first; row < last; ++row) {
          if (!walk.shows(info, row, key)) {
            continue;
          }
          if constexpr (Variant::kMasks) {
            if (!Variant::visible(variant_params, info.batch, info.head, row, key)) {
              continue;
            }
          }
          const int local = row - info.row0;
          auto* o = reinterpret_cast<std::uint16_t*>(
              s.o_tile(place, local / kRowsPerWarpgroup) +
              kConfig.o_tile().offset(local % kRowsPerWarpgroup, column));
          *o = prim::add_16bit<kDType>(*o, bits);
        }
      }
    }
  }
  prim::fence_async_proxy();
  __syncwarp();
}

// The same for an O of fp32, after repair(): what is not finite in shared memory now.
template <ForwardConfig kConfig, DType kDType>
PANTILE_DEVICE void repair_float32(ForwardStorage<kConfig>& s, const ForwardParams& p,
                                   const TileInfo& info, int place) {
  const int rows = core::min_of(kConfig.tile_q(), info.rows - info.row0);
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    float* const to = float_row(p, info, info.row0 + row);
    const unsigned char* const from = s.o_tile(place, row / kRowsPerWarpgroup);
#pragma unroll 1
    for (int column = prim::lane_index(); column < p.head_dim_v; column += 32) {
      const auto bits = *reinterpret_cast<const std::uint16_t*>(
          from + kConfig.o_tile().offset(row % kRowsPerWarpgroup, column));
      if (prim::is_nonfinite<kDType>(bits)) {
        to[column] = prim::unpack<kDType>(bits).x;
      }
    }
  }
}

}  // namespace pantile::hopper
