// Products and softmax of a warp: 16 keys of a tile against its packed queries.
//
//   S^T = K Q^T     16 keys x 8 queries a product, K by ldmatrix, Q in registers
//   P^T             by query: columns of S^T, two of a tile of 8 in a lane, keys over 8 lanes
//   O^T += V^T P^T  V^T by ldmatrix with transposition; P^T packed and transposed in registers
//
// A query's reference is raised when a score exceeds it by 2^8; each query decides by itself, so
// its bits do not depend on the queries beside it. Every sum runs in the order of the keys.
//
// 8-bit caches: the scale of a key multiplies its scores; that of a value multiplies its weight
// over the query's value_unit_, so that weights stay within f16.
#pragma once

#include <cstdint>

#include "core/softmax_state.h"
#include "decode/codes.cuh"
#include "decode/queries.cuh"
#include "prim/math.cuh"
#include "prim/mma_sync.cuh"
#include "prim/move_matrix.cuh"

namespace pantile::decode {

// A reference that every score exceeds, finite so that a hidden score less it is -inf.
inline constexpr float kNoReference = -3.0e38f;
inline constexpr float kRaiseLimit = 8.0f;           // base 2
inline constexpr float kLeastUnit = 1.1754944e-38f;  // 2^-126

template <class Config, DType kDType>
class Math {
 public:
  static constexpr int kQTiles = Config::kQTiles;
  static constexpr int kVTiles = Config::kVTiles;
  static constexpr int kQPairs = core::ceil_div(Config::kKSteps, 2);
  static constexpr bool kCodes = Config::kBytes == 1;
  using Cache = Codes<Config, kDType>;
  static constexpr DType kProduct = Cache::kProduct;
  using Scores = float[kQTiles][4];

  PANTILE_DEVICE Math(const DecodeParams& params, int slice, int member)
      : p_(params), slice_(slice), first_column_(member * Config::kWarpColumns) {}

  // Copies Q of a pair to the memory of storage.output, which is free until the end of a piece.
  PANTILE_DEVICE void ask_for_q(const Walk<Config>& walk, Storage<Config>& storage) const {
    copy_q<Config>(p_, walk, prim::shared_address(&storage.output[0][0]));
  }

  // Takes Q, whose copies this thread has waited for, and sets the limits of the keys that all its
  // queries see. `new_q`: false if Q is that of the piece before.
  PANTILE_DEVICE void start_piece(const Walk<Config>& walk, Storage<Config>& storage, bool new_q) {
    if (Config::kQShared || new_q) {
      take_q(storage);
    }
    start_scales(walk, storage);
    const Sequence& s = walk.s;
    tree_ = p_.tree_mask == nullptr
                ? nullptr
                : p_.tree_mask + (p_.arrays.cu_seqlens_q != nullptr
                                      ? s.first_query
                                      : static_cast<std::int64_t>(walk.b) * p_.arrays.seqlen_q);
    shift_ = s.keys - s.queries;
    full_first_ = core::max_of(s.first, s.keys - 1 - p_.window_left);
    full_last_ = core::min_of(s.keys, shift_ + (tree_ != nullptr ? 0 : p_.window_right + 1));
    first_row_ = (walk.pair % p_.row_tiles) * Config::kColumns + first_column_;
  }

