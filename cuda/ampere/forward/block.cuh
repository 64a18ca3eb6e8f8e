// What one thread block of the forward does, step by step: fetching and the two products.
// kernel.cuh puts the steps in order, output.cuh stores what comes out.
#pragma once

#include <cstdint>

#include "ampere/forward/keys.cuh"
#include "ampere/forward/output.cuh"
#include "ampere/forward/params.cuh"
#include "ampere/forward/softmax.cuh"
#include "ampere/forward/variant.cuh"
#include "ampere/spread.cuh"
#include "ampere/storage.cuh"
#include "pantile/registry.h"
#include "prim/cp_async.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_sync.cuh"
#include "prim/nonfinite.cuh"
#include "prim/special_registers.cuh"
#include "prim/unpack.cuh"
#include "tile/accumulators_sm80.cuh"
#include "tile/row_copy_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

template <class Config, DType kDType, MaskKind kMask, class Variant>
class ForwardBlock : VariantRows<Config, Variant> {
 public:
  using Storage = BiasedStorage<Config, Variant::kBiasBytes>;

 private:
  using QRows = tile::SwizzledRows<Config::kHeadDim>;
  using KRows = tile::SwizzledRows<Config::kHeadDim>;
  using VRows = tile::SwizzledRows<Config::kHeadDimV>;
  using QCopy = typename Config::QCopy;
  using KCopy = typename Config::KCopy;
  using VCopy = typename Config::VCopy;
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kTileK = Config::kTileK;
  static constexpr int kStages = Config::kStages;
  static constexpr int kRowTiles = Config::kRowTiles;

 public:
  static constexpr bool kPartlySeen = kMask != MaskKind::full;
  // Against spills of pipelined kernels: in tiles that a mask cuts, one product after the other,
  // and seen groups are counted in each step.
  static constexpr bool kCalmEdges =
      kSparesRegisters && kPartlySeen && Config::kSoftmax.row_sum == RowSum::vector;
  static constexpr bool kCountsAnew = kCalmEdges || Config::kSoftmax.row_sum != RowSum::vector;
  static constexpr int kDepthSteps = Config::kHeadDim / 16;   // of Q K^T
  static constexpr int kKeyGroups = kTileK / 16;              // of a key tile
  static constexpr int kValueSteps = Config::kHeadDimV / 16;  // 16 columns of O
  static constexpr bool kIsPlain = !Variant::kAny;
  using Softmax = SoftmaxRows<Config, kDType, Variant::kAdds>;
  using Scores = typename Softmax::Scores;
  using Weights = typename Softmax::Weights;
  using Keys = ForwardKeys<Config, kMask, Variant::kSource>;

  Keys keys;
  Softmax softmax;

  PANTILE_DEVICE static ForwardWork locate(const ForwardParams& params) {
    const core::WorkTile work = params.order.tile(static_cast<int>(blockIdx.x));
    return ForwardWork{work.head, work.tile * kTileQ, sequence_rows(params.queries, work.batch)};
  }

  // Before all else, so that the copy runs while the rest is worked out.
  PANTILE_DEVICE static void fetch_queries(const ForwardParams& params, Storage& storage,
                                           const ForwardWork& work) {
    const QCopy copy(params.head_dim);
    const tile::HeadRows q = head_rows(params.q, work.sequence, work.head);
    copy.copy_ragged_if(true, prim::shared_address(storage.q), QCopy::source(q, work.row0),
                        params.q_pass_bytes, work.sequence.length - work.row0);
  }

  PANTILE_DEVICE ForwardBlock(const ForwardParams& params,
                              const attn::VariantParams& variant_params, Storage& storage,
                              const ForwardWork& work)
      : keys(params, work), params_(params), storage_(storage) {
    if (threadIdx.x == 0) {
      storage.work = work;  // read behind the first barrier
    }
    softmax.clear(kIsPlain ? params.scale : variant_params.unit);
    if constexpr (!kIsPlain) {
      this->begin(variant_params, work.sequence.batch, work.head, keys.lane_row(), keys.mask(),
                  this->bias_piece(storage));
      this->fetch_bias(storage, work, keys, keys.tiles().visit.end - 1);  // with the first K
    }
    if constexpr (Variant::kMasks) {
      static_assert(kPartlySeen);
      keys.treat_all_as_masked();
    }
    Softmax::clear_earlier_sums(storage.earlier_sums);
    const int lane = prim::lane_index();
    k_lane_ = KRows::lane_offset_columns_first(lane);
    v_lane_ = VRows::lane_offset_rows_first(lane);
  }

