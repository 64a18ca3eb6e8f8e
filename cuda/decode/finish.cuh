// The end of a piece: O summed over the slices, then stored, or left in the workspace until all
// parts of its pair are there. The block that brings the last part merges them in the order of the
// keys.
#pragma once

#include <cstdint>

#include "core/softmax_state.h"
#include "decode/math.cuh"
#include "prim/global_arrive.cuh"

namespace pantile::decode {

// The largest reference of the slices and the sum of weights relative to it.
template <class Config>
PANTILE_DEVICE core::SoftmaxState join_slices(const Storage<Config>& storage, int column) {
  core::SoftmaxState state{storage.reference[0][column], 0.0f};
#pragma unroll
  for (int slice = 1; slice < Config::kSlices; ++slice) {
    state.max = fmaxf(state.max, storage.reference[slice][column]);
  }
#pragma unroll
  for (int slice = 0; slice < Config::kSlices; ++slice) {
    state.sum += storage.sum[slice][column] *
                 prim::exp2_approx(storage.reference[slice][column] - state.max);
  }
  return state;
}

// Sums O over the slices into storage.output. Slice w adds its share w + r of O in round r: all
// warps work, and the order of a share's additions is always the same. Begins and ends with a
// barrier.
template <class Config, DType kDType>
PANTILE_DEVICE void sum_slices(Math<Config, kDType>& math, Storage<Config>& storage, int slice,
                               int first_column) {
  const int lane = prim::lane_index();
  const int column = first_column + lane % 4 * 2;
  math.finish_sums();
  if (lane < 4) {
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        storage.reference[slice][column + n * 8 + c] = math.reference_[n][c];
        storage.sum[slice][column + n * 8 + c] = math.sum_[n][c];
      }
    }
  }
  __syncthreads();
  float factor[Config::kQTiles][2];
#pragma unroll
  for (int n = 0; n < Config::kQTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float most = join_slices(storage, column + n * 8 + c).max;
      factor[n][c] = prim::exp2_approx(math.reference_[n][c] - most);
      if constexpr (Config::kBytes == 1) {
        factor[n][c] *= math.value_unit_[n][c];
      }
    }
  }
#pragma unroll 1
  for (int round = 0; round < Config::kSlices; ++round) {
    const int share = (slice + round) % Config::kSlices;
#pragma unroll
    for (int m = 0; m < Config::kVTiles; ++m) {
      if (m % Config::kSlices != share) {
        continue;
      }
#pragma unroll
      for (int n = 0; n < Config::kQTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int dim = Codes<Config, kDType>::dim_of(m, c / 2);
          float& to = storage.output[column + n * 8 + c % 2][dim];
          const float x = math.output_[m][n][c] * factor[n][c % 2];
          to = round == 0 ? x : to + x;
        }
      }
    }
    __syncthreads();
  }
}

// What O is multiplied with, and LSE in base 2.
struct Final {
  float factor, lse_log2;
};

PANTILE_DEVICE Final finish_row(const core::SoftmaxState& state, const float* sinks, int head) {
  if (sinks == nullptr) {
    return Final{core::normaliser(state),
                 state.sum == 0.0f ? -core::kInfinity : state.max + prim::log2_approx(state.sum)};
  }
  const float sink = sinks[head] * core::kLog2E;
  const float most = fmaxf(state.max, sink);
  const float own = prim::exp2_approx(state.max - most);
  const float sum = state.sum * own + prim::exp2_approx(sink - most);
  return sum == 0.0f ? Final{0.0f, -core::kInfinity}
                     : Final{own / sum, most + prim::log2_approx(sum)};
}

// Where the packed queries of a pair are stored.
template <class Config>
class Rows {
 public:
  PANTILE_DEVICE Rows(const DecodeParams& params, const Walk<Config>& walk)
      : p_(params), s_(walk.s), b_(walk.b), head_(walk.pair / params.row_tiles) {
    first_ = walk.pair % params.row_tiles * Config::kColumns;
    count = core::min_of(Config::kColumns, s_.queries * params.group.divisor() - first_);
  }

