// The end of a block of the ampere FP8 forward: O by way of shared memory, LSE from registers. Each
// warp has its own rows and waits for no other.
#pragma once

#include <math.h>

#include <cstdint>

#include "ampere/fp8/block.cuh"
#include "attn/fp8_nonfinite.cuh"
#include "core/softmax_state.h"
#include "prim/convert.cuh"
#include "prim/math.cuh"

namespace pantile::ampere {

template <class Config>
class Fp8Output {
  using Block = Fp8Block<Config>;
  using ORows = typename Fp8Layouts<Config>::ORows;
  static constexpr int kRowTiles = Config::kRowTiles;

 public:
  PANTILE_DEVICE Fp8Output(const Fp8ForwardParams& params, Fp8Storage<Config>& storage,
                           const Block& block)
      : p_(params),
        w_(storage.work),
        block_(block),
        lane_(Block::lane()),
        warp_row_(storage.work.row0 + Block::warp() * Config::kWarpRows),
        place_(reinterpret_cast<char*>(storage.stages) +
               Block::warp() * Config::kWarpRows * ORows::kRowBytes) {}

  // Every warp is past its last product. Rows past the sequence's length, as far as the tensor has
  // them, are those of an empty row.
  PANTILE_DEVICE void store() {
    write_lse();
    if (p_.o_is_f16) {
      stage<DType::f16>();
    } else {
      stage<DType::bf16>();
    }
    __syncwarp();
    if (block_.nonfinite) {
      restore_nonfinite();
    }
    store_rows();
  }

 private:
  PANTILE_DEVICE void write_lse() const {
    if (p_.lse == nullptr || lane_ % 4 != 0) {
      return;
    }
    const std::int64_t heads_before =
        p_.lse_packed ? w_.head : std::int64_t{w_.sequence.batch} * p_.heads_q + w_.head;
    float* const lse = p_.lse + heads_before * p_.lse_head_stride + w_.sequence.first;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp_row_ + 16 * m + 8 * i + lane_ / 4;
        if (row < w_.sequence.allocated) {
          lse[row] = row < w_.sequence.length ? log_sum_exp(m, i, row) : -INFINITY;
        }
      }
    }
  }

  PANTILE_DEVICE float log_sum_exp(int m, int i, int row) const {
    const float sum = block_.l[m][i];
    if (sum == 0.0f) {  // a row that sees no key must not read what its Q makes of a mean
      return -INFINITY;
    }
    float lse = (prim::log2_approx(sum) - block_.softmax[m].offset(i)) * core::kLn2;
    if (p_.q_dot_mean != nullptr) {
      lse += p_.scale * p_.q_dot_mean[w_.q_block * core::kBlockedRows + row];
    }
    return lse;
  }

  template <DType kDType>
  PANTILE_DEVICE void stage() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = block_.l[m][i];
        const float factor = sum == 0.0f ? 0.0f : __fdividef(block_.unit, sum);
        const int row = 16 * m + 8 * i + lane_ / 4;
#pragma unroll
        for (int j = 0; j < Config::kHeadDim / 8; ++j) {
          *reinterpret_cast<std::uint32_t*>(place_ + ORows::offset(row, j) + lane_ % 4 * 4) =
              prim::pack<kDType>(block_.o[m][j][2 * i] * factor,
                                 block_.o[m][j][2 * i + 1] * factor);
        }
      }
    }
  }

  // Rows that attend to a key whose V was not finite become NaN, and no other row is touched. Rare
  // and slow.
  PANTILE_DEVICE void restore_nonfinite() {
    const core::Span& visit = block_.tiles.visit;
#pragma unroll 1
    for (int n = visit.begin / 2; n < core::ceil_div(visit.end, 2); ++n) {
      const std::int64_t block = w_.k_block + n;
      if (__float_as_int(p_.kv_scale[block].y) >= 0) {  // the sign bit, of -0 too
        continue;
      }
#pragma unroll 1
      for (int column = lane_; column < p_.head_dim; column += 32) {
        const uint4 keys = p_.v_nonfinite[block * p_.head_dim + column];
        if ((keys.x | keys.y | keys.z | keys.w) != 0) {
          mark_rows(keys, n * core::kBlockedRows, column);
        }
      }
    }
    __syncwarp();
  }

  PANTILE_DEVICE void mark_rows(const uint4& keys, int first_key, int column) {
    constexpr std::uint16_t kNaN = 0x7fff;  // in bf16 and in fp16
#pragma unroll 1
    for (int row = 0; row < Config::kWarpRows; ++row) {
      const core::Span seen = core::visible_keys(w_.mask, warp_row_ + row);
      if (attn::attends(seen, keys, first_key)) {
        *reinterpret_cast<std::uint16_t*>(place_ + ORows::offset(row, column / 8) +
                                          column % 8 * 2) = kNaN;
      }
    }
  }

  PANTILE_DEVICE void store_rows() const {
    const tile::HeadRows o = head_rows(p_.o, w_.sequence, w_.head);
#pragma unroll 4
    for (int i = lane_; i < Config::kWarpRows * ORows::kChunks; i += 32) {
      const int row = i / ORows::kChunks;
      const int chunk = i % ORows::kChunks;
      const int at = warp_row_ + row;
      if (at < w_.sequence.allocated && chunk * 8 < p_.head_dim) {
        uint4 value = *reinterpret_cast<const uint4*>(place_ + ORows::offset(row, chunk));
        if (at >= w_.sequence.length) {
          value = uint4{0, 0, 0, 0};
        }
        *reinterpret_cast<uint4*>(o.rows + at * o.stride + chunk * 8) = value;
      }
    }
  }

  const Fp8ForwardParams& p_;
  const Fp8Work& w_;
  const Block& block_;
  int lane_, warp_row_;
  char* place_;  // of the warp's rows of O
};

}  // namespace pantile::ampere
