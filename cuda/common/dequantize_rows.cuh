// Blocks of codes of Q and K as numbers again: code times scale, rotated back. The lanes of a row
// and their chunks are those of the quantiser (quantize_rows.cuh).
#pragma once

#include "common/quantize_load.cuh"
#include "common/rotate_rows.cuh"
#include "core/scaling.h"
#include "prim/convert.cuh"

namespace pantile::common {

// Where the numbers of Q, K or V go.
struct NumbersOutput {
  void* data;
  const std::uint8_t* codes;
  const float* scales;  // one each scale_rows rows, scale_stride apart
  int scale_rows;       // 1, 64 or 128
  int scale_stride;
  int hadamard_group;  // Q and K; 1: no rotation
  float factor;        // what the scales hold too much of, for Q 1 / hadamard_group
};

// The largest finite number of f16 in place of what would round to infinity; NaN stays.
template <DType kDType>
PANTILE_DEVICE float representable(float x) {
  constexpr float kLargest = 65504.0f;
  if constexpr (kDType == DType::f16) {
    return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
  }
  return x;
}

// Eight neighbouring elements.
template <DType kDType>
PANTILE_DEVICE void store_chunk(void* tensor, std::int64_t element, const float* x) {
  auto* to = static_cast<unsigned char*>(tensor) + element * dtype_bytes(kDType);
  if constexpr (kDType == DType::f32) {
    reinterpret_cast<float4*>(to)[0] = float4{x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(to)[1] = float4{x[4], x[5], x[6], x[7]};
  } else {
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] =
          prim::pack<kDType>(representable<kDType>(x[2 * w]), representable<kDType>(x[2 * w + 1]));
    }
    *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
  }
}

template <DType kDType, int kDim>
class RowDequantizer {
 public:
  static constexpr int kLanes = kDim / 32;
  static constexpr int kThreads = kDim == 256 ? 512 : 256;
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static constexpr int kPasses = core::kBlockedRows / kRowsPerPass;

  PANTILE_DEVICE RowDequantizer(const QuantizeSide& side, const NumbersOutput& out,
                                const RowBlock& block)
      : side_(side),
        out_(out),
        block_(block),
        lane_(static_cast<int>(threadIdx.x) % kLanes),
        row_(static_cast<int>(threadIdx.x) / kLanes) {}

  // Pass by pass: a thread holds one row's chunks, and few registers leave room for many blocks,
  // whose loads overlap.
  PANTILE_DEVICE void run() {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kRowsPerPass + row_;
      load(row);
      if (out_.hadamard_group > 1) {
        rotate_rows<kLanes>(x_, lane_, out_.hadamard_group);
        change_signs();
      }
      if (row < block_.rows) {
        store(row);
      }
    }
  }

 private:
  PANTILE_DEVICE int chunk_of(int i) const { return lane_ + kLanes * i; }

  PANTILE_DEVICE void load(int row) {
    const int columns = core::round_up(side_.dim, core::kCodeAlign);
    const std::int64_t first = (block_.index * core::kBlockedRows + row) * columns + 8 * lane_;
    Chunk<DType::e4m3> raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw[i].load(out_.codes, first + 8 * kLanes * i,
                  row < block_.rows && 8 * chunk_of(i) < side_.dim);
    }
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      x_[0][k] = raw[k / 8].element(k % 8);
    }
  }

  PANTILE_DEVICE void change_signs() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(kSignPairs.pairs)[chunk_of(i)];
      const std::uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const std::uint32_t sign = (e % 2 == 0 ? pairs[e / 2] << 16 : pairs[e / 2]) & 0x80000000u;
        float& x = x_[0][8 * i + e];
        x = __uint_as_float(__float_as_uint(x) ^ sign);
      }
    }
  }

  PANTILE_DEVICE float scale_of(int row) const {
    const int group = (static_cast<int>(block_.index) * core::kBlockedRows + row) / out_.scale_rows;
    return out_.scales[std::int64_t{group} * out_.scale_stride] * out_.factor;
  }

  PANTILE_DEVICE void store(int row) {
    const float scale = scale_of(row);
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      x_[0][k] *= scale;
    }
    const std::int64_t first = block_.element + row * side_.sequences.seq_stride + 8 * lane_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * chunk_of(i) < side_.dim) {
        store_chunk<kDType>(out_.data, first + 8 * kLanes * i, &x_[0][8 * i]);
      }
    }
  }

  const QuantizeSide& side_;
  const NumbersOutput& out_;
  const RowBlock& block_;
  int lane_, row_;  // of this thread: lane among those of its row, row within a pass
  float x_[1][32];
};

}  // namespace pantile::common