  // Four dims from `dim` on of query `column`.
  PANTILE_DEVICE void store(int column, int dim, const core::SoftmaxState& state, float4 x) const {
    const auto row = p_.group.divmod(first_ + column);
    const int head = head_ * p_.group.divisor() + row.remainder;
    const Final final = finish_row(state, p_.sinks, head);
    if (dim == 0 && p_.lse != nullptr) {
      const std::int64_t at =
          p_.arrays.cu_seqlens_q != nullptr
              ? head * p_.lse_head + s_.first_query + row.quotient
              : (static_cast<std::int64_t>(b_) * p_.heads_q + head) * p_.lse_head + row.quotient;
      p_.lse[at] = final.lse_log2 * core::kLn2;
    }
    if (dim >= p_.head_dim_v) {
      return;
    }
    const std::int64_t at = b_ * p_.o_rows.batch + (s_.first_query + row.quotient) * p_.o_rows.seq +
                            head * p_.o_rows.head + dim;
    const float f = final.factor;
    x = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    std::uint16_t* const narrow = static_cast<std::uint16_t*>(p_.o) + at;
    if (p_.output == DType::f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p_.o) + at) = x;
    } else if (p_.output == DType::bf16) {
      *reinterpret_cast<uint2*>(narrow) =
          make_uint2(prim::pack<DType::bf16>(x.x, x.y), prim::pack<DType::bf16>(x.z, x.w));
    } else {
      *reinterpret_cast<uint2*>(narrow) =
          make_uint2(prim::pack<DType::f16>(x.x, x.y), prim::pack<DType::f16>(x.z, x.w));
    }
  }

  int count;  // may be 0 or less

 private:
  const DecodeParams& p_;
  const Sequence& s_;
  int b_, head_, first_;
};

template <class Config>
PANTILE_DEVICE float* part_of(const DecodeParams& p, int slot) {
  return p.parts + slot * part_floats(Config::kColumns, Config::kHeadDimV);
}

// O first, then the references, then the sums.
template <class Config>
PANTILE_DEVICE void store_part(const DecodeParams& p, const Storage<Config>& storage, int rows,
                               int slot) {
  constexpr int kQuads = Config::kHeadDimV / 4;
  float* const part = part_of<Config>(p, slot);
  for (int i = static_cast<int>(threadIdx.x); i < rows * kQuads; i += Config::kThreads) {
    const int column = i / kQuads;
    const int dim = i % kQuads * 4;
    *reinterpret_cast<float4*>(part + column * Config::kHeadDimV + dim) =
        *reinterpret_cast<const float4*>(&storage.output[column][dim]);
    if (dim == 0) {
      const core::SoftmaxState state = join_slices(storage, column);
      part[Config::kColumns * Config::kHeadDimV + column] = state.max;
      part[Config::kColumns * (Config::kHeadDimV + 1) + column] = state.sum;
    }
  }
}

// A row of a pair's parts, by a warp: lanes own four dims each (more than 128 dims: several times
// four), and the state of one part of every 32.
template <class Config>
class RowMerge {
 public:
  // `weights`: 32 floats of shared memory.
  PANTILE_DEVICE RowMerge(const DecodeParams& params, const PartSlots& slots, int column,
                          float* weights)
      : p_(params), slots_(slots), column_(column), lane_(prim::lane_index()), weights_(weights) {}

