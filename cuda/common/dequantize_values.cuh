// Blocks of codes of V as numbers again: transposed back to rows, code times scale. The words cross
// shared memory as in the quantiser (quantize_values.cuh), the other way. Values that were not
// finite have the code 0 and stay 0.
#pragma once

#include "common/dequantize_rows.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

template <DType kDType, int kDim>
class ValueDequantizer {
 public:
  static constexpr int kThreads = kDim == 256 ? 512 : 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunks = kDim / 8;         // of a row; as many lanes work on a word
  static constexpr int kWarpWords = 32 / kChunks;  // key words that a warp works on at a time
  static constexpr int kWords = core::kBlockedRows / 4;
  static constexpr int kPasses = kWords / (kWarps * kWarpWords);

  struct Shared {
    alignas(16) std::uint32_t words[kDim * kWords];
  };

  PANTILE_DEVICE ValueDequantizer(const QuantizeSide& side, const NumbersOutput& out,
                                  const RowBlock& block, Shared& shared)
      : side_(side), out_(out), block_(block), s_(shared), chunk_(prim::lane_index() % kChunks) {}

  PANTILE_DEVICE void run() {
    read_codes();
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      store(word_of(pass));
    }
  }

 private:
  // Word of a channel: columns 4 word .. 4 word + 3.
  PANTILE_DEVICE int word_of(int pass) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return pass * kWarps + warp + kWords / kWarpWords * (prim::lane_index() / kChunks);
  }

  // The XOR with the chunk's number keeps the writes (four words a lane) and the reads (a word a
  // lane) free of bank conflicts.
  PANTILE_DEVICE void read_codes() {
    const std::uint8_t* from = out_.codes + block_.index * side_.dim * core::kBlockedRows;
#pragma unroll
    for (int i = 0; i < kDim * 8 / kThreads; ++i) {
      const int id = i * kThreads + static_cast<int>(threadIdx.x);
      const int channel = id / 8, part = id % 8, chunk = channel / 8;
      uint4 w = channel < side_.dim
                    ? __ldg(reinterpret_cast<const uint4*>(from + std::int64_t{id} * 16))
                    : uint4{0, 0, 0, 0};
      if ((chunk & 2) != 0) {
        w = uint4{w.z, w.w, w.x, w.y};
      }
      if ((chunk & 1) != 0) {
        w = uint4{w.y, w.x, w.w, w.z};
      }
      *reinterpret_cast<uint4*>(s_.words + channel * kWords + 4 * (part ^ (chunk >> 2))) = w;
    }
  }

  // Four keys, of eight channels each.
  PANTILE_DEVICE void store(int word) {
    std::uint32_t codes[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      codes[e] = s_.words[(8 * chunk_ + e) * kWords + (word ^ chunk_)];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int key = core::value_key(4 * word + r);
      if (key < block_.rows && 8 * chunk_ < side_.dim) {
        const int group =
            (static_cast<int>(block_.index) * core::kBlockedRows + key) / out_.scale_rows;
        const float scale = fabsf(out_.scales[std::int64_t{group} * out_.scale_stride]);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const std::uint32_t pair = prim::unpack_e4m3(codes[e] >> (r / 2 * 16));
          x[e] = (r % 2 == 0 ? prim::low_float(pair) : prim::high_float(pair)) * scale;
        }
        store_chunk<kDType>(out_.data,
                            block_.element + key * side_.sequences.seq_stride + 8 * chunk_, x);
      }
    }
  }

  const QuantizeSide& side_;
  const NumbersOutput& out_;
  const RowBlock& block_;
  Shared& s_;
  int chunk_;  // of channels
};

}  // namespace pantile::common
