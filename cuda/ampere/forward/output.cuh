// The end of a block of the forward: O, by way of the warps' own rows of Q's buffer or in fp32
// straight from registers, its low bits, LSE and the largest logit.
#pragma once

#include <cstdint>

#include "ampere/forward/params.cuh"
#include "ampere/forward/softmax.cuh"
#include "ampere/forward/variant.cuh"
#include "ampere/storage.cuh"
#include "attn/max_logit.cuh"
#include "common/quad_transpose.cuh"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/low_bits.cuh"
#include "prim/special_registers.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::ampere {

template <class Config, DType kDType, class Variant>
class ForwardOutput {
  using Storage = SummedStorage<Config>;
  using Softmax = SoftmaxRows<Config, kDType, Variant::kAdds>;
  using VRows = tile::SwizzledRows<Config::kHeadDimV>;
  static constexpr int kRowTiles = Config::kRowTiles;

 public:
  PANTILE_DEVICE ForwardOutput(const ForwardParams& params, Storage& storage, Softmax& softmax)
      : params_(params), storage_(storage), softmax_(softmax) {}

  // All copies have landed and every warp is past its last S, so each may overwrite its own rows of
  // Q. Rows past the sequence's length, as far as the tensor has them, are those of an empty row.
  // keep_scale: of dropout.
  PANTILE_DEVICE void store(float keep_scale) {
    const ForwardWork work = storage_.work;
    const int thread = prim::fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread / 32 * Config::kWarpRows;
    const int first = work.row0 + warp_row;
    char* const rows = reinterpret_cast<char*>(storage_.q + warp_row * Config::kHeadDim);
    float* const lse = lse_rows(work);
    int largest = attn::kSmallestLogit;
    softmax_.take_earlier_sums(storage_.earlier_sums);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float normaliser[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        softmax_.finish_row(m, r);
        float sink = 0.0f;
        float sink_weight = 0.0f;
        if (params_.sinks != nullptr) {
          sink = params_.sinks[work.head];
          sink_weight = softmax_.sink_weight(m, r, sink);
        }
        normaliser[r] = softmax_.normaliser(m, r, sink_weight);
        if constexpr (Variant::kDrops) {
          normaliser[r] *= keep_scale;
        }
        const int row = m * 16 + r * 8 + lane / 4;
        if (params_.output_f32) {
          store_float32(work, first + row, m, r, normaliser[r]);
        }
#pragma unroll
        for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
          *reinterpret_cast<std::uint32_t*>(rows + VRows::offset(row, j) + lane % 4 * 4) =
              prim::pack<kDType>(softmax_.o[m][j][2 * r] * normaliser[r],
                                 softmax_.o[m][j][2 * r + 1] * normaliser[r]);
        }
        if (first + row < work.sequence.length) {
          largest = max(largest, softmax_.max_logit(m, r, params_.references));
        }
        if (lse != nullptr && lane % 4 == 0 && first + row < work.sequence.allocated) {
          lse[first + row] = first + row >= work.sequence.length ? -INFINITY
                             : sink_weight == INFINITY ? sink
                                                       : softmax_.log_sum_exp(m, r, sink_weight);
        }
      }
      if (params_.o_low != nullptr) {
        store_low_bits(work, first + m * 16 + lane / 4, m, normaliser);
      }
    }
    if (params_.max_logit != nullptr) {
      attn::raise_max_logit(
          params_.max_logit + work.sequence.batch * std::int64_t{params_.heads_q} + work.head,
          largest);
    }
    if (params_.output_f32) {
      return;
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

  // This lane's part of a row of O, in fp32 and straight to global memory.
  PANTILE_DEVICE void store_float32(const ForwardWork& work, int row, int m, int r,
                                    float normaliser) const {
    if (row >= work.sequence.allocated) {
      return;
    }
    const Operand& o = params_.o;
    const int column = prim::lane_index() % 4 * 2;
    float* const to = static_cast<float*>(o.data) + work.sequence.batch * o.batch +
                      (work.sequence.first + row) * o.seq + work.head * o.head + column;
    const bool used = row < work.sequence.length;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
      if (8 * j < params_.head_dim_v) {
        *reinterpret_cast<float2*>(to + 8 * j) =
            used ? make_float2(softmax_.o[m][j][2 * r] * normaliser,
                               softmax_.o[m][j][2 * r + 1] * normaliser)
                 : make_float2(0.0f, 0.0f);
      }
    }
  }

  // What the 16-bit O lacks in two rows, 8 apart; `row`: the upper one, in the sequence. The lanes
  // of a quad hold two columns of every eight, and trade them so that each writes eight
  // neighbouring bytes of both rows, a quad one sector.
  PANTILE_DEVICE void store_low_bits(const ForwardWork& work, int row, int m,
                                     const float (&normaliser)[2]) const {
    static_assert(Config::kHeadDimV % 32 == 0);
    const std::int64_t rows_before =
        params_.lse_packed ? work.sequence.first : work.sequence.batch * params_.lse_head_stride;
    const std::int64_t row_bytes = std::int64_t{params_.heads_q} * params_.head_dim_v;
    const int column = prim::fresh_thread_index() % 4 * 8;
    std::int8_t* const to = params_.o_low + (rows_before + row) * row_bytes +
                            std::int64_t{work.head} * params_.head_dim_v + column;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; j += 4) {
      std::uint32_t words[4];  // two columns of the upper row, then of the lower one
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = softmax_.o[m][j + i];
        words[i] = prim::low_bits<kDType>(x[2] * normaliser[1], x[3] * normaliser[1], 0);
        words[i] = prim::low_bits<kDType>(x[0] * normaliser[0], x[1] * normaliser[0], words[i]);
      }
      common::quad_transpose(words);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned pick = r == 0 ? 0x5410 : 0x7632;
        if (row + 8 * r < work.sequence.length && 8 * j + column < params_.head_dim_v) {
          *reinterpret_cast<uint2*>(to + 8 * r * row_bytes + 8 * j) = make_uint2(
              __byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick));
        }
      }
    }
  }

  const ForwardParams& params_;
  Storage& storage_;
  Softmax& softmax_;
};

}  // namespace pantile::ampere
