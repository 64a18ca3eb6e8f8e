// Before the main backward kernel: per row the two terms that its products start from, and zeros in
// the sum of dQ. In deterministic mode also the unit of the integers that dQ is summed as. Further
// blocks before those for rows look at the means of the keys.
//
//   lse term    -lse / scale            S^T starts from it, so that P = exp2(S * scale * log2 e);
//                                       behind it the row's integer scale and its slot in row_max
//   delta term  dLSE - rowsum(dO * O)   dP^T starts from it, so that dS = P * dP
//
// One block at least runs, even without rows: the main kernel's work counter starts here.
//
// Terms are cut into three bf16 (prim/wgmma_row_terms.cuh). Rows past the end of a sequence, and
// rows whose scores are all -inf, get an lse term that makes P zero.
#pragma once

#include "common/backward_key_bounds.cuh"
#include "common/backward_key_means.cuh"
#include "common/backward_rows.cuh"
#include "core/softmax_state.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/low_bits.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

struct PrepareParams {
  RowPass pass;
  const void* o;       // [queries, heads_q, head_dim_v]
  const void* grad_o;  // the same
  Layout o_layout, grad_o_layout;
  KeyMeanParams keys;
  int key_mean_blocks;       // key heads of all sequences, or 0: the means are not wanted
  const std::int8_t* o_low;  // contiguous, shape of o: what rounding took from it; or null
  std::int64_t seqlen_q;     // dense: rows of o_low a sequence
  int head_dim_v;
  int* claimed;           // the main kernel's work counter, set to 0
  const float* lse;       // [batch][heads_q][seqlen_q], packed [heads_q][total_q]
  const float* grad_lse;  // the same, or null
  std::int64_t lse_head_stride, lse_batch_stride;
};

inline constexpr int kPrepareThreads = kMeanThreads;

// x = hi + mid + lo, each a bf16; exact to 24 bits.
PANTILE_DEVICE uint4 split_term(float x) {
  const auto round = [](float y) {
    return prim::unpack<DType::bf16>(prim::pack<DType::bf16>(y, 0)).x;
  };
  const float hi = round(x);
  const float mid = round(x - hi);
  return make_uint4(prim::pack<DType::bf16>(hi, mid), prim::pack<DType::bf16>(x - hi - mid, 0.0f),
                    0, 0);
}

// The power of two by which a row of dQ / scale is multiplied before it is rounded to integers
// (core/integer_unit.h), from what is known before the main pass. Zero, from which dQ becomes NaN,
// where the row's numbers or its keys are not finite: integers cannot carry a NaN. A row's scale
// must be finite as two bf16: tensor cores multiply it by 0 beside the term.
PANTILE_DEVICE float integer_scale(const core::KeyBounds& bounds,
                                   const core::Magnitude& grad_o_norm, float delta, float lse) {
  const bool finite = core::is_finite_bits(bounds.max_k) && core::is_finite_bits(bounds.max_v) &&
                      grad_o_norm.mantissa < core::kInfinity && fabsf(delta) < core::kInfinity &&
                      lse < core::kInfinity;
  return finite ? core::unit_scale(core::row_bound(bounds, grad_o_norm, delta)) : 0.0f;
}

// What is known of the keys of the tile's head. Heads with loud keys are measured: every block says
// so that has rows of the head.
template <DType kDType>
PANTILE_DEVICE core::KeyBounds bounds_of_keys(const RowPass& pass, const RowTile& row_tile) {
  core::KeyBounds& shared = pass.key_bounds[key_head_of(pass, row_tile)];
  core::KeyBounds bounds = shared;
  bounds.measured = core::must_be_measured(bounds, kMantissaBits<kDType>) ? 1 : 0;
  if (bounds.measured != 0 && threadIdx.x == 0) {
    shared.measured = 1;
    *pass.measured = 1;
  }
  return bounds;
}

