// Blocks of Q and K of the FP8 quantiser: smooth, rotate, find the scales, round. Everything is one
// rounded float operation in the order of core/hadamard.h and core/scaling.h, so that the CPU gives
// the same bits; only the factor 1/group waits until after the sums (it is a power of two), and
// blocks whose sums overflow or that hold NaN are done again with it first.
//
// kDim: 64, 128 or 256, at least the head dim. kDim / 32 lanes share a row; lane r holds the chunks
// r, r + lanes, r + 2 lanes and r + 3 lanes of eight channels each.
#pragma once

#include "common/quantize_load.cuh"
#include "core/hadamard.h"
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
  const float* mean;     // [batch, heads_k, dim] or null
  float* dot_mean;       // Q: [heads, 128 blocks], rows times mean; K: null, mean is subtracted
  int heads_per_mean;    // heads that share a mean and a descale
  int hadamard_group;    // 1: no rotation
  float group_inverse;   // 1 / hadamard_group
  std::uint32_t signs[core::kMaxRotatedDim / 32];  // core::hadamard_sign_word
  float limit;                                     // largest code
};

template <DType kDType, int kDim>
class RowQuantizer {
 public:
  static constexpr int kLanes = kDim / 32;
  static constexpr int kThreads = kDim == 64 ? 256 : 512;
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static constexpr int kPasses = core::kBlockedRows / kRowsPerPass;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kHalfRows = core::kBlockedRows / 2;

  struct Shared {
    float most[2][kWarps];  // of the rows 0-63 and 64-127
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
    float before = 1.0f, after = out_.group_inverse;
    bool careful = false;
#pragma unroll 1
    while (true) {
      load();
      prepare(before);
      if (careful) {
        find_most<true>(most);
      } else {
        find_most<false>(most);
      }
      if (share_most(most) <= core::kLargestFloat || careful) {
        break;
      }
      before = after;
      after = 1.0f;
      careful = true;
      __syncthreads();
    }
    write(most, after, careful);
  }

 private:
  PANTILE_DEVICE int row_of(int pass) const { return pass * kRowsPerPass + row_; }
  PANTILE_DEVICE int chunk_of(int i) const { return lane_ + kLanes * i; }

  PANTILE_DEVICE void load() {
    Chunk<kDType> raw[kPasses][4];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int64_t first = block_.element + row_of(pass) * side_.sequences.seq_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        raw[pass][i].clear();
        if (row_of(pass) < block_.rows && 8 * chunk_of(i) < side_.dim) {
          raw[pass][i].load(side_.data, first + 8 * chunk_of(i));
        }
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

  // `factor`: of every element, before the sums.
  PANTILE_DEVICE void prepare(float factor) {
    if (out_.mean != nullptr) {
      smooth();
    }
    if (out_.hadamard_group > 1) {
      change_signs(factor);
      rotate();
    }
  }

  PANTILE_DEVICE void smooth() {
    const float* mean = out_.mean + std::int64_t{mean_row_} * side_.dim;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool exists = row_of(pass) < block_.rows;
      float dot = 0.0f;
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const int channel = 8 * chunk_of(k / 8) + k % 8;
        const float m = channel < side_.dim ? __ldg(mean + channel) : 0.0f;
        if (out_.dot_mean != nullptr) {
          dot = fmaf(x_[pass][k], m, dot);
        } else if (exists) {
          x_[pass][k] = __fsub_rn(x_[pass][k], m);
        }
      }
      if (out_.dot_mean != nullptr) {
#pragma unroll
        for (int o = kLanes / 2; o > 0; o /= 2) {
          dot += __shfl_xor_sync(prim::kAllLanes, dot, o);
        }
        if (lane_ == 0) {
          out_.dot_mean[block_.index * core::kBlockedRows + row_of(pass)] = dot;
        }
      }
    }
  }

  PANTILE_DEVICE void change_signs(float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t signs = out_.signs[chunk_of(i) / 4] >> (chunk_of(i) % 4 * 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float sign = __uint_as_float((signs >> e & 1u) << 31 | 0x3f800000u);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          x_[pass][8 * i + e] *= sign * factor;
        }
      }
    }
  }

  // Distances ascend: inside a chunk, then between lanes, then between the chunks of a lane.
  PANTILE_DEVICE void rotate() {
    const int group = out_.hadamard_group;
    for_each_pair<1>();
    if (group > 2) {
      for_each_pair<2>();
    }
    if (group > 4) {
      for_each_pair<4>();
    }
#pragma unroll
    for (int o = 1; o < kLanes; o *= 2) {
      if (group > 8 * o) {
        const float sign = (lane_ & o) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
          for (int k = 0; k < 32; ++k) {
            const float other = __shfl_xor_sync(prim::kAllLanes, x_[pass][k], o);
            x_[pass][k] = fmaf(x_[pass][k], sign, other);  // exact product: one rounding
          }
        }
      }
    }
    if (group > 8 * kLanes) {
      for_each_pair<8>();
    }
    if (group > 16 * kLanes) {
      for_each_pair<16>();
    }
  }

  template <int kDistance>
  PANTILE_DEVICE void for_each_pair() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        if ((k & kDistance) == 0) {
          const float a = x_[pass][k], b = x_[pass][k + kDistance];
          x_[pass][k] = __fadd_rn(a, b);
          x_[pass][k + kDistance] = __fsub_rn(a, b);
        }
      }
    }
  }

  // Largest magnitude of each pass, over its row. Infinite if something is not finite; or, careful,
  // without what is not finite, which becomes NaN.
  template <bool kCareful>
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
          probe = fmaf(x, 0.0f, probe);
        }
      }
      if (probe != 0.0f) {
        m = INFINITY;
      }
