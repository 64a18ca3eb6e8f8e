// New keys and values into the cache: rotated, quantised, and never outside of a sequence's slots;
// and queries rotated by the same positions. A few tens of KB a call, bound by latency.
//
// A warp owns one row: a key, a value or a query of one head. It reads the row whole before it
// writes, so that queries may be rotated in place. Every bit is that of the CPU's append: products
// and sums are rounded one by one, divisions are those of IEEE.
#pragma once

#include <cstdint>

#include "core/kv_sequence.h"
#include "core/scaling.h"
#include "core/softmax_state.h"
#include "decode/plan.h"
#include "pantile/kv.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::decode {

inline constexpr int kAppendThreads = 32 * kAppendWarps;
inline constexpr int kLaneElements = 18;  // of a row of 576

// Rows of K, V or Q before the step. Distances in elements; batch is 0 for packed rows.
struct SourceRows {
  const void* data;
  std::int64_t batch, seq, head;
};

struct TargetRows {
  void* data;
  std::int64_t block, slot, head;  // Q: batch, seq, head
  float* scales;
  std::int64_t scale_block, scale_slot, scale_head;
  int dim;
};

struct AppendParams {
  core::KvArrays arrays;
  SourceRows k_new, v_new, q;
  TargetRows k, v, q_rotated;
  const std::int32_t* block_table;  // null: dense
  std::int64_t table_stride, table_rows, blocks;
  core::FastDivmod page;
  const void* cosines;
  const void* sines;
  std::int64_t rotary_stride, rotary_positions;
  DType rotary_dtype;
  CacheFormat format;
  CacheScale scale_kind;
  int heads_k, heads_q;
  int rows_new, rows_q;         // the most of a sequence; rows_q 0: queries are not rotated
  int sides;                    // K, or K and V
  int rotary_dim, rotary_base;  // rotated channels, the first of them (of K and Q)
  bool interleaved;
  int sequence_blocks;  // of a sequence
};

PANTILE_DEVICE float load_element(DType dtype, const void* data, std::int64_t at) {
  if (dtype == DType::f32) {
    return static_cast<const float*>(data)[at];
  }
  const std::uint32_t bits = static_cast<const std::uint16_t*>(data)[at];
  return dtype == DType::bf16 ? prim::unpack<DType::bf16>(bits).x
                              : prim::unpack<DType::f16>(bits).x;
}

PANTILE_DEVICE void store_element(DType dtype, void* data, std::int64_t at, float x) {
  const std::uint32_t bits =
      dtype == DType::bf16 ? prim::pack<DType::bf16>(x, 0.0f) : prim::pack<DType::f16>(x, 0.0f);
  static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>(bits);
}

// Channel c of a row at `at`, rotated by its position.
template <DType kDType>
PANTILE_DEVICE float rotated_element(const AppendParams& p, const SourceRows& rows, std::int64_t at,
                                     int c, std::int64_t table) {
  const float x = load_element(kDType, rows.data, at + c);
  const int r = c - p.rotary_base;
  if (r < 0 || r >= p.rotary_dim) {
    return x;
  }
  const int half = p.rotary_dim / 2;
  const bool first = p.interleaved ? r % 2 == 0 : r < half;
  const int index = p.interleaved ? r / 2 : r % half;
  const int step = p.interleaved ? 1 : half;
  const float other = load_element(kDType, rows.data, at + (first ? c + step : c - step));
  const float cosine = load_element(p.rotary_dtype, p.cosines, table + index);
  const float sine = load_element(p.rotary_dtype, p.sines, table + index);
  return first ? __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(other, sine))
               : __fadd_rn(__fmul_rn(other, sine), __fmul_rn(x, cosine));
}

// Where the cosines and sines of row `row`'s position begin.
PANTILE_DEVICE std::int64_t table_row(const AppendParams& p, const core::KvSequence& s, int batch,
                                      int row) {
  const int pad = p.arrays.leftpad != nullptr ? p.arrays.leftpad[batch] : 0;
  const std::int64_t position = std::int64_t{s.before} + row - pad;
  const std::int64_t last = core::max_of<std::int64_t>(p.rotary_positions - 1, 0);
  return core::clamp<std::int64_t>(position, 0, last) * p.rotary_stride;
}

struct Slot {
  std::int64_t block;
  int slot;
  bool exists;
};

PANTILE_DEVICE Slot find_slot(const AppendParams& p, const core::KvSequence& s, int row) {
  const std::int64_t key = std::int64_t{s.before} + row;
  Slot slot{s.cache_row, static_cast<int>(key), false};
  const std::int64_t rows = p.block_table != nullptr ? p.table_rows : p.blocks;
  if (key < 0 || key >= p.arrays.capacity || s.cache_row < 0 || s.cache_row >= rows) {
    return slot;
  }
  if (p.block_table != nullptr) {
    const auto at = p.page.divmod(static_cast<int>(key));
    slot.block = p.block_table[s.cache_row * p.table_stride + at.quotient];
    slot.slot = at.remainder;
  }
  slot.exists = slot.block >= 0 && slot.block < p.blocks;
  return slot;
}

// What divides the row; codes of 0 unless `usable`.
struct Divisor {
  float value;
  bool usable;
};

