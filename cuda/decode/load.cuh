// K and V of a slice by cp.async. Each team loads what it multiplies, so that a step needs no
// barrier of the block: a warp waits for its own copies and, if the team has more than one warp,
// for them.
//
// The cache is read once, so that its lines leave L2 first: the instructions, the parts and what
// other kernels need again stay there.
//
// Keys outside [first, Sk) are not read; their rows become zeros, V's so that a weight of 0 stays
// 0. The page of the next step is looked up one step ahead.
#pragma once

#include <cstdint>

#include "decode/storage.cuh"
#include "prim/cp_async.cuh"
#include "prim/warp.cuh"

namespace pantile::decode {

// Where a lane's keys are: with whole slices the first slot of all of them, else of key lane % 16.
struct Place {
  int page, slot;
};

template <class Config>
class Loader {
 public:
  PANTILE_DEVICE Loader(const DecodeParams& params, const Walk<Config>& start,
                        Storage<Config>& storage, int slice, int member)
      : p_(params),
        walk_(start),
        slice_(slice),
        thread_(member * 32 + prim::lane_index()),
        ring_(prim::shared_address(&storage.ring[0][slice][0])),
        policy_(prim::read_once_policy()) {
    find_place();
  }

  // Copies the next tile's slice into stage `stage`, if there is one, and closes a group.
  PANTILE_DEVICE void load_next(int stage) {
    if (walk_.more) {
      copy(ring_ + static_cast<std::uint32_t>(stage * Config::kSlices * Config::kSliceBytes));
      ++walk_.tile;
      if (walk_.piece_ends()) {
        walk_.next_piece(p_);
      }
      if (walk_.more) {
        find_place();
      }
    }
    prim::commit_copies();
  }

 private:
  static constexpr int kThreads = 32 * Config::kTeam;

  PANTILE_DEVICE int first_key() const {
    return walk_.tile * Config::kTileKeys + slice_ * kSliceKeys;
  }

  PANTILE_DEVICE void find_place() {
    int key = first_key();
    if (!p_.whole_slices) {
      key += prim::lane_index() % kSliceKeys;
    }
    place_.page = walk_.s.row;
    place_.slot = key;
    if (p_.block_table != nullptr) {
      const auto at = p_.page.divmod(key);
      place_.slot = at.remainder;
      place_.page = 0;
      const bool used =
          key < walk_.s.keys && (p_.whole_slices ? key + kSliceKeys : key + 1) > walk_.s.first;
      if (used) {
        place_.page = p_.block_table[walk_.s.row * p_.table_stride + at.quotient];
      }
    }
  }

  PANTILE_DEVICE void copy(std::uint32_t to) const {
    const int key = first_key();
    const int low = walk_.s.first - key;
    const int high = walk_.s.keys - key;
    const int head = walk_.pair / p_.row_tiles;
    const bool all = p_.whole_slices && low <= 0 && high >= kSliceKeys;
    copy_side<Config::kHeadDim, Config::kKPitch>(p_.k, p_.head_dim, head, all, low, high, to);
    if constexpr (!Config::kVInK) {
      copy_side<Config::kHeadDimV, Config::kVPitch>(p_.v, p_.head_dim_v, head, all, low, high,
                                                    to + Config::kVOffset);
    }
    if constexpr (Config::kBytes == 1) {
      if (p_.token_scales) {
        copy_scales(head, low, high, to + Config::kScaleOffset);
      }
    }
  }

  // `all`: the rows are neighbours and exist.
  template <int kDim, int kPitch>
  PANTILE_DEVICE void copy_side(const CacheSide& side, int dim, int head, bool all, int low,
                                int high, std::uint32_t to) const {
    constexpr int kChunks = kDim * Config::kBytes / kChunkBytes;
    constexpr int kAll = kSliceKeys * kChunks;
    constexpr int kPasses = core::ceil_div(kAll, kThreads);
    const int used = dim * Config::kBytes;
    const char* const base = side.data + head * side.head + place_.page * side.block;
    const auto wanted = [&](int index, int byte) {
      return (kAll % kThreads == 0 || index < kAll) && byte < used;
    };
    if (all) {
      // Rows of a pass to those of the next: one addition, where rows do not divide a pass a
      // product.
      constexpr bool kEven = kThreads % kChunks == 0;
      const std::int64_t step = kThreads / kChunks * side.slot;
      const char* from = base + (place_.slot + (kEven ? thread_ / kChunks : 0)) * side.slot;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int index = thread_ + i * kThreads;
        const int row = index / kChunks;
        const int byte = index % kChunks * kChunkBytes;
        prim::copy_async_16_if(wanted(index, byte), to + row * kPitch + byte,
                               (kEven ? from : from + row * side.slot) + byte, policy_);
        from += kEven ? step : 0;
      }
      return;
    }
    const int own_row = p_.whole_slices ? prim::lane_index() % kSliceKeys : 0;
    const char* const own = base + (place_.slot + own_row) * side.slot;
#pragma unroll 2
    for (int i = 0; i < kPasses; ++i) {
      const int index = thread_ + i * kThreads;
      const int row = index / kChunks;
      const int byte = index % kChunks * kChunkBytes;
      const auto from =
          __shfl_sync(prim::kAllLanes, reinterpret_cast<unsigned long long>(own), row % kSliceKeys);
      prim::copy_async_16_or_zero_if(wanted(index, byte), to + row * kPitch + byte,
                                     reinterpret_cast<const char*>(from) + byte,
                                     row >= low && row < high, policy_);
    }
  }

  // One float a lane: K's of 16 keys, then V's.
  PANTILE_DEVICE void copy_scales(int head, int low, int high, std::uint32_t to) const {
    const int lane = prim::lane_index();
    const int row = lane % kSliceKeys;
    const ScaleSide& side = lane < kSliceKeys ? p_.k_scales : p_.v_scales;
    const int slot = place_.slot + (p_.whole_slices ? row : 0);
    const float* const from =
        side.data + place_.page * side.block + slot * side.slot + head * side.head;
    prim::copy_async_4_or_zero(to + lane * 4, from, row >= low && row < high);
  }

  const DecodeParams& p_;
  Walk<Config> walk_;
  const int slice_, thread_;
  const std::uint32_t ring_;
  const std::uint64_t policy_;
  Place place_;
};

// Zeros in the columns that a narrower head dim leaves: copies never touch them.
template <class Config>
PANTILE_DEVICE void clear_tails(const DecodeParams& p, Storage<Config>& storage) {
  if (p.head_dim == Config::kHeadDim && p.head_dim_v == Config::kHeadDimV) {
    return;
  }
  unsigned char* const ring = &storage.ring[0][0][0];
  constexpr int kBytes = Config::kStages * Config::kSlices * Config::kSliceBytes;
  for (int at = static_cast<int>(threadIdx.x) * 16; at < kBytes; at += Config::kThreads * 16) {
    *reinterpret_cast<uint4*>(ring + at) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

}  // namespace pantile::decode
