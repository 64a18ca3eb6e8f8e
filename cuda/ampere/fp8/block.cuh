// What one thread block of the ampere FP8 forward does, step by step: fetching, the two products,
// the softmax between them. kernel.cuh puts the steps in order, output.cuh stores what comes out.
#pragma once

#include <cstdint>

#include "ampere/fp8/params.cuh"
#include "attn/fp8_mask.cuh"
#include "attn/fp8_softmax.cuh"
#include "core/blocked.h"
#include "core/geometry.h"
#include "prim/cp_async.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_e4m3.cuh"
#include "prim/special_registers.cuh"
#include "prim/warp.cuh"

namespace pantile::ampere {

PANTILE_DEVICE std::int64_t first_block_of(const core::SequenceSide& side, const SequenceRows& rows,
                                           int head, int blocks) {
  const std::int64_t first =
      side.cu_seqlens != nullptr
          ? core::first_packed_block(rows.first, rows.batch, core::kBlockedRows)
          : core::first_block(side, rows.batch);
  return std::int64_t{head} * blocks + first;
}

PANTILE_DEVICE Fp8Work locate_fp8(const Fp8ForwardParams& p, int tile_q) {
  const core::WorkTile place = p.order.tile(static_cast<int>(blockIdx.x));
  const SequenceRows rows = sequence_rows(p.queries, place.batch);
  const SequenceRows keys = sequence_rows(p.keys, place.batch);
  const int key_head = p.group.divide(place.head);
  return Fp8Work{place.head,
                 place.tile * tile_q,
                 rows,
                 core::Mask{rows.length, keys.length, p.window_left, p.window_right},
                 first_block_of(p.queries, rows, place.head, p.q_blocks),
                 first_block_of(p.keys, keys, key_head, p.k_blocks)};
}

template <class Config>
class Fp8Block {
 public:
  using Storage = Fp8Storage<Config>;
  static constexpr int kTileK = Config::kTileK;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kColumns = Config::kHeadDim / 16;  // of O, 16 at a time
  using Softmax = attn::Fp8Softmax<Config::kExp, kTileK / 8>;

  float o[kRowTiles][2 * kColumns][4];  // in units of `unit`
  float l[kRowTiles][2];                // row sums
  float unit = core::kSmallestScale;    // the scale of V of the last step
  bool nonfinite = false;               // some V that the warp met is not
  Softmax softmax[kRowTiles];
  core::TilePlan tiles{{0, 0}, {0, 0}};  // of the warp

  PANTILE_DEVICE Fp8Block(const Fp8ForwardParams& params, Storage& storage, const Fp8Work& work)
      : p_(params), s_(storage) {
    if (threadIdx.x == 0) {
      storage.work = work;  // read behind the first barrier
    }
    const int warp_row = prim::uniform(work.row0 + this->warp() * Config::kWarpRows);
    const int end = work.sequence.length;
    if (work.row0 < end) {
      const core::Span rows{work.row0, core::min_of(work.row0 + Config::kTileQ, end)};
      block_tiles_ = core::plan_row_tile(work.mask, rows, kTileK).visit;
    }
    if (warp_row < end) {
      const core::Span rows{warp_row, core::min_of(warp_row + Config::kWarpRows, end)};
      tiles = core::plan_row_tile(work.mask, rows, kTileK);
    }
    const int last = core::max_of(block_tiles_.end - 1, 0);
    next_k_ = KCopy::source(code_rows(p_.k, work.k_block * core::kBlockedRows, p_.row_bytes),
                            last * kTileK);
    next_v_ = VCopy::source(
        code_rows(p_.v, (work.k_block + last / 2) * p_.head_dim, core::kBlockedRows), 0);
    clear();
    take_q_scales(work, warp_row + prim::lane_index() / 4);
  }

  // Key tiles that some row of the block sees.
  PANTILE_DEVICE const core::Span& block_tiles() const { return block_tiles_; }

  // Worked out where they are needed: see special_registers.cuh.
  PANTILE_DEVICE static int warp() { return prim::fresh_thread_index() / 32; }
  PANTILE_DEVICE static int lane() { return prim::fresh_thread_index() % 32; }

  // ---- fetching, by all threads