PANTILE_DEVICE Divisor find_divisor(const AppendParams& p, const TargetRows& to, const Slot& slot,
                                    int batch, int head, const float (&x)[kLaneElements]) {
  if (p.scale_kind == CacheScale::none) {
    return Divisor{1.0f, true};
  }
  if (p.scale_kind == CacheScale::head) {
    return Divisor{to.scales[batch * to.scale_block + head * to.scale_head], true};
  }
  float most = 0.0f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {  // zeros beyond the row
    finite &= fabsf(x[i]) < core::kInfinity;
    most = fmaxf(most, fabsf(x[i]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
  }
  const float limit = p.format == CacheFormat::e4m3 ? core::kE4m3Max : 127.0f;
  const float scale = prim::any(!finite) ? __uint_as_float(0x7fc00000u) : __fdiv_rn(most, limit);
  if (prim::lane_index() == 0) {
    to.scales[slot.block * to.scale_block + slot.slot * to.scale_slot + head * to.scale_head] =
        scale;
  }
  return Divisor{scale, scale > 0.0f};
}

PANTILE_DEVICE std::uint8_t encode(CacheFormat format, float x, const Divisor& divisor) {
  if (!divisor.usable) {
    return 0;
  }
  const float y = __fdiv_rn(x, divisor.value);
  if (format == CacheFormat::e4m3) {
    return fabsf(x) < core::kInfinity ? core::encode_e4m3(y) : std::uint8_t{0x7f};
  }
  const int rounded = __float2int_rn(fminf(fmaxf(y, -127.0f), 127.0f));
  return static_cast<std::uint8_t>(y == y ? rounded : 0);
}

template <DType kDType>
PANTILE_DEVICE void append_row(const AppendParams& p, const core::KvSequence& s, int batch, int row,
                               int head, bool value) {
  const SourceRows& from = value ? p.v_new : p.k_new;
  const TargetRows& to = value ? p.v : p.k;
  const Slot slot = find_slot(p, s, row);
  if (!slot.exists) {
    return;
  }
  const std::int64_t first =
      p.arrays.cu_seqlens_new != nullptr ? s.new_row * from.seq : batch * from.batch;
  const std::int64_t at = first + row * from.seq + head * from.head;
  const std::int64_t table = table_row(p, s, batch, row);
  const int lane = prim::lane_index();
  float x[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const int c = lane + 32 * i;
    x[i] = c >= to.dim                  ? 0.0f
           : value || p.rotary_dim == 0 ? load_element(kDType, from.data, at + c)
                                        : rotated_element<kDType>(p, from, at, c, table);
  }
  const std::int64_t target = slot.block * to.block + slot.slot * to.slot + head * to.head;
  if (p.format == CacheFormat::plain) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (lane + 32 * i < to.dim) {
        store_element(kDType, to.data, target + lane + 32 * i, x[i]);
      }
    }
    return;
  }
  const Divisor divisor = find_divisor(p, to, slot, batch, head, x);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    if (lane + 32 * i < to.dim) {
      static_cast<std::uint8_t*>(to.data)[target + lane + 32 * i] = encode(p.format, x[i], divisor);
    }
  }
}

template <DType kDType>
PANTILE_DEVICE void rotate_query(const AppendParams& p, const core::KvSequence& s, int batch,
                                 int row, int head) {
  const bool packed = p.arrays.cu_seqlens_q != nullptr;
  const TargetRows& to = p.q_rotated;
  const std::int64_t at =
      (packed ? s.query_row * p.q.seq : batch * p.q.batch) + row * p.q.seq + head * p.q.head;
  const std::int64_t target =
      (packed ? s.query_row * to.slot : batch * to.block) + row * to.slot + head * to.head;
  const std::int64_t table = table_row(p, s, batch, row);
  const int lane = prim::lane_index();
  float x[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const int c = lane + 32 * i;
    x[i] = c < to.dim ? rotated_element<kDType>(p, p.q, at, c, table) : 0.0f;
  }
  __syncwarp();  // to.data may be q.data
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    if (lane + 32 * i < to.dim) {
      store_element(kDType, to.data, target + lane + 32 * i, x[i]);
    }
  }
}

// Rows of a sequence: those of K and V by new key, head and side, then those of Q by query and
// head.
constexpr int append_rows(const AppendParams& p) {
  return p.rows_new * p.heads_k * p.sides + p.rows_q * p.heads_q;
}

template <DType kDType>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  prim::wait_for_previous_grid();
  prim::allow_next_grid();
  const int batch = static_cast<int>(blockIdx.x) / p.sequence_blocks;
  const int item = static_cast<int>(blockIdx.x) % p.sequence_blocks * kAppendWarps +
                   static_cast<int>(threadIdx.x) / 32;
  if (item >= append_rows(p)) {
    return;
  }
  const core::KvSequence s = core::locate_kv_sequence(p.arrays, batch);
  const int keys = p.rows_new * p.heads_k * p.sides;
  if (item < keys) {
    const int row = item / (p.heads_k * p.sides);
    const int head = item / p.sides % p.heads_k;
    if (row < s.added) {
      append_row<kDType>(p, s, batch, row, head, item % p.sides == 1);
    }
  } else if ((item - keys) / p.heads_q < s.queries) {
    rotate_query<kDType>(p, s, batch, (item - keys) / p.heads_q, (item - keys) % p.heads_q);
  }
}

}  // namespace pantile::decode