// The same before the pass that measures heads: negative for their rows, whose scale settle_units
// finds.
PANTILE_DEVICE float first_integer_scale(const core::KeyBounds& bounds,
                                         const core::Magnitude& grad_o_norm, float delta,
                                         float lse) {
  return bounds.measured == 0 ? integer_scale(bounds, grad_o_norm, delta, lse)
                              : -integer_scale(core::KeyBounds{}, grad_o_norm, delta, lse);
}

// Zeros in the sums of the tile.
PANTILE_DEVICE void clear_sums(const RowPass& pass, const RowTile& row_tile) {
  const int thread = static_cast<int>(threadIdx.x);
  float4* sum = reinterpret_cast<float4*>(pass.dq_sum + row_tile.index * pass.tile_floats);
#pragma unroll 8
  for (int i = thread; i < pass.tile_floats / 4; i += kPrepareThreads) {
    sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  clear_row_sums(pass, row_tile, kPrepareThreads);
}

// A float whose halves are both finite as bf16, which tensor cores multiply by 0 beside a term:
// where the low half is not, bit 7 is dropped, 2^-16 of the number.
PANTILE_DEVICE std::uint32_t beside_term(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return (bits & 0x7f80u) == 0x7f80u ? bits & ~0x80u : bits;
}

// The terms of a row, which has slot `slot`; `bounds` and `grad_o_norm` only for integers.
template <bool kInteger>
PANTILE_DEVICE void write_terms(const RowPass& pass, std::int64_t slot, float lse, float delta,
                                const core::KeyBounds& bounds, const core::Magnitude& grad_o_norm) {
  uint4 lse_term = lse == -core::kInfinity ? split_term(pass.scale > 0.0f ? -1e30f : 1e30f)
                                           : split_term(-lse / pass.scale);
  if (pass.capped_lse) {
    lse_term.x = __float_as_uint(lse == -core::kInfinity ? 1e30f : lse * core::kLog2E);
  }
  if constexpr (kInteger) {
    lse_term.z = __float_as_uint(first_integer_scale(bounds, grad_o_norm, delta, lse));
    lse_term.w = core::slot_word(static_cast<std::uint32_t>(slot));
    pass.row_max[slot] = 0;
  }
  pass.lse_terms[slot] = lse_term;
  delta *= pass.delta_factor;
  pass.delta_terms[slot] = split_term(-delta);
  if (pass.delta_factor != 1.0f) {
    pass.delta_terms[slot].w = beside_term(-delta);
  }
}

// kRowThreads threads read one row, 16 bytes each; kTileQ rows a block. kInteger: deterministic
// mode, an instance of its own because the norms cost registers.
template <DType kDType, int kTileQ, int kRowThreads, bool kInteger>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ PrepareParams params) {
  constexpr int kRowsAtOnce = kPrepareThreads / kRowThreads;
  constexpr int kRounds = kTileQ / kRowsAtOnce;
  // Rounds on their way at once: more cost blocks a multiprocessor.
  constexpr int kBatch = kRowThreads == 8 ? 1 : 2;
  static_assert(kRounds % kBatch == 0);
  prim::allow_next_grid();
  const RowPass& pass = params.pass;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) {
    *params.claimed = 0;
  }
  const int block = static_cast<int>(blockIdx.x) - params.key_mean_blocks;
  if (block < 0) {
    sample_keys<kDType>(pass, params.keys, static_cast<int>(blockIdx.x));
    prim::wait_for_previous_grid();
    return;
  }
  if (pass.row_tile_count == 0) {
    prim::wait_for_previous_grid();  // for the kernels after this one
    return;
  }
  const RowTile row_tile =
      locate_row_tile(pass, block, static_cast<int>(gridDim.x) - params.key_mean_blocks);
  const int first = row_tile.tile * kTileQ;
  if (first >= row_tile.rows) {
    prim::wait_for_previous_grid();
    return;
  }
  clear_sums(pass, row_tile);

  const bool packed = pass.queries.cu_seqlens != nullptr;
  const int column = thread % kRowThreads * 8;
  const auto* o = static_cast<const std::uint16_t*>(params.o) +
                  sequence_offset(params.o_layout, packed, row_tile) + column;
  const auto* grad_o = static_cast<const std::uint16_t*>(params.grad_o) +
                       sequence_offset(params.grad_o_layout, packed, row_tile) + column;
  const std::int64_t low_row_bytes = std::int64_t{pass.heads_q} * params.head_dim_v;
  const std::int64_t low_rows = packed ? row_tile.sequence : row_tile.batch * params.seqlen_q;
  const std::int8_t* o_low = params.o_low + low_rows * low_row_bytes +
                             std::int64_t{row_tile.head} * params.head_dim_v + column;
  const std::int64_t lse_offset =
      row_tile.head * params.lse_head_stride +
      (packed ? row_tile.sequence : row_tile.batch * params.lse_batch_stride);