#pragma unroll
      for (int o = 1; o < kLanes; o *= 2) {
        m = fmaxf(m, __shfl_xor_sync(prim::kAllLanes, m, o));
      }
      most[pass] = m;
    }
  }

  // Half of the block that a pass of this warp works on; its rows never are in both.
  PANTILE_DEVICE int half_of(int pass) const { return row_of(pass) / kHalfRows; }

  // Makes `most` that of all rows which share a scale. Returns that of the whole block.
  PANTILE_DEVICE float share_most(float (&most)[kPasses]) {
    float halves[2] = {0.0f, 0.0f};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float m = most[pass];
#pragma unroll
      for (int o = kLanes; o < 32; o *= 2) {
        m = fmaxf(m, __shfl_xor_sync(prim::kAllLanes, m, o));
      }
      halves[0] = half_of(pass) == 0 ? fmaxf(halves[0], m) : halves[0];
      halves[1] = half_of(pass) == 1 ? fmaxf(halves[1], m) : halves[1];
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (prim::lane_index() == 0) {
      s_.most[0][warp] = halves[0];
      s_.most[1][warp] = halves[1];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        halves[h] = fmaxf(halves[h], s_.most[h][w]);
      }
    }
    const float all = fmaxf(halves[0], halves[1]);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (out_.scale_rows == core::kBlockedRows) {
        most[pass] = all;
      } else if (out_.scale_rows == kHalfRows) {
        most[pass] = half_of(pass) == 0 ? halves[0] : halves[1];
      }
    }
    return all;
  }

  // `factor`: still to be multiplied with.
  PANTILE_DEVICE void write(const float (&most)[kPasses], float factor, bool careful) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const core::BlockScale scale = core::block_scale(most[pass] * factor, out_.limit);
      write_scale(pass, scale);
      const float by = scale.inverse * factor;
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        x_[pass][k] *= by;
      }
      if (careful) {
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
    const int columns = core::round_up(side_.dim, core::kCodeAlign);
    std::uint8_t* row = out_.codes + (block_.index * core::kBlockedRows + row_of(pass)) * columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * chunk_of(i) < columns) {
        const float* x = &x_[pass][8 * i];
        *reinterpret_cast<uint2*>(row + 8 * chunk_of(i)) =
            uint2{prim::pack_e4m3(x[0], x[1], x[2], x[3]), prim::pack_e4m3(x[4], x[5], x[6], x[7])};
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