  // A second run over the same rows, with every tile treated as one that a mask cuts: there the
  // softmax is on vector units whatever its kind.
  PANTILE_DEVICE void run_again() {
    again_ = true;
    keys.treat_all_as_masked();
  }

  PANTILE_DEVICE std::uint32_t k_tile(int stage) const {
    return prim::shared_address(storage_.stages[stage].k);
  }
  PANTILE_DEVICE std::uint32_t v_tile(int stage) const {
    return prim::shared_address(storage_.stages[stage].v);
  }

  PANTILE_DEVICE void raise_references(Scores& s) {
    softmax.raise_references(s, params_.references, storage_.earlier_sums);
  }

  // Of the scores of key tile n, before its mask.
  PANTILE_DEVICE void change_scores(Scores& s, int n) {
    if constexpr (Variant::kScores) {
      this->score(n, s, softmax.base);
      this->fetch_next_bias(storage_, keys, n - 1);
    }
  }

  // ---- fetching

  PANTILE_DEVICE void clear_missing_columns() {
    if (params_.head_dim < Config::kHeadDim || params_.head_dim_v < Config::kHeadDimV) {
      QCopy(params_.head_dim).clear_missing_columns(storage_.q);
      for (typename Storage::Stage& stage : storage_.stages) {
        KCopy(params_.head_dim).clear_missing_columns(stage.k);
        VCopy(params_.head_dim_v).clear_missing_columns(stage.v);
      }
    }
  }

  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_keys(int n, int stage) {
    keys.template fetch_keys<kMaybeRagged>(n, storage_.stages[stage].k);
  }

  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_values(int n, int stage) {
    keys.template fetch_values<kMaybeRagged>(n, storage_.stages[stage].v);
  }

