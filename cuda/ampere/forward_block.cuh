// What one thread block of the forward does, step by step: fetching tiles, masks, the two products
// and the store. forward.cuh puts the steps in order.
#pragma once

#include <cstdint>

#include "ampere/forward_params.cuh"
#include "ampere/softmax.cuh"
#include "ampere/spread.cuh"
#include "ampere/storage.cuh"
#include "pantile/registry.h"
#include "prim/cp_async.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_sync.cuh"
#include "prim/nonfinite.cuh"
#include "prim/special_registers.cuh"
#include "prim/unpack.cuh"
#include "tile/row_copy_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

template <class Config, DType kDType, MaskKind kMask>
class ForwardBlock {
  using Storage = ForwardStorage<Config>;
  using Softmax = SoftmaxRows<Config, kDType>;
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

  static constexpr bool kPartlySeen = kMask != MaskKind::full;

  // LSE of the sequence's first row; null when it is not wanted.
  PANTILE_DEVICE float* lse_rows(const ForwardWork& work) const {
    if (params_.lse == nullptr) {
      return nullptr;
    }
    const std::int64_t heads_before =
        params_.lse_packed
            ? work.head
            : static_cast<std::int64_t>(work.sequence.batch) * params_.heads_q + work.head;
    return params_.lse + heads_before * params_.lse_head_stride + work.sequence.first;
  }

 public:
  static constexpr int kDepthSteps = Config::kHeadDim / 16;   // of Q K^T
  static constexpr int kKeyGroups = kTileK / 16;              // of a key tile
  static constexpr int kValueSteps = Config::kHeadDimV / 16;  // 16 columns of O
  static constexpr bool kLeftBound = kMask == MaskKind::window || kMask == MaskKind::any;
  using Scores = typename Softmax::Scores;
  using Weights = typename Softmax::Weights;

  PANTILE_DEVICE static ForwardWork locate(const ForwardParams& params) {
    const core::WorkTile work = params.order.tile(static_cast<int>(blockIdx.x));
    return ForwardWork{work.head, work.tile * kTileQ, sequence_rows(params.queries, work.batch)};
  }

  // Before all else, so that the copy runs while the rest is worked out.
  PANTILE_DEVICE static void fetch_queries(const ForwardParams& params, Storage& storage,
                                           const ForwardWork& work) {
    const QCopy copy(params.head_dim);
    const tile::HeadRows q = head_rows(params.q, work.sequence, work.head);
    copy.copy_ragged_if(true, prim::shared_address(storage.q), copy.source(q, work.row0),
                        params.q_pass_bytes, work.sequence.length - work.row0);
  }

  PANTILE_DEVICE ForwardBlock(const ForwardParams& params, Storage& storage,
                              const ForwardWork& work)
      : params_(params), storage_(storage), k_copy_(params.head_dim), v_copy_(params.head_dim_v) {
    if (threadIdx.x == 0) {
      storage.work = work;  // read behind the first barrier
    }
    const SequenceRows keys = sequence_rows(params.keys, work.sequence.batch);
    const int key_head = params.group.divide(work.head);
    row0_ = work.row0;
    mask_ = core::Mask{work.sequence.length, keys.length,
                       kLeftBound ? params.window_left : core::kNoBound,
                       kLeftBound                ? params.window_right
                       : kMask == MaskKind::full ? core::kNoBound
                                                 : 0};
    tiles_ = plan_tiles();
    const int last_tile = (tiles_.visit.end - 1) * kTileK;
    next_k_ = k_copy_.source(head_rows(params.k, keys, key_head), last_tile);
    next_v_ = v_copy_.source(head_rows(params.v, keys, key_head), last_tile);
    softmax.clear(params.scale);
    const int lane = prim::lane_index();
    k_lane_ = KRows::lane_offset_columns_first(lane);
    v_lane_ = VRows::lane_offset_rows_first(lane);
  }

  // Key tiles to visit, and those of them that need no mask.
  PANTILE_DEVICE const core::TilePlan& tiles() const { return tiles_; }

  PANTILE_DEVICE std::uint32_t k_tile(int stage) const {
    return prim::shared_address(storage_.stages[stage].k);
  }
  PANTILE_DEVICE std::uint32_t v_tile(int stage) const {
    return prim::shared_address(storage_.stages[stage].v);
  }

  // ---- fetching

