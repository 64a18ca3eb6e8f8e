// The block of a backward with a variant (attn/variant_grad.cuh). It differs from that of plain
// attention in how weights come about, and in the scale of dV.
//
//   S^T = K Q^T    P^T = exp2(logit(S^T) - LSE), all at once. Behind a softcap, or a score that is
//                  not s plus something, P is packed here, because what is kept in fp32 is P times
//                  the slope; with gradients of the variant's tensors P and S^T are kept
//   dP^T = V dO^T  starts from -d, the row term 1: with dropout delta over keep_scale
//   dS^T = P^T * (kept ? dP^T : -d)                 P^T loses its dropped elements
//
// With dropout dV, dK and dQ are multiplied by keep_scale in the end: dK and dQ by way of
// BackwardParams::scale.
#pragma once

#include <cstdint>

#include "ampere/backward/block.cuh"
#include "ampere/bias.cuh"
#include "attn/variant_grad.cuh"

namespace pantile::ampere {

template <class Config, DType kDType, MaskKind kMask, attn::GradHooks kHooks>
class VariantBackwardBlock : public BackwardBlock<Config, kDType, kMask> {
  using Block = BackwardBlock<Config, kDType, kMask>;
  using Keys = BackwardKeys<Config, kMask>;
  using Scores = typename Block::Scores;
  static constexpr int kKeyTiles = Config::kWarpKeys / 16;
  static constexpr int kRowTiles = Config::kWarpRows / 8;
  static_assert(kHooks.any() && !kHooks.lists);
  static_assert(!kHooks.softcap || !kHooks.score);
  // The gradients of the variant's tensors come from dS before the slope.
  static constexpr bool kKeepsScores = kHooks.raw() && kHooks.grads();
  static constexpr bool kMasksPairs = kHooks.mask || kHooks.stored_forms != 0;
  static_assert(!kHooks.dropout || Config::kWarpRows % 32 == 0);

 public:
  using Weights = typename Block::Weights;
  using Storage = BiasedBackwardStorage<Config, kHooks.bias_tile>;

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
    if constexpr (kHooks.bias_tile) {
      __syncthreads();  // the first piece of the bias is fetched before
    }
  }

  PANTILE_DEVICE void fetch_keys() {
    Block::fetch_keys();
    fetch_bias(this->first_step());
  }