  // The first parts are under way while their states are joined: both come from L2.
  PANTILE_DEVICE void run(const Rows<Config>& rows) {
    const core::SoftmaxState first = state(lane_);
    core::SoftmaxState all{kNoReference, 0.0f};
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int quad = turn * 32 + lane_;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int part = 0; part < slots_.count; part += kAhead) {
        float4 ahead[kAhead];
        load(ahead, part, quad);
        if (part == 0 && turn == 0) {
          all = join(first);
        }
        if (part % 32 == 0) {
          __syncwarp();
          weights_[lane_] =
              prim::exp2_approx((part == 0 ? first : state(part + lane_)).max - all.max);
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const float w = weights_[part % 32 + i];
          sum.x = fmaf(ahead[i].x, w, sum.x);
          sum.y = fmaf(ahead[i].y, w, sum.y);
          sum.z = fmaf(ahead[i].z, w, sum.z);
          sum.w = fmaf(ahead[i].w, w, sum.w);
        }
      }
      if (quad < kQuads) {
        rows.store(column_, quad * 4, all, sum);
      }
    }
  }

 private:
  // Parts whose rows are loaded together; divides 32.
  static constexpr int kAhead =
      core::max_of(4, (Config::kHeadDim > 128 ? 128 : 256) / Config::kColumns);
  static constexpr int kQuads = Config::kHeadDimV / 4;
  static constexpr int kTurns = core::ceil_div(kQuads, 32);

  PANTILE_DEVICE core::SoftmaxState state(int part) const {
    if (part >= slots_.count) {
      return core::SoftmaxState{kNoReference, 0.0f};
    }
    const float* const from =
        part_of<Config>(p_, slots_.at(part)) + Config::kColumns * Config::kHeadDimV + column_;
    return core::SoftmaxState{__ldcg(from), __ldcg(from + Config::kColumns)};
  }

  PANTILE_DEVICE void load(float4 (&x)[kAhead], int part, int quad) const {
    // Only part 0 may lie elsewhere; the others follow each other.
    constexpr int kPart = static_cast<int>(part_floats(Config::kColumns, Config::kHeadDimV));
    const int offset = column_ * Config::kHeadDimV + quad * 4;
    const float* const from = part_of<Config>(p_, slots_.base + part) + offset;
    const float* const first = part == 0 ? part_of<Config>(p_, slots_.first) + offset : from;
    const int left = quad < kQuads ? slots_.count - part : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < left) {
        x[i] = __ldcg(reinterpret_cast<const float4*>(i == 0 ? first : from + i * kPart));
      }
    }
  }

  PANTILE_DEVICE core::SoftmaxState join(const core::SoftmaxState& first) const {
    float most = first.max;
#pragma unroll 4
    for (int part = lane_ + 32; part < slots_.count; part += 32) {
      most = fmaxf(most, state(part).max);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
    }
    float sum = first.sum * prim::exp2_approx(first.max - most);
#pragma unroll 4
    for (int part = lane_ + 32; part < slots_.count; part += 32) {
      const core::SoftmaxState other = state(part);
      sum = fmaf(other.sum, prim::exp2_approx(other.max - most), sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      sum += __shfl_xor_sync(prim::kAllLanes, sum, lanes);
    }
    return core::SoftmaxState{most, sum};
  }

  const DecodeParams& p_;
  const PartSlots& slots_;
  const int column_, lane_;
  float* const weights_;
};

// The block has left `stored` parts of the pair in the workspace. Says whether all of it are there.
template <class Config>
PANTILE_DEVICE bool arrive_parts(const DecodeParams& p, const Walk<Config>& walk,
                                 Storage<Config>& storage, int stored, int count) {
  __syncthreads();
  if (threadIdx.x == 0) {
    int* const arrivals = p.arrivals + walk.b * pairs_of_sequence(p) + walk.pair;
    const int arrived = prim::arrive_global(arrivals, stored) + stored;
    if (arrived == count) {
      *arrivals = 0;
    }
    storage.arrived = arrived;
  }
  __syncthreads();
  return storage.arrived == count;
}

// After sum_slices(). `stored`: parts of the pair that have not been announced.
template <class Config>
PANTILE_DEVICE void store_piece(const DecodeParams& p, const Walk<Config>& walk,
                                Storage<Config>& storage, int& stored) {
  constexpr int kQuads = Config::kHeadDimV / 4;
  constexpr int kWarps = Config::kThreads / 32;
  const Rows<Config> rows(p, walk);
  if (walk.whole_pair()) {
    for (int i = static_cast<int>(threadIdx.x); i < rows.count * kQuads; i += Config::kThreads) {
      const int column = i / kQuads;
      const int dim = i % kQuads * 4;
      rows.store(column, dim, join_slices(storage, column),
                 *reinterpret_cast<const float4*>(&storage.output[column][dim]));
    }
    return;
  }
  const PartSlots slots = part_slots(p, walk, storage.range.line, storage.range.blocks);
  store_part(p, storage, rows.count, slots.own);
  ++stored;
  if (walk.pair_goes_on()) {
    return;
  }
  if (arrive_parts(p, walk, storage, stored, slots.count)) {
#pragma unroll 1
    for (int column = static_cast<int>(threadIdx.x) / 32; column < rows.count; column += kWarps) {
      RowMerge<Config>(p, slots, column, storage.output[column % kWarps]).run(rows);
    }
  }
  stored = 0;
}

}  // namespace pantile::decode