  PANTILE_DEVICE void fetch_queries(const Fp8Work& work) {
    const QCopy copy(p_.row_bytes / 2);
    copy.clear_missing_columns(s_.q);
    for (typename Storage::Stage& stage : s_.stages) {
      KCopy(p_.row_bytes / 2).clear_missing_columns(stage.k);
    }
    const tile::HeadRows q = code_rows(p_.q, work.q_block * core::kBlockedRows, p_.row_bytes);
    copy.copy_if(true, prim::shared_address(s_.q), QCopy::source(q, work.row0), p_.q_pass_bytes);
  }

  // Tiles are fetched one after the other, from the last one down; nothing below the first.
  PANTILE_DEVICE void fetch(int n) {
    const bool wanted = n >= block_tiles_.begin;
    typename Storage::Stage& stage = s_.stages[n & 1];
    // Blocks of scales are whole: no tile is ragged.
    KCopy(p_.row_bytes / 2)
        .copy_if(wanted, prim::shared_address(stage.k), next_k_, p_.k_pass_bytes);
    next_k_ -= p_.k_tile_bytes;
    // V: for each channel of a block its 128 keys, of which a tile has a half. Zeros for channels
    // that the tensor lacks.
    VCopy(kTileK / 2)
        .copy_ragged_if(wanted, prim::shared_address(stage.v), next_v_ + (n & 1) * kTileK,
                        VCopy::kPassRows * core::kBlockedRows, p_.head_dim);
    next_v_ -= (n & 1) != 0 ? 0 : p_.v_block_bytes;
  }

  // Of the block of scales that tile n lies in: of K, of V.
  PANTILE_DEVICE float2 scales(int n, std::int64_t k_block) const {
    return __ldg(p_.kv_scale + k_block + core::max_of(n, 0) / 2);
  }

  // ---- one key tile

  PANTILE_DEVICE void step(int n, const float2& scale) {
    if (n < tiles.visit.begin || n >= tiles.visit.end) {
      return;  // the warp's rows see nothing of it
    }
    typename Softmax::Scores S[kRowTiles];
    score_product(S, n & 1);
    typename Softmax::Weights P[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const std::uint32_t factor = score_factor(S[m], m, scale.x);
      if (n < tiles.full.begin || n >= tiles.full.end) {
        mask_scores(S[m], m, n);
      }
      softmax[m].template exponentiate<false>(S[m], factor);
      Softmax::pack(P[m], S[m]);
    }
    // O is carried in units of this step's V.
    const float v = core::value_unit(fabsf(scale.y), unit);
    const float ratio = fminf(__fdividef(unit, v), kLargestRatio);
    unit = v;
    nonfinite = nonfinite || __float_as_int(scale.y) < 0;  // of -0 too
    value_product(P, n & 1, ratio);
    add_row_sums(P);
  }

 private:
  using Layouts = Fp8Layouts<Config>;
  using KRows = typename Layouts::KRows;
  using VRows = typename Layouts::VRows;
  using QCopy = typename Layouts::QCopy;
  using KCopy = typename Layouts::KCopy;
  using VCopy = typename Layouts::VCopy;
  static constexpr int kDepthSteps = Config::kHeadDim / 32;  // of Q K^T
  static constexpr int kKeyGroups = kTileK / 16;
  static constexpr float kLargestRatio = 7.9228163e28f;  // 2^96: products with it stay finite

  PANTILE_DEVICE static tile::HeadRows code_rows(const std::uint8_t* codes, std::int64_t first_row,
                                                 int row_bytes) {
    const std::uint8_t* const rows = codes + first_row * row_bytes;
    return tile::HeadRows{reinterpret_cast<std::uint16_t*>(const_cast<std::uint8_t*>(rows)),
                          row_bytes / 2};
  }