  PANTILE_DEVICE void weights(Weights& p, Weights& grad_s, RowStep step, int i, int first_row) {
    const auto& stage = this->stage_of(i);
    const auto& terms = this->terms_of(i);
    const int row = step.tile * Config::kTileQ + first_row;  // of the attended ones
    if constexpr (kMasksPairs) {
      if (i == 0 && (Config::kSharesWeights || first_row == 0)) {
        clean_keys();
      }
    }
    begin_step(step.head, row);
    Scores s;
    this->template multiply<typename Block::KRows>(s, this->storage_.k, stage.q, first_row, nullptr,
                                                   [](int) {});
    const bool masked = cuts(step);
    [[maybe_unused]] Scores full;  // raw() only
    if constexpr (kHooks.raw()) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        raw_weights(full[m], s[m], m, row, terms[0] + first_row);
        variant_[m].hide_pairs(variant_params_, place(m, row), values(full[m]));
        variant_[m].hide_pairs(variant_params_, place(m, row), values(s[m]));
      }
      if (masked) {
        this->hide(full, s, row);
      }
      pack(p, full);
    } else {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        scaled_weights(s[m], m, row, terms[0] + first_row);
        variant_[m].hide_pairs(variant_params_, place(m, row), values(s[m]));
      }
    }
    if constexpr (kHooks.bias_tile) {
      __syncwarp();  // all lanes have read this step's
      if (i + 1 < this->steps()) {
        fetch_bias(this->next(step));
      }
      prim::commit_copies();
    }
    Scores dp;
    this->template multiply<typename Block::VRows>(dp, this->storage_.v, stage.grad_o, first_row,
                                                   terms[1] + first_row, [](int) {});
    if (masked) {
      this->hide(s, dp, row);
    }
    if constexpr (!kHooks.raw()) {
      pack(p, s);
    }
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      variant_[m].hide_pairs(variant_params_, place(m, row), values(dp[m]));
      if constexpr (kKeepsScores) {
        score_gradients(dp[m], full[m], s[m], m, row, terms[1] + first_row);
        multiply_by_slopes(dp[m], s[m], m, row);
      } else {
        score_gradients(dp[m], s[m], s[m], m, row, terms[1] + first_row);
      }
      variant_[m].finish_head(variant_params_);
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

  // Of the warp. It lands with the rows of the step.
  PANTILE_DEVICE unsigned char* bias_piece() const {
    return static_cast<Storage&>(this->storage_).bias[BackwardPlace<Config>().warp];
  }

  PANTILE_DEVICE void fetch_bias(RowStep step) {
    if constexpr (kHooks.bias_tile) {
      using Piece = core::BiasPiece<Config::kWarpRows, Config::kWarpKeys>;
      const BackwardPlace<Config> thread;
      const WholeSequences& whole = this->storage_.whole;
      const BiasPlace at{
          this->work().queries.batch,
          step.head,
          whole.first_row + step.tile * Config::kTileQ + thread.column_warp * Config::kWarpRows,
          whole.first_key + this->work().key0 + thread.key_warp * Config::kWarpKeys,
          whole.rows,
          whole.keys};
      if (whole.first_key % 8 == 0) {
        copy_bias<Piece>(variant_params_, at, prim::shared_address(bias_piece()));
      } else {
        copy_bias_elements<Piece>(variant_params_, at, bias_piece());
      }
    }
  }

  // To base-2 logits of key tile m.
  PANTILE_DEVICE void add_copied_bias(Values& logits, int m) const {
    if constexpr (kHooks.bias_tile) {
      using Piece = core::BiasPiece<Config::kWarpRows, Config::kWarpKeys>;
      add_transposed_bias<kHooks.bias_dtype, Piece>(logits, prim::shared_address(bias_piece()), m);
    }
  }

  // Zeros in place of what is not finite in K and V: the product of it and the zero of a hidden
  // pair would be NaN. Rows that see such a key have NaN in their LSE or delta.
  PANTILE_DEVICE void clean_keys() {
    Config::KCopy::template clear_nonfinite<kDType>(this->storage_.k);
    Config::VCopy::template clear_nonfinite<kDType>(this->storage_.v);
    __syncthreads();
  }

  // Nothing that a head needs stays in registers over a step.
  PANTILE_DEVICE void begin_step(int head, int row) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      variant_[m].begin_head(variant_params_, this->work().queries.batch, head);
      variant_[m].ask(variant_params_, place(m, row));
      if constexpr (kHooks.dropout) {
        const WholeSequences& whole = this->storage_.whole;
        const std::uint32_t first =
            (variant_params_.row_offset + static_cast<std::uint32_t>(whole.first_row)) |
            (variant_params_.key_offset + static_cast<std::uint32_t>(whole.first_key));
        variant_[m].fetch(variant_params_, place(m, row), first % 16 == 0);
      }
    }
  }

  // From raw scores to P in `full`, and in `s` P times the slope; with kKeepsScores what slopes()
  // needs.
  PANTILE_DEVICE void raw_weights(Fragment& full, Fragment& s, int m, int row,
                                  const float* minus_lse) {
    [[maybe_unused]] Fragment slope;  // of a score
    if constexpr (kHooks.softcap) {
      variant_[m].cap(variant_params_, values(s));
    } else {
      copy(slope, s);
      variant_[m].weigh(variant_params_, place(m, row), values(slope), values(full));
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 minus = row_terms(minus_lse, j);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value = kHooks.softcap ? s[j][c] : full[j][c];
        full[j][c] = fmaf(value, variant_params_.cap_log2, c % 2 == 0 ? minus.x : minus.y);
      }
    }
    variant_[m].add_terms(variant_params_, place(m, row), values(full));
    add_copied_bias(values(full), m);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        full[j][c] = prim::exp2_approx(full[j][c]);
        if constexpr (!kKeepsScores && kHooks.softcap) {
          s[j][c] = full[j][c] * fmaf(-s[j][c], s[j][c], 1.0f);
        } else if constexpr (!kKeepsScores) {
          s[j][c] = times_slope(full[j][c], slope[j][c]);
        }
      }
    }
  }

  // dS before the slope to dS: `s` has the function of a softcap, or the raw scores.
  PANTILE_DEVICE void multiply_by_slopes(Fragment& dp, const Fragment& s, int m, int row) {
    [[maybe_unused]] Fragment slope, unused;
    if constexpr (!kHooks.softcap) {
      copy(slope, s);
      variant_[m].weigh(variant_params_, place(m, row), values(slope), values(unused));
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (kHooks.softcap) {
          dp[j][c] *= fmaf(-s[j][c], s[j][c], 1.0f);
        } else {
          dp[j][c] = times_slope(dp[j][c], slope[j][c]);
        }
      }
    }
  }

  // Slopes may be infinite where a weight is 0.
  PANTILE_DEVICE static float times_slope(float x, float slope) {
    return kHooks.bounded_slopes || x != 0.0f ? x * slope : 0.0f;
  }

  PANTILE_DEVICE static void copy(Fragment& to, const Fragment& from) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        to[j][c] = from[j][c];
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
    add_copied_bias(values(s), m);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[j][c] = prim::exp2_approx(s[j][c]);
      }
    }
  }

  // dP to dS, in place. `p`: P, or P times the slope. With kKeepsScores P, so that dS lacks the
  // slope, and `s` is as raw_weights() left it.
  PANTILE_DEVICE void score_gradients(Fragment& dp, const Fragment& p, Fragment& s, int m, int row,
                                      const float* minus_delta) {
    if constexpr (kHooks.grads()) {
      variant_[m].begin_notes(variant_params_, place(m, row));
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
        dp[j][c] = p[j][c] * kept;
        if constexpr (kHooks.grads()) {
          variant_[m].note(variant_params_, 4 * j + c, dp[j][c]);
        }
        if constexpr (kHooks.grad_captured && kHooks.raw_score) {
          if (dp[j][c] != 0.0f) {  // hidden scores need not be finite
            variant_[m].note_raw(variant_params_, 4 * j + c, dp[j][c], values(s));
          }
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
