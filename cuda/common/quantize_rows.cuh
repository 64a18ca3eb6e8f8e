// Blocks of Q and K of the FP8 quantiser: smooth, rotate, find the scales, round. Everything is one
// rounded float operation in the order of core/hadamard.h and core/scaling.h, so that the CPU gives
// the same bits; only the signs come first (they are exact) and the factor 1/group waits until
// after the sums (it is a power of two). Blocks whose sums overflow, that hold NaN or that are so
// small that the factor would round are done again with the factor first.
//
// kDim: 64, 128 or 256, at least the head dim. kDim / 32 lanes share a row; lane r holds the chunks
// r, r + lanes, r + 2 lanes and r + 3 lanes of eight channels each.
#pragma once

#include "common/quantize_load.cuh"
#include "common/rotate_rows.cuh"
#include "core/scaling.h"
#include "prim/warp.cuh"

namespace pantile::common {

// What the two sorts of rows need beyond their side.
struct RowsOutput {
  std::uint8_t* codes;  // [heads, 128 blocks, head_dim rounded up to 16]
  float* scales;        // one each scale_rows rows, scale_stride apart
  int scale_rows;       // 1, 64 or 128
  int scale_stride;
  float scale_factor;    // in stored scales: the Hadamard group for Q, else 1
  float scale_bound;     // scales from here on are stored as core::kLargestPower
  const float* descale;  // [batch, heads_k] or null
  const float* mean;     // [batch, heads_k, dim] with the rotation's signs, or null
  float* dot_mean;       // Q: [heads, 128 blocks], rows times mean; K: null, mean is subtracted
  int heads_per_mean;    // heads that share a mean and a descale
  int hadamard_group;    // 1: no rotation
  float group_inverse;   // 1 / hadamard_group
  float limit;           // largest code
};

template <DType kDType, int kDim>
class RowQuantizer {
 public:
  static constexpr int kLanes = kDim / 32;
  static constexpr int kThreads = kDim == 256 ? 512 : 256;
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static constexpr int kPasses = core::kBlockedRows / kRowsPerPass;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kHalfRows = core::kBlockedRows / 2;
  static constexpr float kPlainBound = core::kLargestPower / 2.0f;
  // Above this the factor 1/group, put first, would round nothing off that matters: products below
  // the normal numbers are 2^-149 apart, less than 2^-30 of any number whose code is not 0.
  static constexpr float kPlainFloor = 7.8886091e-31f;  // 2^-100

  struct Shared {
    unsigned most[kPasses * kWarps];  // of each pass of a warp, as the bits of a float
  };

  PANTILE_DEVICE RowQuantizer(const QuantizeSide& side, const RowsOutput& out,
                              const RowBlock& block, Shared& shared)
      : side_(side),
        out_(out),
        block_(block),
        s_(shared),
        lane_(static_cast<int>(threadIdx.x) % kLanes),
        row_(static_cast<int>(threadIdx.x) / kLanes),
        mean_row_(block.batch * (side.heads / out.heads_per_mean) +
                  block.head / out.heads_per_mean) {}

  PANTILE_DEVICE void run() {
    float most[kPasses];
    const bool whole = side_.dim == kDim && out_.hadamard_group == kDim;
    const float bound =
        whole ? attempt<Rotation::whole, false>(most) : attempt<Rotation::parts, false>(most);
    // Below this bound no scale saturates, so that no code needs clamping.
    if (bound <= kPlainBound && (bound >= kPlainFloor || bound == 0.0f)) {
      write<false>(most, out_.group_inverse);
    } else {
      __syncthreads();
      attempt<Rotation::parts, true>(most);
      write<true>(most, 1.0f);
    }
  }

 private:
  // whole: all channels, and as many as kDim; without a branch, each of which would cost a copy of
  // all values. parts: any head dim and group, also none.
  enum class Rotation { whole, parts };