  // The barrier behind the fetch of Q and the first K.
  PANTILE_DEVICE void publish_queries() {
    if (params_.negate_q && !again_) {
      QCopy::negate(storage_.q);
    }
    if (params_.zero_q) {
      QCopy::template multiply<kDType>(storage_.q, 0.0f);
    }
    if constexpr (Config::kSoftmax.fast_scale) {
      QCopy::template multiply<kDType>(storage_.q, params_.scale);
    }
    __syncthreads();
    if constexpr (Config::kQInRegisters) {
      const std::uint32_t q_lane = query_lane();
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kDepthSteps; ++k) {
          prim::load_matrix_x4(q_[m][k], QRows::step(q_lane, m, k));
        }
      }
    }
  }

  // The barrier behind the fetch of V tile n. If the tile is masked and holds an infinity or a NaN,
  // these go straight into the output elements that attend to them, and zeros take their place.
  PANTILE_DEVICE void publish_values(int stage, int n, bool masked) {
    if (!kPartlySeen || !masked) {
      __syncthreads();
      return;
    }
    std::uint16_t* const v = storage_.stages[stage].v;
    if (__syncthreads_or(VCopy::template holds_nonfinite<kDType>(v)) != 0) {
      attend_nonfinite(v, n);
      __syncthreads();
      VCopy::template clear_nonfinite<kDType>(v);
      __syncthreads();
    }
  }

  PANTILE_DEVICE void attend_nonfinite(const std::uint16_t* v, int n) {
    const int row = keys.lane_row();
    const int pair = prim::fresh_thread_index() % 4 * 2;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
#pragma unroll 1
      for (int key = 0; key < kTileK; ++key) {
        const std::uint32_t both =
            *reinterpret_cast<const std::uint32_t*>(v + VRows::offset(key, j) / 2 + pair);
        const std::uint32_t bad = both ^ prim::zero_nonfinite<kDType>(both);  // the rest is 0
        if (bad != 0) {
          const float2 x = prim::unpack<kDType>(bad);
#pragma unroll
          for (int i = 0; i < 2 * kRowTiles; ++i) {
            const core::Span seen = keys.seen_keys(row + i * 8);
            if (n * kTileK + key >= seen.begin && n * kTileK + key < seen.end &&
                this->shows(storage_.work, keys.mask(), row + i * 8, n * kTileK + key)) {
              softmax.o[i / 2][j][i % 2 * 2] += x.x;
              softmax.o[i / 2][j][i % 2 * 2 + 1] += x.y;
            }
          }
        }
      }
    }
  }

  // ---- products

  // What this lane passes to ldmatrix for the first 16 x 16 of the warp's queries.
  PANTILE_DEVICE std::uint32_t query_lane() const {
    const int thread = prim::fresh_thread_index();
    return prim::shared_address(storage_.q) + thread / 32 * Config::kWarpRows * QRows::kRowBytes +
           QRows::lane_offset_rows_first(thread % 32);
  }

  PANTILE_DEVICE void load_queries(std::uint32_t (&a)[kRowTiles][4], int k,
                                   std::uint32_t q_lane) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = q_[m][k][i];
        }
      } else {
        prim::load_matrix_x4(a[m], QRows::step(q_lane, m, k));
      }
    }
  }

  // Adds depth step k to the scores of a group of 16 keys; the first step sets them, with
  // fast_scale to minus the reference of their row.
  PANTILE_DEVICE void score_step(Scores& s, const std::uint32_t (&a)[kRowTiles][4],
                                 std::uint32_t k_lane, int group, int k) const {
    std::uint32_t b[4];
    prim::load_matrix_x4(b, KRows::step(k_lane, group, k));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (k == 0 && Config::kSoftmax.fast_scale) {
          prim::mma_set_rows<kDType>(s[m][2 * group + half], a[m], b[2 * half], b[2 * half + 1],
                                     softmax.minus_max[m][0], softmax.minus_max[m][1]);
        } else if (k == 0) {
          prim::mma_set<kDType>(s[m][2 * group + half], a[m], b[2 * half], b[2 * half + 1]);
        } else {
          prim::mma_add<kDType>(s[m][2 * group + half], a[m], b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }

  PANTILE_DEVICE static void hide_group(Scores& s, int group) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[m][2 * group][c] = s[m][2 * group + 1][c] = -INFINITY;
      }
    }
  }

  // S = Q K^T, depth outermost. In masked tiles only the first `groups` groups are multiplied.
  template <bool kMasked>
  PANTILE_DEVICE void score_product(Scores& s, int stage, int groups) const {
    const std::uint32_t k_lane = k_tile(stage) + k_lane_;
    const std::uint32_t q_lane = query_lane();
#pragma unroll
    for (int k = 0; k < kDepthSteps; ++k) {
      std::uint32_t a[kRowTiles][4];
      load_queries(a, k, q_lane);
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
        if (!kMasked || group < groups) {
          score_step(s, a, k_lane, group, k);
        } else if (k == 0) {
          hide_group(s, group);
        }
      }
    }
  }

  // The same for kCount groups from `first` on; calls between(slot) after each of the
  // kDepthSteps * kCount steps.
  template <bool kMasked, int kCount, class Between>
  PANTILE_DEVICE void score_groups(Scores& s, int stage, int first, int groups,
                                   Between between) const {
    const std::uint32_t k_lane = k_tile(stage) + k_lane_;
    const std::uint32_t q_lane = query_lane();
#pragma unroll
    for (int k = 0; k < kDepthSteps; ++k) {
      std::uint32_t a[kRowTiles][4];
      load_queries(a, k, q_lane);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!kMasked || first + i < groups) {
          score_step(s, a, k_lane, first + i, k);
        } else if (k == 0) {
          hide_group(s, first + i);
        }
        between(k * kCount + i);
      }
    }
  }

  // Adds P V of one group of keys to 16 columns of O.
  PANTILE_DEVICE void value_step(const Weights& p, std::uint32_t v_lane, int group, int column16) {
    std::uint32_t b[4];
    prim::load_matrix_x4_transposed(b, VRows::step(v_lane, group, column16));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      prim::mma_add<kDType>(softmax.o[m][2 * column16], p[m], b[0], b[1]);
      prim::mma_add<kDType>(softmax.o[m][2 * column16 + 1], p[m], b[2], b[3]);
    }
  }

  PANTILE_DEVICE void set_sums_apart(int n) { softmax.set_sums_apart(storage_.earlier_sums, n); }

  // Before the exponentials of key tile n.
  template <bool kMasked>
  PANTILE_DEVICE void begin_exponentials(int n) {
    if constexpr (kMasked && Config::kSoftmax.tensor_quarters > 0) {
      softmax.repeats = again_ && keys.was_full(n);
    }
  }

  // Exponentials and O += P V, group by group: the exponentials of a group run between the products
  // of the one before it.
  template <bool kMasked>
  PANTILE_DEVICE void value_product(Scores& s, int stage, int n, int groups) {
    begin_exponentials<kMasked>(n);
    const std::uint32_t v_lane = v_tile(stage) + v_lane_;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax.template exponentials<kMasked>(s, m, 0);
      softmax.template exponentials<kMasked>(s, m, 1);
    }
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      if (kMasked && group >= groups) {
        break;
      }
      Softmax::keep_order();
      Weights p;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        softmax.template pack<kMasked>(s, m, group, p[m]);
      }
      if constexpr (Variant::kDrops) {
        this->drop(n * kTileK, group, p);
      }
