// Blocks of V of the FP8 quantiser: scale, round, transpose. A channel's 128 keys become
// neighbours, permuted within groups of 16 (core::value_column), so that the attention kernel needs
// neither a transpose nor a shuffle.
//
// A thread takes the four keys that make one word of a channel, for eight channels; the words cross
// shared memory to become rows of 128 bytes. The XOR with the chunk's number keeps both the writes
// (a word a lane) and the reads (four words a lane) free of bank conflicts.
#pragma once

#include "common/quantize_load.cuh"
#include "core/scaling.h"
#include "prim/warp.cuh"

namespace pantile::common {

struct ValuesOutput {
  std::uint8_t* codes;       // [heads, blocks, dim, 128]
  float* scales;             // [heads, blocks], scale_stride apart
  std::uint32_t* nonfinite;  // [heads, blocks, dim, 4]
  const float* descale;      // [batch, heads] or null
  int scale_stride;
};

template <DType kDType, int kDim>
class ValueQuantizer {
 public:
  static constexpr int kThreads = kDim == 256 ? 512 : 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunks = kDim / 8;         // of a row; as many lanes work on a word
  static constexpr int kWarpWords = 32 / kChunks;  // key words that a warp works on at a time
  static constexpr int kWords = core::kBlockedRows / 4;
  static constexpr int kPasses = kWords / (kWarps * kWarpWords);

  struct Shared {
    alignas(16) std::uint32_t words[kDim * kWords];
    std::uint32_t nonfinite[kDim][4];
    unsigned most[2][kWarps];  // the bits of floats
  };

  PANTILE_DEVICE ValueQuantizer(const QuantizeSide& side, const ValuesOutput& out,
                                const RowBlock& block, Shared& shared)
      : side_(side), out_(out), block_(block), s_(shared), chunk_(prim::lane_index() % kChunks) {}

  PANTILE_DEVICE void run() {
    load();
    float most = share_most(find_most(), 0);
    const bool careful = most > core::kLargestFloat;
    if (careful) {
      clear_marks();
      most = share_most(find_finite_most(), 1);
      mark_nonfinite();
    }
    const core::BlockScale scale = core::block_scale(most, core::kE4m3Max);
    if (threadIdx.x == 0) {
      const float descale =
          out_.descale != nullptr ? out_.descale[block_.batch * side_.heads + block_.head] : 1.0f;
      const float stored = core::stored_value_scale(scale, most, descale);
      out_.scales[block_.index * out_.scale_stride] = careful ? -stored : stored;
    }
    if (careful) {
      transpose<true>(scale.inverse);
    } else {
      transpose<false>(scale.inverse);
    }
    __syncthreads();
    write_codes();
    if (careful) {
      write_marks();
    }
  }

 private:
  // Word of a channel: columns 4 word .. 4 word + 3.
  PANTILE_DEVICE int word_of(int pass) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return pass * kWarps + warp + kWords / kWarpWords * (prim::lane_index() / kChunks);
  }

  PANTILE_DEVICE void load() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = core::value_key(4 * word_of(pass) + r);
        raw_[pass][r].load(side_.data,
                           block_.element + key * side_.sequences.seq_stride + 8 * chunk_,
                           key < block_.rows && 8 * chunk_ < side_.dim);
      }
    }
  }

  // Infinite if something is not finite.
  PANTILE_DEVICE float find_most() const {
    float most = 0.0f, probe = 0.0f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const float x = raw_[pass][k / 8].element(k % 8);
        most = fmaxf(most, fabsf(x));
        probe = fmaf(x, 0.0f, probe);
      }
    }
    return probe != 0.0f ? INFINITY : most;
  }

  PANTILE_DEVICE float find_finite_most() const {
    float most = 0.0f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        most = core::raise_amax(most, raw_[pass][k / 8].element(k % 8));
      }
    }
    return most;
  }

  // Over the block. Magnitudes are compared as integers, which the warp does in one instruction.
  PANTILE_DEVICE float share_most(float most, int place) {
    const unsigned warp_most = __reduce_max_sync(prim::kAllLanes, __float_as_uint(most));
    if (prim::lane_index() == 0) {
      s_.most[place][threadIdx.x / 32] = warp_most;
    }
    __syncthreads();
    const int entry = prim::lane_index();
    return __uint_as_float(
        __reduce_max_sync(prim::kAllLanes, entry < kWarps ? s_.most[place][entry] : 0));
  }

  // share_most() comes between this and the marks.
  PANTILE_DEVICE void clear_marks() {
    for (int i = static_cast<int>(threadIdx.x); i < 4 * kDim; i += kThreads) {
      s_.nonfinite[i / 4][i % 4] = 0;
    }
  }

  PANTILE_DEVICE void mark_nonfinite() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = core::value_key(4 * word_of(pass) + r);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (!core::is_finite(raw_[pass][r].element(e))) {
            atomicOr(&s_.nonfinite[8 * chunk_ + e][key / 32], 1u << (key % 32));
          }
        }
      }
    }
  }

  template <bool kCareful>
  PANTILE_DEVICE void transpose(float inverse) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float x[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          x[r] = raw_[pass][r].element(e);
          if (kCareful && !core::is_finite(x[r])) {
            x[r] = 0.0f;
          }
          x[r] *= inverse;
        }
        s_.words[(8 * chunk_ + e) * kWords + (word_of(pass) ^ chunk_)] =
            prim::pack_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
  }

  PANTILE_DEVICE void write_codes() {
    std::uint8_t* to = out_.codes + block_.index * side_.dim * core::kBlockedRows;
#pragma unroll
    for (int i = 0; i < kDim * 8 / kThreads; ++i) {
      const int id = i * kThreads + static_cast<int>(threadIdx.x);
      const int channel = id / 8, part = id % 8, chunk = channel / 8;
      uint4 w =
          *reinterpret_cast<const uint4*>(s_.words + channel * kWords + 4 * (part ^ (chunk >> 2)));
      if ((chunk & 1) != 0) {
        w = uint4{w.y, w.x, w.w, w.z};
      }
      if ((chunk & 2) != 0) {
        w = uint4{w.z, w.w, w.x, w.y};
      }
      if (channel < side_.dim) {
        *reinterpret_cast<uint4*>(to + std::int64_t{id} * 16) = w;
      }
    }
  }

  PANTILE_DEVICE void write_marks() {
    std::uint32_t* to = out_.nonfinite + block_.index * side_.dim * 4;
    for (int i = static_cast<int>(threadIdx.x); i < 4 * side_.dim; i += kThreads) {
      to[i] = s_.nonfinite[i / 4][i % 4];
    }
  }

  const QuantizeSide& side_;
  const ValuesOutput& out_;
  const RowBlock& block_;
  Shared& s_;
  int chunk_;  // of channels
  Chunk<kDType> raw_[kPasses][4];
};

}  // namespace pantile::common
