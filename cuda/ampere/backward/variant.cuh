// The block of a backward with a variant (attn/variant_grad.cuh). It differs from that of plain
// attention in how weights come about, and in the scale of dV.
//
//   S^T = K Q^T    P^T = exp2(logit(S^T) - LSE), all at once: softcap packs P here, because what it
//                  keeps in fp32 is P times the slope of its function
//   dP^T = V dO^T  starts from -d, the row term 1: with dropout delta over keep_scale
//   dS^T = P^T * (kept ? dP^T : -d)                 P^T loses its dropped elements
//
// With dropout dV, dK and dQ are multiplied by keep_scale in the end: dK and dQ by way of
// BackwardParams::scale.
#pragma once

#include <cstdint>

#include "ampere/backward/block.cuh"
#include "attn/variant_grad.cuh"

namespace pantile::ampere {

template <class Config, DType kDType, MaskKind kMask, attn::GradHooks kHooks>
class VariantBackwardBlock : public BackwardBlock<Config, kDType, kMask> {
  using Block = BackwardBlock<Config, kDType, kMask>;
  using Storage = BackwardStorage<Config>;
  using Keys = BackwardKeys<Config, kMask>;
  using Scores = typename Block::Scores;
  static constexpr int kKeyTiles = Config::kWarpKeys / 16;
  static constexpr int kRowTiles = Config::kWarpRows / 8;
  static_assert(kHooks.any() && !kHooks.grad_bias);
  static_assert(!kHooks.grad_alibi || !kHooks.softcap,
                "dS without the slope of softcap is not kept");
  static_assert(!kHooks.dropout || Config::kWarpRows % 32 == 0);

 public:
  using Weights = typename Block::Weights;

  PANTILE_DEVICE VariantBackwardBlock(const BackwardParams& params,
                                      const attn::VariantParams& variant_params, Storage& storage)
      : Block(params, storage), variant_params_(variant_params) {
    if (threadIdx.x == 0) {  // read behind the barrier of the first step
      const KeyBlock block = Keys::locate(params, static_cast<int>(blockIdx.x));
      const common::TileNumbers tiles{Config::kTileK, 0,
                                      core::ceil_div(params.keys.max_length, Config::kTileK),
                                      params.keys.cu_seqlens};
      storage.whole =
          WholeSequences{block.part.first_row, block.part.first_key, block.queries.length,
                         block.keys.length, tiles.first(block.queries.batch) + block.tile};
    }
  }

