// What a variant (attn/variant.cuh) does in the forward of this family: to the scores of a key tile
// as they come out of Q K^T, before the mask, and to P on its way to P V. A warp has up to two row
// tiles of 16, and each of them is a fragment as the hooks know it. Plain attention has a Scoring
// and a Dropping that are NoVariant, and none of this.
//
// Two types instead of one, because the two are wanted at different times: dropout makes its random
// bytes 32 keys at a time where P is packed, and holds them in 8 registers.
#pragma once

#include <cstdint>

#include "ampere/bias.cuh"
#include "ampere/forward/params.cuh"
#include "ampere/storage.cuh"
#include "attn/dropout.cuh"
#include "attn/variant.cuh"
#include "pantile/registry.h"
#include "prim/special_registers.cuh"

namespace pantile::ampere {

template <class Scoring = attn::NoVariant, class Dropping = attn::NoVariant,
          KeySource kKeySource = KeySource{}>
struct ForwardVariant {
  using Score = Scoring;
  using Drop = Dropping;
  static constexpr KeySource kSource = kKeySource;
  static constexpr bool kScores = Scoring::kAny;   // changes scores
  static constexpr bool kAdds = Scoring::kAdds;    // by a term that is linear in the key
  static constexpr bool kMasks = Scoring::kMasks;  // hides pairs: no tile is visible as a whole
  static constexpr bool kDrops = Dropping::kDrops;
  static constexpr bool kAny = kScores || kDrops;
  static constexpr int kBiasBytes = Scoring::kSharedBytes;  // of 16 rows (ampere/bias.cuh), or 0
  static_assert(!Scoring::kDrops && !Dropping::kAdds);
};

using PlainForward = ForwardVariant<>;

// Keys that Dropping is given at a time.
inline constexpr int kDropKeys = 32;

// Whether the masks of a variant show a pair. The first argument is a type.
template <class Variant>
PANTILE_DEVICE bool shows_pair(const Variant*, const attn::VariantParams& params,
                               const attn::MaskPlace& at, int row, int key) {
  if constexpr (Variant::kMasks) {
    return Variant::visible(params, at.batch, at.head, row, key);
  }
  return true;
}
template <class Mask>
PANTILE_DEVICE bool shows_pair(const attn::MaskedPairs<Mask>*, const attn::VariantParams& params,
                               const attn::MaskPlace& at, int row, int key) {
  return Mask::visible(params.mask, at, row, key);
}
template <class A, class B>
PANTILE_DEVICE bool shows_pair(const attn::Both<A, B>*, const attn::VariantParams& params,
                               const attn::MaskPlace& at, int row, int key) {
  return shows_pair(static_cast<const A*>(nullptr), params, at, row, key) &&
         shows_pair(static_cast<const B*>(nullptr), params, at, row, key);
}

// The variant of one warp's rows. For plain attention an empty class: as a base it then takes no
// room beside the accumulators, whose machine code would show it.
template <class Config, class Variant, bool kAny = Variant::kAny>
class VariantRows {
 protected:
  PANTILE_DEVICE static float keep_scale() { return 1.0f; }
  template <class Work, class AnyMask>
  PANTILE_DEVICE static bool shows(const Work&, const AnyMask&, int, int) {
    return true;
  }
};

template <class Config, class Variant>
class VariantRows<Config, Variant, true> {
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kKeyTiles = Config::kTileK / 8;

 protected:
  // `row`: of the lane's accumulators 0 and 1 of row tile 0, in its sequence. `bias`: the warp's
  // piece of a tile of the bias.
  template <class AnyMask>
  PANTILE_DEVICE void begin(const attn::VariantParams& params, int batch, int head, int row,
                            const AnyMask& mask, std::uint32_t bias) {
    params_ = &params;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int first = row + 16 * m;
      const attn::FragmentPlace place{batch,
                                      head,
                                      first,
                                      first + mask.shift(),
                                      mask.rows,
                                      mask.keys,
                                      bias + static_cast<std::uint32_t>(m * Variant::kBiasBytes)};
      scoring_[m].begin(params, place);
      dropping_[m].begin(params, place);
    }
  }

  PANTILE_DEVICE float keep_scale() const { return params_->keep_scale; }