  PANTILE_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].begin_tile();
      l[m][0] = l[m][1] = 0.0f;
#pragma unroll
      for (int j = 0; j < 2 * kColumns; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o[m][j][c] = 0.0f;
        }
      }
    }
  }

  PANTILE_DEVICE void take_q_scales(const Fp8Work& work, int first_row) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 16 * m + 8 * i;
        // Rows past the end have no scale, and whatever lies there must not sway the warp's votes.
        const float scale =
            row < work.sequence.length
                ? p_.q_scale[(work.q_block * core::kBlockedRows + row) >> p_.q_scale_shift]
                : 0.0f;
        q_scale_[m][i] = scale * (p_.scale_log2 * Softmax::kSlope);
      }
    }
  }

  // S = Q K^T in fp16, depth outermost.
  PANTILE_DEVICE void score_product(typename Softmax::Scores (&S)[kRowTiles], int stage) const {
    const std::uint32_t q_lane = prim::shared_address(s_.q) +
                                 warp() * Config::kWarpRows * KRows::kRowBytes +
                                 KRows::lane_offset_rows_first(lane());
    const std::uint32_t k_lane =
        prim::shared_address(s_.stages[stage].k) + KRows::lane_offset_columns_first(lane());
#pragma unroll
    for (int k = 0; k < kDepthSteps; ++k) {
      std::uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        prim::load_matrix_x4(a[m], KRows::step(q_lane, m, k));
      }
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
        std::uint32_t b[4];
        prim::load_matrix_x4(b, KRows::step(k_lane, group, k));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            std::uint32_t& upper = S[m][4 * group + 2 * half];
            std::uint32_t& lower = S[m][4 * group + 2 * half + 1];
            prim::mma_e4m3_f16(upper, lower, a[m], b[2 * half], b[2 * half + 1],
                               k == 0 ? 0u : upper, k == 0 ? 0u : lower);
          }
        }
      }
    }
  }

  // What scores are multiplied with. Rare: some could be out of range.
  PANTILE_DEVICE std::uint32_t score_factor(typename Softmax::Scores& S, int m, float k) const {
    const float most = fmaxf(q_scale_[m][0], q_scale_[m][1]) * p_.score_bound;
    if (prim::any(most * k > Softmax::kLimit * Softmax::kSlope)) [[unlikely]] {
      return Softmax::clamp(S, q_scale_[m], k);
    }
    return Softmax::scale(q_scale_[m], k);
  }

  PANTILE_DEVICE void mask_scores(typename Softmax::Scores& S, int m, int n) const {
    const core::Mask& mask = s_.work.mask;
    const int column0 = n * kTileK + lane() % 4 * 2;
    const int row0 = s_.work.row0 + warp() * Config::kWarpRows + 16 * m + lane() / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = row0 + 8 * i + mask.shift() - column0;
      attn::mask_row<true>(S, i, position - mask.left,
                           core::min_of(mask.keys - column0, position + mask.right + 1));
    }
  }

  // Those of the quantised P, as a product with ones: numerator and denominator agree.
  PANTILE_DEVICE void add_row_sums(const typename Softmax::Weights (&P)[kRowTiles]) {
    constexpr std::uint32_t kOnes = 0x38383838u;  // four times 1.0
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float sum[4];
      prim::mma_e4m3_set(sum, P[m][0], kOnes, kOnes);
      prim::mma_e4m3_add(sum, P[m][1], kOnes, kOnes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        l[m][i] = fmaf(l[m][i], softmax[m].alpha[i], sum[2 * i]);
      }
    }
  }

  // O = O alpha ratio + P V. A step's product starts from zero and is added in fp32: the adders of
  // FP8 products lose bits of a sum that grows (docs/design/fp8.md).
  PANTILE_DEVICE void value_product(const typename Softmax::Weights (&P)[kRowTiles], int stage,
                                    float ratio) {
    const std::uint32_t v_lane =
        prim::shared_address(s_.stages[stage].v) + VRows::lane_offset_columns_first(lane());
    float factor[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      factor[m][0] = softmax[m].alpha[0] * ratio;
      factor[m][1] = softmax[m].alpha[1] * ratio;
    }
#pragma unroll
    for (int column16 = 0; column16 < kColumns; ++column16) {
      std::uint32_t b[2][4];
      prim::load_matrix_x4(b[0], VRows::step(v_lane, column16, 0));
      prim::load_matrix_x4(b[1], VRows::step(v_lane, column16, 1));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float part[4];
          prim::mma_e4m3_set(part, P[m][0], b[0][2 * half], b[0][2 * half + 1]);
          prim::mma_e4m3_add(part, P[m][1], b[1][2 * half], b[1][2 * half + 1]);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& x = o[m][2 * column16 + half][c];
            x = fmaf(x, factor[m][c / 2], part[c]);
          }
        }
      }
    }
  }

  const Fp8ForwardParams& p_;
  Storage& s_;
  core::Span block_tiles_{0, 0};
  const char *next_k_, *next_v_;  // what this thread copies next
  float q_scale_[kRowTiles][2];   // times all that scores are multiplied with, but for K's scale
};

}  // namespace pantile::ampere