  PANTILE_DEVICE void weights(Weights& p, Weights& grad_s, RowStep step, int i, int first_row) {
    const auto& stage = this->stage_of(i);
    const auto& terms = this->terms_of(i);
    const int row = step.tile * Config::kTileQ + first_row;  // of the attended ones
    begin_step(step.head, row);
    Scores s;
    this->template multiply<typename Block::KRows>(s, this->storage_.k, stage.q, first_row, nullptr,
                                                   [](int) {});
    const bool masked = cuts(step);
    if constexpr (kHooks.softcap) {
      Scores full;
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        capped_weights(full[m], s[m], m, row, terms[0] + first_row);
      }
      if (masked) {
        this->hide(full, s, row);
      }
      pack(p, full);
    } else {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        scaled_weights(s[m], m, row, terms[0] + first_row);
      }
    }
    Scores dp;
    this->template multiply<typename Block::VRows>(dp, this->storage_.v, stage.grad_o, first_row,
                                                   terms[1] + first_row, [](int) {});
    if (masked) {
      this->hide(s, dp, row);
    }
    if constexpr (!kHooks.softcap) {
      pack(p, s);
    }
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      score_gradients(dp[m], s[m], m, row, terms[1] + first_row);
    }
    if constexpr (kHooks.grad_alibi) {
      const bool first_pass = Config::kSharesWeights || first_row == 0;
      add_slope_sums(step.head, first_pass && step.tile == this->work().rows.visit.begin);
    }
    pack(grad_s, dp);
    if constexpr (kHooks.dropout) {
      drop(p);
    }
  }

  PANTILE_DEVICE void store() { Block::store(kHooks.dropout ? variant_params_.keep_scale : 1.0f); }

 private:
  using Fragment = float[kRowTiles][4];
  using Values = float[4 * kRowTiles];  // the same, as the hooks know it

  PANTILE_DEVICE static Values& values(Fragment& x) { return reinterpret_cast<Values&>(x); }

  // Whether the mask, or the end of the keys, hides scores of a step.
  PANTILE_DEVICE bool cuts(RowStep step) const {
    const BackwardWork& work = this->work();
    return work.key0 + Config::kTileK > work.mask.keys || step.tile < work.rows.full.begin ||
           step.tile >= work.rows.full.end;
  }

  // Of key tile m of this warp and rows `row` on of the attended ones.
  PANTILE_DEVICE attn::TransposedPlace place(int m, int row) const {
    const BackwardPlace<Config> thread;
    const WholeSequences& whole = this->storage_.whole;
    const int key =
        this->work().key0 + thread.key_warp * Config::kWarpKeys + m * 16 + thread.lane / 4;
    row += thread.lane % 4 * 2;
    return attn::TransposedPlace{row + whole.first_row, key + whole.first_key, whole.rows,
                                 whole.keys, key - row - this->work().mask.shift()};
  }

  // Nothing that a head needs stays in registers over a step.
  PANTILE_DEVICE void begin_step(int head, int row) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      variant_[m].begin_head(variant_params_, this->work().queries.batch, head);
      if constexpr (kHooks.dropout) {
        const WholeSequences& whole = this->storage_.whole;
        const std::uint32_t first =
            (variant_params_.row_offset + static_cast<std::uint32_t>(whole.first_row)) |
            (variant_params_.key_offset + static_cast<std::uint32_t>(whole.first_key));
        variant_[m].fetch(variant_params_, place(m, row), first % 16 == 0);
      }
    }
  }

  // From raw scores to P in `full`, and in `s` P times the slope of softcap.
  PANTILE_DEVICE void capped_weights(Fragment& full, Fragment& s, int m, int row,
                                     const float* minus_lse) {
    variant_[m].cap(variant_params_, values(s));
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 minus = row_terms(minus_lse, j);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        full[j][c] = fmaf(s[j][c], variant_params_.cap_log2, c % 2 == 0 ? minus.x : minus.y);
      }
    }
    variant_[m].add_terms(variant_params_, place(m, row), values(full));
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        full[j][c] = prim::exp2_approx(full[j][c]);
        s[j][c] = full[j][c] * fmaf(-s[j][c], s[j][c], 1.0f);
      }
    }
  }

  // From raw scores to P, in place.
  PANTILE_DEVICE void scaled_weights(Fragment& s, int m, int row, const float* minus_lse) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 minus = row_terms(minus_lse, j);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[j][c] = fmaf(s[j][c], this->params_.scale_log2, c % 2 == 0 ? minus.x : minus.y);
      }
    }
    variant_[m].add_terms(variant_params_, place(m, row), values(s));
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[j][c] = prim::exp2_approx(s[j][c]);
      }
    }
  }

  // dP to dS, in place.
  PANTILE_DEVICE void score_gradients(Fragment& dp, const Fragment& s, int m, int row,
                                      const float* minus_delta) {
    if constexpr (kHooks.grad_alibi) {
      variant_[m].begin_notes(place(m, row));
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 minus = kHooks.dropout ? row_terms(minus_delta, j) : float2{};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float kept = dp[j][c];
        if constexpr (kHooks.dropout) {
          kept = variant_[m].select(4 * j + c, kept, c % 2 == 0 ? minus.x : minus.y);
        }
        dp[j][c] = s[j][c] * kept;
        if constexpr (kHooks.grad_alibi) {
          variant_[m].note(variant_params_, 4 * j + c, dp[j][c]);
        }
      }
    }
  }

  // The sums of dS times the distance over a step, to those of the warp, tile of keys and head.
  PANTILE_DEVICE void add_slope_sums(int head, bool is_first) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      sum += variant_[m].slope_sum();
    }
    const BackwardPlace<Config> thread;
    if (thread.lane == 0) {
      float* const part = variant_params_.grad_alibi_parts +
                          (head * variant_params_.key_tile_count + this->storage_.whole.key_tile) *
                              (Config::kThreads / 32) +
                          thread.warp;
      *part = is_first ? sum : *part + sum;
    }
  }

  PANTILE_DEVICE static void pack(Weights& to, const Scores& x) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        to[j / 2][m][j % 2 * 2] = prim::pack<kDType>(x[m][j][0], x[m][j][1]);
        to[j / 2][m][j % 2 * 2 + 1] = prim::pack<kDType>(x[m][j][2], x[m][j][3]);
      }
    }
  }

  PANTILE_DEVICE void drop(Weights& p) const {
#pragma unroll
    for (int group = 0; group < kRowTiles / 2; ++group) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        variant_[m].drop(p[group][m], group);
      }
    }
  }

  // Of the lane's two rows of column tile j.
  PANTILE_DEVICE static float2 row_terms(const float* terms, int j) {
    return *reinterpret_cast<const float2*>(terms + 8 * j + prim::fresh_thread_index() % 4 * 2);
  }

  const attn::VariantParams& variant_params_;
  attn::GradVariant<kHooks, Config::kWarpRows> variant_[kKeyTiles];
};

}  // namespace pantile::ampere