  PANTILE_DEVICE void clear_missing_columns() {
    if (params_.head_dim < Config::kHeadDim || params_.head_dim_v < Config::kHeadDimV) {
      QCopy(params_.head_dim).clear_missing_columns(storage_.q);
      for (typename Storage::Stage& stage : storage_.stages) {
        k_copy_.clear_missing_columns(stage.k);
        v_copy_.clear_missing_columns(stage.v);
      }
    }
  }

  // Tiles are fetched one after the other, from the last one that is seen to the first. Only that
  // last one may be ragged.
  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_keys(int n, int stage) {
    const bool wanted = n >= tiles_.visit.begin;
    if constexpr (kMaybeRagged) {
      k_copy_.copy_ragged_if(wanted, k_tile(stage), next_k_, params_.k_pass_bytes,
                             mask_.keys - n * kTileK);
    } else {
      k_copy_.copy_if(wanted, k_tile(stage), next_k_, params_.k_pass_bytes);
    }
    next_k_ -= params_.k_tile_bytes;
  }

  template <bool kMaybeRagged>
  PANTILE_DEVICE void fetch_values(int n, int stage) {
    const bool wanted = n >= tiles_.visit.begin;
    if constexpr (kMaybeRagged) {
      v_copy_.copy_ragged_if(wanted, v_tile(stage), next_v_, params_.v_pass_bytes,
                             mask_.keys - n * kTileK);
    } else {
      v_copy_.copy_if(wanted, v_tile(stage), next_v_, params_.v_pass_bytes);
    }
    next_v_ -= params_.v_tile_bytes;
  }