  // Changes the scores of key tile n. What is left of a linear term, one number a row, goes to
  // `base`, in base-2 logits.
  template <class Scores, class Bases>
  PANTILE_DEVICE void score(int n, Scores& s, Bases& base) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      scoring_[m].fetch(*params_, lane_key(n * Config::kTileK));
      auto& fragment = reinterpret_cast<float (&)[4 * kKeyTiles]>(s[m]);
      scoring_[m].score(fragment);
      if constexpr (Variant::kAdds) {
        const attn::SlopedLogits logits = scoring_[m].logits(params_->unit);
        const float slope = __fdividef(logits.slope, logits.unit);  // scores a column
#pragma unroll
        for (int e = 0; e < 4 * kKeyTiles; ++e) {
          fragment[e] = fmaf(slope, static_cast<float>(attn::column_of(e)), fragment[e]);
        }
        base[m][0] = logits.base[0];
        base[m][1] = logits.base[1];
      }
    }
  }

  // The warp's piece of a tile of a bias that is copied.
  template <class Storage>
  PANTILE_DEVICE static std::uint32_t bias_piece(const Storage& storage) {
    if constexpr (Variant::kBiasBytes > 0) {
      return prim::shared_address(storage.bias[prim::fresh_thread_index() / 32]);
    }
    return 0;
  }

  // Starts the copies of its part of key tile n, if that is one of those to visit. They land where
  // those of the tile's K do: nothing else waits for them.
  template <class Storage, class Keys>
  PANTILE_DEVICE void fetch_bias(const Storage& storage, const ForwardWork& work, const Keys& keys,
                                 int n) const {
    if constexpr (Variant::kBiasBytes > 0) {
      using Piece = core::BiasPiece<Config::kWarpRows, Config::kTileK>;
      static_assert(Piece::kBytes == kRowTiles * Variant::kBiasBytes);
      if (n >= keys.tiles().visit.begin) {
        const int row = work.row0 + prim::fresh_thread_index() / 32 * Config::kWarpRows;
        const auto& mask = keys.mask();
        const BiasPlace at{work.sequence.batch, work.head, row,
                           n * Config::kTileK,  mask.rows, mask.keys};
        copy_bias<Piece>(*params_, at, bias_piece(storage));
      }
    }
  }

  // The next tile's takes the place of the one that score() has read, which no other warp does.
  template <class Storage, class Keys>
  PANTILE_DEVICE void fetch_next_bias(const Storage& storage, const Keys& keys, int n) const {
    if constexpr (Variant::kBiasBytes > 0) {
      __syncwarp();
      fetch_bias(storage, storage.work, keys, n);
      prim::commit_copies();
    }
  }

  // Whether its masks show a pair.
  template <class AnyMask>
  PANTILE_DEVICE bool shows(const ForwardWork& work, const AnyMask& mask, int row, int key) const {
    const attn::MaskPlace at{work.sequence.batch, work.head, mask.rows, mask.keys, mask.shift()};
    return row < at.rows &&  // of others the mask has nothing
           shows_pair(static_cast<const typename Variant::Score*>(nullptr), *params_, at, row, key);
  }

  // Zeroes weights of group `group` of 16 keys of the key tile whose first key is `key0`, once
  // their sums were taken. Groups come in order.
  PANTILE_DEVICE void drop(int key0, int group, std::uint32_t (&p)[kRowTiles][4]) {
    constexpr int kGroups = kDropKeys / 16;
    static_assert(Config::kTileK % kDropKeys == 0);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (group % kGroups == 0) {
        dropping_[m].fetch(*params_, lane_key(key0 + group * 16));
      }
      const std::uint32_t even = dropping_[m].keep[group % kGroups][0];
      const std::uint32_t odd = dropping_[m].keep[group % kGroups][1];
      p[m][0] &= attn::kept_halves<0>(even, odd);  // row, key
      p[m][2] &= attn::kept_halves<1>(even, odd);  // row, key + 8
      p[m][1] &= attn::kept_halves<2>(even, odd);  // row + 8, key
      p[m][3] &= attn::kept_halves<3>(even, odd);
    }
  }

 private:
  // The lane's first key, from the first of a tile.
  PANTILE_DEVICE static int lane_key(int first) {
    return first + prim::fresh_thread_index() % 4 * 2;
  }

  const attn::VariantParams* params_;
  typename Variant::Score scoring_[kRowTiles];
  typename Variant::Drop dropping_[kRowTiles];
};

}  // namespace pantile::ampere