#pragma unroll 1
  for (int batch = 0; batch < kRounds; batch += kBatch) {
    const int begin = first + batch * kRowsAtOnce + thread / kRowThreads;
    uint4 o_words[kBatch];
    uint4 grad_words[kBatch];
    uint2 low_words[kBatch];
    float lses[kBatch], grad_lses[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int local = begin + i * kRowsAtOnce;
      const std::int64_t row = row_tile.first_row + local;
      o_words[i] = grad_words[i] = make_uint4(0, 0, 0, 0);
      low_words[i] = make_uint2(0, 0);
      lses[i] = -core::kInfinity;
      grad_lses[i] = 0.0f;
      if (local < row_tile.rows && column == 0) {
        lses[i] = params.lse[lse_offset + row];
        if (params.grad_lse != nullptr) {
          grad_lses[i] = params.grad_lse[lse_offset + row];
        }
      }
      if (local < row_tile.rows && column < params.head_dim_v) {
        // Nothing reads O again: the sums keep their place in L2.
        o_words[i] = __ldcs(reinterpret_cast<const uint4*>(o + row * params.o_layout.seq));
        grad_words[i] = *reinterpret_cast<const uint4*>(grad_o + row * params.grad_o_layout.seq);
        if (params.o_low != nullptr) {
          low_words[i] = __ldcs(reinterpret_cast<const uint2*>(o_low + row * low_row_bytes));
        }
      }
    }

    prim::wait_for_previous_grid();  // bound_keys, if it ran, wrote the bounds
    core::KeyBounds bounds{};
    if constexpr (kInteger) {
      bounds = bounds_of_keys<kDType>(pass, row_tile);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::uint32_t x[4] = {o_words[i].x, o_words[i].y, o_words[i].z, o_words[i].w};
      const std::uint32_t y[4] = {grad_words[i].x, grad_words[i].y, grad_words[i].z,
                                  grad_words[i].w};
      float product = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const std::uint32_t low = k < 2 ? low_words[i].x : low_words[i].y;
        const float2 a = prim::with_low_bits<kDType>(x[k], low, k % 2 * 2);
        const float2 b = prim::unpack<kDType>(y[k]);
        product += a.x * b.x + a.y * b.y;
      }
#pragma unroll
      for (int step = kRowThreads / 2; step > 0; step /= 2) {
        product += __shfl_xor_sync(prim::kAllLanes, product, step);
      }
      core::Magnitude grad_o_norm;
      if constexpr (kInteger) {
        grad_o_norm = row_norm<kDType, kRowThreads>(grad_words[i]);
      }
      if (column > 0) {
        continue;
      }
      const std::int64_t local = begin + i * kRowsAtOnce - first;
      write_terms<kInteger>(pass, row_tile.index * kTileQ + local, lses[i], product - grad_lses[i],
                            bounds, grad_o_norm);
    }
  }
}

}  // namespace pantile::common