  // The barrier behind the fetch of Q and the first K.
  PANTILE_DEVICE void publish_queries() {
    if (params_.negate_q) {
      QCopy(params_.head_dim).negate(storage_.q);
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
    if (__syncthreads_or(v_copy_.template holds_nonfinite<kDType>(v)) != 0) {
      attend_nonfinite(v, n);
      __syncthreads();
      v_copy_.template clear_nonfinite<kDType>(v);
      __syncthreads();
    }
  }

  PANTILE_DEVICE void attend_nonfinite(const std::uint16_t* v, int n) {
    const int row = lane_row();
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
            const core::Span seen = seen_keys(row + i * 8);
            if (n * kTileK + key >= seen.begin && n * kTileK + key < seen.end) {
              softmax.o[i / 2][j][i % 2 * 2] += x.x;
              softmax.o[i / 2][j][i % 2 * 2 + 1] += x.y;
            }
          }
        }
      }
    }
  }

  // ---- masks

  // Without a left bound the tiles begin with 0, which the compiler should know.
  PANTILE_DEVICE core::TilePlan plan_tiles() const {
    if constexpr (kMask == MaskKind::full) {
      return row0_ < mask_.rows
                 ? core::TilePlan{{0, core::ceil_div(mask_.keys, kTileK)}, {0, mask_.keys / kTileK}}
                 : core::TilePlan{{0, 0}, {0, 0}};
    }
    core::TilePlan tiles{{0, 0}, {0, 0}};
    if (row0_ < mask_.rows) {
      tiles = core::plan_row_tile(
          mask_, core::Span{row0_, core::min_of(row0_ + kTileQ, mask_.rows)}, kTileK);
    }
    if constexpr (!kLeftBound) {
      tiles.visit.begin = tiles.full.begin = 0;
    }
    return tiles;
  }

  // The row, within the sequence, of this lane's accumulator elements 0 and 1 of row tile 0;
  // elements 2 and 3 are 8 rows, the next row tile 16 rows below.
  PANTILE_DEVICE int lane_row() const {
    const int thread = prim::fresh_thread_index();
    return row0_ + thread / 32 * Config::kWarpRows + thread % 32 / 4;
  }

  PANTILE_DEVICE core::Span seen_keys(int row) const {
    if constexpr (kLeftBound) {
      return core::visible_keys(mask_, row);
    } else if constexpr (kMask == MaskKind::causal) {
      return core::Span{0, core::min_of(mask_.keys, row + mask_.shift() + 1)};
    } else {
      return core::Span{0, mask_.keys};
    }
  }

  // How many groups of 16 keys of tile n reach to the last key that the warp's rows see. Equal in
  // all lanes.
  PANTILE_DEVICE int seen_groups(int n) const {
    const int warp_row = prim::fresh_thread_index() / 32 * Config::kWarpRows;
    const int end = seen_keys(row0_ + warp_row + Config::kWarpRows - 1).end - n * kTileK;
    return core::clamp(end + 15, 0, kTileK) / 16;
  }

  PANTILE_DEVICE void mask_scores(Scores& s, int n) const {
    const int first_key = n * kTileK + prim::fresh_thread_index() % 4 * 2;
    const int row = lane_row();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const core::Span seen = seen_keys(row + m * 16 + r * 8);
        const int begin = seen.begin - first_key;
        const int end = seen.end - first_key;
#pragma unroll
        for (int j = 0; j < kTileK / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * j + c >= end || (kLeftBound && 8 * j + c < begin)) {
              s[m][j][2 * r + c] = -INFINITY;
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

  // Adds depth step k to the scores of a group of 16 keys; the first step sets them.
  PANTILE_DEVICE static void score_step(Scores& s, const std::uint32_t (&a)[kRowTiles][4],
                                        std::uint32_t k_lane, int group, int k) {
    std::uint32_t b[4];
    prim::load_matrix_x4(b, KRows::step(k_lane, group, k));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (k == 0) {
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

  // Exponentials and O += P V, group by group: the exponentials of a group run between the products
  // of the one before it.
  template <bool kMasked>
  PANTILE_DEVICE void value_product(Scores& s, int stage, int groups) {
    const std::uint32_t v_lane = v_tile(stage) + v_lane_;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax.exponentials(s, m, 0);
      softmax.exponentials(s, m, 1);
    }
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      if (kMasked && group >= groups) {
        break;
      }
      Weights p;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        softmax.pack(s, m, group, p[m]);
      }
#pragma unroll
      for (int column16 = 0; column16 < kValueSteps; ++column16) {
        value_step(p, v_lane, group, column16);
        if (group + 1 < kKeyGroups) {
          spread<2 * kRowTiles, kValueSteps>(column16, [&](int unit) {
            softmax.exponentials(s, unit / 2, 2 * (group + 1) + unit % 2);
          });
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

  // All copies have landed and every warp is past its last S, so each may overwrite its own rows of
  // Q. Rows past the sequence's length, as far as the tensor has them, are those of an empty row.
  PANTILE_DEVICE void store() {
    const ForwardWork work = storage_.work;
    const int thread = prim::fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread / 32 * Config::kWarpRows;
    const int first = work.row0 + warp_row;
    char* const rows = reinterpret_cast<char*>(storage_.q + warp_row * Config::kHeadDim);
    float* const lse = lse_rows(work);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float normaliser = softmax.normaliser(m, r);
        const int row = m * 16 + r * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
          *reinterpret_cast<std::uint32_t*>(rows + VRows::offset(row, j) + lane % 4 * 4) =
              prim::pack<kDType>(softmax.o[m][j][2 * r] * normaliser,
                                 softmax.o[m][j][2 * r + 1] * normaliser);
        }
        if (lse != nullptr && lane % 4 == 0 && first + row < work.sequence.allocated) {
          lse[first + row] =
              first + row < work.sequence.length ? softmax.log_sum_exp(m, r) : -INFINITY;
        }
      }
    }
    __syncwarp();
    const tile::HeadRows o = head_rows(params_.o, work.sequence, work.head);
#pragma unroll 4
    for (int i = lane; i < Config::kWarpRows * VRows::kChunks; i += 32) {
      const int row = i / VRows::kChunks;
      const int chunk = i % VRows::kChunks;
      if (first + row < work.sequence.allocated && chunk * 8 < params_.head_dim_v) {
        uint4 value = *reinterpret_cast<const uint4*>(rows + VRows::offset(row, chunk));
        if (first + row >= work.sequence.length) {
          value = uint4{0, 0, 0, 0};
        }
        *reinterpret_cast<uint4*>(o.rows + (first + row) * o.stride + chunk * 8) = value;
      }
    }
  }

 private:
  const ForwardParams& params_;
  Storage& storage_;
  const KCopy k_copy_;
  const VCopy v_copy_;
  int row0_;              // the block's first row, in the sequence
  core::Mask mask_;       // of the sequence
  core::TilePlan tiles_;  // of the block
  const char* next_k_;    // what this thread copies next
  const char* next_v_;
  std::uint32_t k_lane_, v_lane_;  // what this lane passes to ldmatrix, from the tile's start
  std::uint32_t q_[Config::kQInRegisters ? kRowTiles : 1][Config::kQInRegisters ? kDepthSteps : 1]
                  [4];

 public:
  Softmax softmax;
};

}  // namespace pantile::ampere