  // Before each piece; apart from start_piece(), so that O takes no registers between pieces.
  PANTILE_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        reference_[n][c] = kNoReference;
        sum_[n][c] = 0.0f;
      }
#pragma unroll
      for (int m = 0; m < kVTiles; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          output_[m][n][c] = 0.0f;
        }
      }
    }
  }

  // `slice`: K and V of this warp's keys of `tile`.
  PANTILE_DEVICE void step(unsigned char* slice, const Sequence& s, int tile) {
    const int key = tile * Config::kTileKeys + slice_ * kSliceKeys;
    if (key >= s.keys || key + kSliceKeys <= s.first) {
      return;
    }
    const bool full = key >= full_first_ && key + kSliceKeys <= full_last_;
    const std::uint32_t k = prim::shared_address(slice);
    Scores p;
    multiply_keys(p, k);
    float key_scale[2] = {1.0f, 1.0f};
    float value_scale[2] = {1.0f, 1.0f};
    if constexpr (kCodes) {
      if (p_.token_scales) {
        const int lane = prim::lane_index();
        const float* const scales = reinterpret_cast<const float*>(slice + Config::kScaleOffset);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          key_scale[half] = scales[half * 8 + lane / 4];
          value_scale[half] = scales[kSliceKeys + half * 8 + lane / 4];
        }
      }
      scale_scores(p, key_scale);
    }
    if (p_.capped) {
      cap(p);
    }
    const std::uint32_t hidden = full ? 0 : hide(p, s, key);
    raise(p);
    std::uint32_t packed[kQTiles][2];
    weigh(p, hidden);
    if constexpr (kCodes) {
      if (p_.token_scales) {
        scale_weights(p, hidden, value_scale);
      }
    }
    pack_weights(p, packed);
    const std::uint32_t v = k + Config::kVOffset;
    if (!full && (s.queries > 1 || tree_ != nullptr)) {
      guard_values(hidden, slice + Config::kVOffset);
    }
    multiply_values(packed, v);
  }

  // Over the 8 lanes that hold keys of a query.
  PANTILE_DEVICE void finish_sums() {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          sum_[n][c] += __shfl_xor_sync(prim::kAllLanes, sum_[n][c], lanes);
        }
      }
    }
  }

  float output_[kVTiles][kQTiles][4];
  float reference_[kQTiles][2];
  float sum_[kQTiles][2];
  float value_unit_[kCodes ? kQTiles : 1][2];  // of output_, 8-bit caches

 private:
  PANTILE_DEVICE void take_q(Storage<Config>& storage) {
    unsigned char* const q = reinterpret_cast<unsigned char*>(&storage.output[0][0]);
    __syncthreads();
    if constexpr (kCodes) {
      convert_q<Config>(p_, q, storage.q_unit);
      __syncthreads();
    }
    q_row_ = Cache::q_row(prim::shared_address(q) + first_column_ * Config::kQPitch);
    if constexpr (!Config::kQShared) {
#pragma unroll
      for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
        for (int pair = 0; pair < kQPairs; ++pair) {
          Cache::load_q(q_[pair][n], q_row_ + n * 8 * Config::kQPitch, pair);
        }
      }
    }
  }

  // 8-bit caches: what scores of a query are multiplied with, and the first unit of its values.
  PANTILE_DEVICE void start_scales(const Walk<Config>& walk, const Storage<Config>& storage) {
    if constexpr (kCodes) {
      float key_scale = 1.0f;
      float value_scale = 1.0f;
      if (p_.token_scales) {
        value_scale = kLeastUnit;
      } else if (p_.k_scales.data != nullptr) {
        const int head = walk.pair / p_.row_tiles;
        key_scale = p_.k_scales.data[walk.b * p_.k_scales.block + head * p_.k_scales.head];
        value_scale = p_.v_scales.data[walk.b * p_.v_scales.block + head * p_.v_scales.head];
      }
      const int column = first_column_ + prim::lane_index() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          q_scale_[n][c] = storage.q_unit[column + n * 8 + c] * key_scale;
          value_unit_[n][c] = value_scale;
        }
      }
    }
  }

  PANTILE_DEVICE void multiply_keys(Scores& s, std::uint32_t k) const {
    static_assert(!kCodes || Config::kKSteps % 2 == 0);
    const std::uint32_t row = Cache::key_row(k);
    Scores odd;  // 8-bit caches: odd steps by themselves, because a chain of products is latency
#pragma unroll
    for (int pair = 0; pair < kQPairs; ++pair) {
      std::uint32_t a[2][4];
      Cache::load_keys(a, row, pair);
#pragma unroll
      for (int n = 0; n < kQTiles; ++n) {
        std::uint32_t b[4];
        if constexpr (Config::kQShared) {
          Cache::load_q(b, q_row_ + n * 8 * Config::kQPitch, pair);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            b[i] = q_[pair][n][i];
          }
        }
        if (pair == 0) {
          prim::mma_set<kProduct>(s[n], a[0], b[0], b[1]);
        } else {
          prim::mma_add<kProduct>(s[n], a[0], b[0], b[1]);
        }
        if (kCodes && pair == 0) {
          prim::mma_set<kProduct>(odd[n], a[1], b[2], b[3]);
        } else if (2 * pair + 1 < Config::kKSteps) {
          prim::mma_add<kProduct>(kCodes ? odd[n] : s[n], a[1], b[2], b[3]);
        }
      }
    }
    if constexpr (kCodes) {
#pragma unroll
      for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[n][c] += odd[n][c];
        }
      }
    }
  }

  // From products of codes and scaled queries to scores.
  PANTILE_DEVICE void scale_scores(Scores& s, const float (&key_scale)[2]) const {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] *= q_scale_[n][c % 2] * key_scale[c / 2];
      }
    }
  }

  // scale_log2 then holds the cap.
  PANTILE_DEVICE void cap(Scores& s) const {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = prim::tanh_of_log2(s[n][c] * p_.cap_inner);
      }
    }
  }

  // Scores that are not seen become -inf; bit 4 n + c says which.
  PANTILE_DEVICE std::uint32_t hide(Scores& s, const Sequence& sequence, int key) const {
    const int lane = prim::lane_index();
    std::uint32_t hidden = 0;
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = p_.group.divide(first_row_ + n * 8 + lane % 4 * 2 + c % 2);
        const int at = key + lane / 4 + c / 2 * 8;
        bool seen = at >= sequence.first && at < sequence.keys;
        if (tree_ == nullptr) {
          const int position = token + shift_;
          seen &= at >= position - p_.window_left && at <= position + p_.window_right;
        } else if (at >= shift_) {
          const std::int64_t mask = token < sequence.queries ? tree_[token] : 0;
          seen &= (mask >> ((at - shift_) & 63) & 1) != 0;
        }
        hidden |= (seen ? 0u : 1u) << (n * 4 + c);
        s[n][c] = seen ? s[n][c] : -core::kInfinity;
      }
    }
    return hidden;
  }

  // Raises the references that a score of this step exceeds by more than the limit.
  PANTILE_DEVICE void raise(const Scores& s) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float most = fmaxf(s[n][c], s[n][c + 2]) * p_.scale_log2;
        any |= most > reference_[n][c] + kRaiseLimit;
      }
    }
    if (!prim::any(any)) {
      return;
    }
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = fmaxf(s[n][c], s[n][c + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
        }
        most *= p_.scale_log2;
        const float old = reference_[n][c];
        const float now = most > old + kRaiseLimit ? most : old;
        const float factor = prim::exp2_approx(old - now);
        reference_[n][c] = now;
        sum_[n][c] *= factor;
#pragma unroll
        for (int m = 0; m < kVTiles; ++m) {
          output_[m][n][c] *= factor;
          output_[m][n][c + 2] *= factor;
        }
      }
    }
  }

  // Scores become weights, which are summed.
  PANTILE_DEVICE void weigh(Scores& s, std::uint32_t hidden) {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float p = prim::exp2_approx(fmaf(s[n][c], p_.scale_log2, -reference_[n][c % 2]));
        s[n][c] = (hidden >> (n * 4 + c) & 1) != 0 ? 0.0f : p;
        sum_[n][c % 2] += s[n][c];
      }
    }
  }

  // Weights times the scales of their values, over a unit that is raised when a scale exceeds it by
  // more than 2^4.
  PANTILE_DEVICE void scale_weights(Scores& p, std::uint32_t hidden,
                                    const float (&value_scale)[2]) {
    bool any = false;
    Scores seen;
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        seen[n][c] = (hidden >> (n * 4 + c) & 1) != 0 ? 0.0f : value_scale[c / 2];
        any |= seen[n][c] > value_unit_[n][c % 2] * 16.0f;
      }
    }
    if (prim::any(any)) {
      raise_units(seen);
    }
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        p[n][c] *= seen[n][c] * inverse_unit(value_unit_[n][c % 2]);
      }
    }
  }

  PANTILE_DEVICE void raise_units(const Scores& seen) {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = fmaxf(seen[n][c], seen[n][c + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
        }
        const float old = value_unit_[n][c];
        const float now = most > old * 16.0f ? unit_of(most) : old;
        value_unit_[n][c] = now;
        const float factor = old / now;
#pragma unroll
        for (int m = 0; m < kVTiles; ++m) {
          output_[m][n][c] *= factor;
          output_[m][n][c + 2] *= factor;
        }
      }
    }
  }

  // To operand B of the second product.
  PANTILE_DEVICE void pack_weights(const Scores& p, std::uint32_t (&packed)[kQTiles][2]) const {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        packed[n][c] = prim::transpose_8x8(prim::pack<kProduct>(p[n][2 * c], p[n][2 * c + 1]));
      }
    }
  }

  PANTILE_DEVICE void multiply_values(const std::uint32_t (&packed)[kQTiles][2], std::uint32_t v) {
    const std::uint32_t row = Cache::value_row(v);
#pragma unroll
    for (int pair = 0; pair < core::ceil_div(kVTiles, 2); ++pair) {
      std::uint32_t a[2][4];
      Cache::load_values(a, row, pair);
#pragma unroll
      for (int tile = 0; tile < core::min_of(2, kVTiles - 2 * pair); ++tile) {
#pragma unroll
        for (int n = 0; n < kQTiles; ++n) {
          prim::mma_add<kProduct>(output_[2 * pair + tile][n], a[tile], packed[n][0], packed[n][1]);
        }
      }
    }
  }

  // A weight of 0 does not keep an infinity or NaN of a value from a query that does not see its
  // key. They become zeros in shared memory, and queries that see them get them here.
  PANTILE_DEVICE void guard_values(std::uint32_t hidden, unsigned char* v) {
    if (!Cache::has_nonfinite(v)) {
      return;
    }
    std::uint32_t seen[kQTiles][2];
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::uint32_t bits = hidden >> (n * 4 + c * 2);
        seen[n][c] = prim::transpose_8x8(
            prim::pack<kProduct>((bits & 1) != 0 ? 0.0f : 1.0f, (bits & 2) != 0 ? 0.0f : 1.0f));
      }
    }
    Cache::add_nonfinite(output_, seen, Cache::value_row(prim::shared_address(v)));
    sync_team<Config>(slice_);
    Cache::zero_nonfinite(v);
    sync_team<Config>(slice_);
  }

  const DecodeParams& p_;
  const int slice_, first_column_;
  const std::int64_t* tree_;    // of the sequence; null: none
  int shift_;                   // key position of query 0
  int full_first_, full_last_;  // keys that all queries see
  float q_scale_[kCodes ? kQTiles : 1][2];
  int first_row_;        // this warp's first packed query of the key head
  std::uint32_t q_row_;  // Q in shared memory, this lane's row for ldmatrix
  std::uint32_t q_[Config::kQShared ? 1 : kQPairs][kQTiles][4];
};

}  // namespace pantile::decode