#pragma unroll
      for (int column16 = 0; column16 < kValueSteps; ++column16) {
        value_step(p, v_lane, group, column16);
        if (group + 1 < kKeyGroups) {
          spread<2 * kRowTiles, kValueSteps>(column16, [&](int unit) {
            softmax.template exponentials<kMasked>(s, unit / 2, 2 * (group + 1) + unit % 2);
          });
        }
      }
    }
  }

  // The same for long rows: each tile's products are summed apart and then added to O. Tensor cores
  // cut bits off when they add, towards zero: sums of a million products would lose 7e-3.
  template <bool kMasked>
  PANTILE_DEVICE void long_value_product(Scores& s, int stage, int n) {
    begin_exponentials<kMasked>(n);
    const std::uint32_t v_lane = v_tile(stage) + v_lane_;
    Weights p[kKeyGroups];
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        softmax.template exponentials<kMasked>(s, m, 2 * group);
        softmax.template exponentials<kMasked>(s, m, 2 * group + 1);
        softmax.template pack<kMasked>(s, m, group, p[group][m]);
      }
      if constexpr (Variant::kDrops) {
        this->drop(n * kTileK, group, p[group]);
      }
    }
#pragma unroll
    for (int column16 = 0; column16 < kValueSteps; ++column16) {
      float part[kRowTiles][2][4];
      tile::clear_accumulators(part);
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
        std::uint32_t b[4];
        prim::load_matrix_x4_transposed(b, VRows::step(v_lane, group, column16));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          prim::mma_add<kDType>(part[m][0], p[group][m], b[0], b[1]);
          prim::mma_add<kDType>(part[m][1], p[group][m], b[2], b[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            softmax.o[m][2 * column16 + half][c] += part[m][half][c];
          }
        }
      }
    }
  }

  // O += P V for kCount groups whose P is ready; calls between(slot) after each of the
  // kValueSteps * kCount steps.
  template <bool kMasked, int kCount, class Between>
  PANTILE_DEVICE void value_groups(const Weights (&p)[kCount], int stage, int first, int groups,
                                   Between between) {
    const std::uint32_t v_lane = v_tile(stage) + v_lane_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int column16 = 0; column16 < kValueSteps; ++column16) {
        if (!kMasked || first + i < groups) {
          value_step(p[i], v_lane, first + i, column16);
        }
        between(i * kValueSteps + column16);
      }
    }
  }

  // ---- output

  PANTILE_DEVICE void store() {
    ForwardOutput<Config, kDType, Variant>(params_, storage_, softmax).store(this->keep_scale());
  }

 private:
  const ForwardParams& params_;
  Storage& storage_;
  bool again_ = false;             // Q lies in shared memory and has its sign
  std::uint32_t k_lane_, v_lane_;  // what this lane passes to ldmatrix, from the tile's start
  std::uint32_t q_[Config::kQInRegisters ? kRowTiles : 1][Config::kQInRegisters ? kDepthSteps : 1]
                  [4];
};

}  // namespace pantile::ampere