  // Prepares the block and finds what its scales follow from. Returns the block's largest
  // magnitude, infinite if something is not finite.
  template <Rotation kRotation, bool kCareful>
  PANTILE_DEVICE float attempt(float (&most)[kPasses]) {
    load<kRotation == Rotation::whole>();
    if (out_.mean != nullptr) {
      smooth();
    }
    if constexpr (kCareful) {
      multiply(out_.group_inverse);
    }
    if constexpr (kRotation == Rotation::whole) {
      rotate_rows<kLanes>(x_, lane_, kDim);
    } else {
      rotate_rows<kLanes>(x_, lane_, out_.hadamard_group);
    }
    find_most<kRotation == Rotation::whole, kCareful>(most);
    return share_most(most);
  }

  PANTILE_DEVICE int row_of(int pass) const { return pass * kRowsPerPass + row_; }
  PANTILE_DEVICE int chunk_of(int i) const { return lane_ + kLanes * i; }

  template <bool kWhole>
  PANTILE_DEVICE void load() {
    Chunk<kDType> raw[kPasses][4];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int64_t first =
          block_.element + row_of(pass) * side_.sequences.seq_stride + 8 * lane_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        raw[pass][i].load(side_.data, first + 8 * kLanes * i,
                          row_of(pass) < block_.rows && (kWhole || 8 * chunk_of(i) < side_.dim));
      }
    }
    if constexpr (kDType != DType::e4m3) {
      if (out_.hadamard_group > 1) {
        change_signs(raw);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        x_[pass][k] = raw[pass][k / 8].element(k % 8);
      }
    }
  }

  PANTILE_DEVICE void change_signs(Chunk<kDType> (&raw)[kPasses][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(kSignPairs.pairs)[chunk_of(i)];
      const std::uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int w = 0; w < Chunk<kDType>::kWords; ++w) {
          if constexpr (kDType == DType::f32) {
            const std::uint32_t pair = pairs[w / 2];
            raw[pass][i].words[w] ^= (w % 2 == 0 ? pair << 16 : pair) & 0x80000000u;
          } else {
            raw[pass][i].words[w] ^= pairs[w];
          }
        }
      }
    }
  }

  PANTILE_DEVICE void multiply(float factor) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        x_[pass][k] *= factor;
      }
    }
  }

  // K: less the mean. Q: only the product with the mean, for LSE.
  PANTILE_DEVICE void smooth() {
    const float* mean = out_.mean + std::int64_t{mean_row_} * side_.dim;
    const bool is_query = out_.dot_mean != nullptr;
    float dot[kPasses] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Chunk<DType::f32> m;
      m.load(mean, 8 * chunk_of(i), 8 * chunk_of(i) < side_.dim);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const bool subtract = !is_query && row_of(pass) < block_.rows;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& x = x_[pass][8 * i + e];
          dot[pass] = fmaf(x, m.element(e), dot[pass]);
          x = subtract ? __fsub_rn(x, m.element(e)) : x;
        }
      }
    }
    if (is_query) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int o = kLanes / 2; o > 0; o /= 2) {
          dot[pass] += __shfl_xor_sync(prim::kAllLanes, dot[pass], o);
        }
        if (lane_ == 0) {
          out_.dot_mean[block_.index * core::kBlockedRows + row_of(pass)] = dot[pass];
        }
      }
    }
  }

  // Largest magnitude of each pass. Infinite if something is not finite (of rotated
  // rows then all of a group is: one channel a chunk tells); or, careful, without what is not
  // finite, which becomes NaN.
  template <bool kWhole, bool kCareful>
  PANTILE_DEVICE void find_most(float (&most)[kPasses]) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float m = 0.0f, probe = 0.0f;
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        float& x = x_[pass][k];
        if constexpr (kCareful) {
          m = core::raise_amax(m, x);
          x = core::is_finite(x) ? x : __int_as_float(0x7fffffff);
        } else {
          m = fmaxf(m, fabsf(x));
          if (k % 8 == 0) {
            probe = fmaf(x, 0.0f, probe);
          }
        }
      }
      if (!kWhole && !kCareful && out_.hadamard_group == 1) {
#pragma unroll
        for (int k = 0; k < 32; ++k) {
          probe = fmaf(x_[pass][k], 0.0f, probe);
        }
      }
      if (probe != 0.0f) {
        m = INFINITY;
      }
      most[pass] = m;
    }
  }

  // Of a warp's entry in Shared: its rows never are in both halves.
  static PANTILE_DEVICE int half_of(int entry) { return entry / (kPasses * kWarps / 2); }

  // Makes `most` that of all rows which share a scale. Returns that of the whole block. Magnitudes
  // are compared as integers, which the warp does in one instruction.
  PANTILE_DEVICE float share_most(float (&most)[kPasses]) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned warp_most = __reduce_max_sync(prim::kAllLanes, __float_as_uint(most[pass]));
      if (prim::lane_index() == 0) {
        s_.most[pass * kWarps + warp] = warp_most;
      }
    }
    __syncthreads();
    const int entry = prim::lane_index();
    const unsigned one = entry < kPasses * kWarps ? s_.most[entry] : 0;
    const float all = __uint_as_float(__reduce_max_sync(prim::kAllLanes, one));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (out_.scale_rows == core::kBlockedRows) {
        most[pass] = all;
      } else if (out_.scale_rows == kHalfRows) {
        const bool mine = half_of(entry) == half_of(pass * kWarps + warp);
        most[pass] = __uint_as_float(__reduce_max_sync(prim::kAllLanes, mine ? one : 0));
      } else {
#pragma unroll
        for (int o = 1; o < kLanes; o *= 2) {
          most[pass] = fmaxf(most[pass], __shfl_xor_sync(prim::kAllLanes, most[pass], o));
        }
      }
    }
    return all;
  }

  // `factor`: still to be multiplied with.
  template <bool kCareful>
  PANTILE_DEVICE void write(const float (&most)[kPasses], float factor) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const core::BlockScale scale = core::block_scale(most[pass] * factor, out_.limit);
      write_scale(pass, scale);
      const float by = scale.inverse * factor;
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        x_[pass][k] *= by;
      }
      if constexpr (kCareful) {
#pragma unroll
        for (int k = 0; k < 32; ++k) {
          const float x = x_[pass][k];
          x_[pass][k] = core::is_finite(x) ? core::clamp(x, -out_.limit, out_.limit) : x;
        }
      }
      write_codes(pass);
    }
  }

  PANTILE_DEVICE void write_scale(int pass, const core::BlockScale& scale) {
    const int row = row_of(pass);
    if (lane_ == 0 && row % out_.scale_rows == 0 && row < block_.rows) {
      const float descale = out_.descale != nullptr ? out_.descale[mean_row_] : 1.0f;
      // Rows are numbered in 32 bits (the plan sees to it).
      const int group =
          (static_cast<int>(block_.index) * core::kBlockedRows + row) / out_.scale_rows;
      const float stored =
          scale.scale < out_.scale_bound ? scale.scale * out_.scale_factor : core::kLargestPower;
      out_.scales[std::int64_t{group} * out_.scale_stride] = stored * descale;
    }
  }

  PANTILE_DEVICE void write_codes(int pass) {
    const bool exists = row_of(pass) < block_.rows;  // zeros that changed sign are not zero codes
    const int columns = core::round_up(side_.dim, core::kCodeAlign);
    std::uint8_t* row =
        out_.codes + (block_.index * core::kBlockedRows + row_of(pass)) * columns + 8 * lane_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &x_[pass][8 * i];
      const uint2 codes{prim::pack_e4m3(x[0], x[1], x[2], x[3]),
                        prim::pack_e4m3(x[4], x[5], x[6], x[7])};
      if (8 * chunk_of(i) < columns) {
        const bool real = exists && 8 * chunk_of(i) < side_.dim;
        *reinterpret_cast<uint2*>(row + 8 * kLanes * i) = real ? codes : uint2{0, 0};
      }
    }
  }

  const QuantizeSide& side_;
  const RowsOutput& out_;
  const RowBlock& block_;
  Shared& s_;
  int lane_, row_;  // of this thread: lane among those of its row, row within a pass
  int mean_row_;
  float x_[kPasses][32];
};

}  // namespace pantile::common
