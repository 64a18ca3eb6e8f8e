// Around the parts of a split forward (core/forward_split.h), for both GPU families.
//
//   prepare_parts   1. the arrays that describe the parts, a thread for each sequence
//                   2. -inf in the parts' largest logits
//                   3. copies of Q: every element is read once and written once for each part
//   merge_parts     a warp for each row and head: lanes own four columns each, twice from 128 on.
//                   1. the largest LSE of the parts  2. the parts in ascending order: weights,
//                   their sum, O  3. O in its dtype, its low bits, LSE, the head's largest logit
//
// The workspace holds the arrays and the parts' results. Both kernels begin when the one before has
// ended: a split call is a chain of launches over one workspace.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "attn/max_logit.cuh"
#include "core/forward_split.h"
#include "driver.h"
#include "pantile/device.h"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/low_bits.cuh"
#include "prim/math.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

inline constexpr int kSplitThreads = 256;
inline constexpr int kMostMergedDim = 256;

// Copies chunk `chunk` of row `at` of Q, a Chunk wide, to every part.
template <class Chunk>
PANTILE_DEVICE void copy_chunk(const core::SplitJob& job, std::int64_t at, int head, int chunk) {
  const int batch = core::sequence_of_row(job, at);
  if (batch >= job.batch) {
    return;  // behind the last sequence
  }
  const core::SplitRows rows = core::split_rows(job, batch);
  const int i = static_cast<int>(at - rows.row);
  const std::int64_t sequence =
      job.cu_seqlens_q != nullptr ? rows.row * job.q_seq : batch * job.q_batch;
  const std::int64_t from = sequence + i * job.q_seq + head * job.q_head;
  const auto* const q = static_cast<const char*>(job.q) + from * job.element_bytes;
  const Chunk value = reinterpret_cast<const Chunk*>(q)[chunk];
  const std::int64_t row_bytes = std::int64_t{job.head_dim} * job.element_bytes;
#pragma unroll 4
  for (int part = 0; part < job.parts(); ++part) {
    const std::int64_t row = core::part_row(job, rows, part, i) * job.heads_q + head;
    auto* const to = static_cast<char*>(job.q_parts) + row * row_bytes;
    reinterpret_cast<Chunk*>(to)[chunk] = value;
  }
}

template <class Chunk>
PANTILE_DEVICE void copy_queries(const core::SplitJob& job, std::int64_t thread,
                                 std::int64_t threads) {
  const int chunks = job.head_dim * job.element_bytes / static_cast<int>(sizeof(Chunk));
  const std::int64_t count = job.total_q * job.heads_q * chunks;
#pragma unroll 1
  for (std::int64_t work = thread; work < count; work += threads) {
    const std::int64_t row = work / chunks;
    copy_chunk<Chunk>(job, row / job.heads_q, static_cast<int>(row % job.heads_q),
                      static_cast<int>(work % chunks));
  }
}

template <int kUnused = 0>
__global__ void __launch_bounds__(kSplitThreads)
    prepare_parts(const __grid_constant__ core::SplitJob job) {
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kSplitThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * kSplitThreads;
#pragma unroll 1
  for (std::int64_t batch = thread; batch < job.batch; batch += threads) {
    core::place_parts(job, static_cast<int>(batch));
  }
  if (job.part_max_logit != nullptr) {
    const std::int64_t count = std::int64_t{job.batch} * job.parts() * job.heads_q;
#pragma unroll 1
    for (std::int64_t at = thread; at < count; at += threads) {
      job.part_max_logit[at] = -core::kInfinity;
    }
  }
  if (job.wide_q) {
    copy_queries<uint4>(job, thread, threads);
  } else if (job.element_bytes == 4) {
    copy_queries<std::uint32_t>(job, thread, threads);
  } else {
    copy_queries<std::uint16_t>(job, thread, threads);
  }
}

// Four columns of a row of O from `at` on, of its low bits from `low_at` on.
template <DType kDType>
PANTILE_DEVICE void store_merged(const core::SplitJob& job, std::int64_t at, std::int64_t low_at,
                                 const float4& x) {
  if constexpr (kDType == DType::f32) {
    auto* const to = static_cast<float*>(job.o) + at;
    if (job.wide_o) {
      *reinterpret_cast<float4*>(to) = x;
    } else {
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
  } else {
    auto* const to = static_cast<std::uint16_t*>(job.o) + at;
    const uint2 packed = make_uint2(prim::pack<kDType>(x.x, x.y), prim::pack<kDType>(x.z, x.w));
    if (job.wide_o) {
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
      to[0] = static_cast<std::uint16_t>(packed.x);
      to[1] = static_cast<std::uint16_t>(packed.x >> 16);
      to[2] = static_cast<std::uint16_t>(packed.y);
      to[3] = static_cast<std::uint16_t>(packed.y >> 16);
    }
    if (job.o_low != nullptr) {
      *reinterpret_cast<std::uint32_t*>(job.o_low + low_at) =
          prim::low_bits<kDType>(x.x, x.y, prim::low_bits<kDType>(x.z, x.w, 0));
    }
  }
}

// Raises the head's largest logit to those of the prefix's parts; the tail has raised it already.
PANTILE_DEVICE void raise_part_logits(const core::SplitJob& job, int batch, int head) {
  int largest = attn::kSmallestLogit;
  for (int part = prim::lane_index(); part < job.parts(); part += 32) {
    const float logit =
        job.part_max_logit[(std::int64_t{batch} * job.parts() + part) * job.heads_q + head];
    largest = max(largest, logit == logit ? attn::logit_order(logit) : attn::kNanLogit);
  }
  attn::raise_max_logit(job.max_logit + std::int64_t{batch} * job.heads_q + head, largest);
}

template <DType kDType>
PANTILE_DEVICE void merge_row(const core::SplitJob& job, const core::SplitRows& rows, int batch,
                              int head, int i) {
  const auto exp2 = [](float x) { return prim::exp2_approx(x); };
  const int parts = job.parts() + (job.tail_begin != nullptr ? 1 : 0);
  const float sink = job.sinks == nullptr ? -core::kInfinity : job.sinks[head];
  core::PartSum all{sink, 0.0f};
  const bool used = i < rows.used;
  if (used) {
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      all.reference = core::larger(all.reference, core::part_lse(job, rows, batch, head, i, part));
    }
  }
  constexpr int kTurns = kMostMergedDim / 128;
  float4 o[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    o[turn] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int column = prim::lane_index() * 4;
  const int used_parts = used ? parts : 0;
#pragma unroll 4
  for (int part = 0; part < used_parts; ++part) {
    const float lse = core::part_lse(job, rows, batch, head, i, part);
    if (lse == -core::kInfinity) {
      continue;  // it has no keys for this row
    }
    const float weight = core::part_weight(lse, all.reference, exp2);
    const float* const from = core::part_output(job, rows, head, i, part) + column;
    all.sum += weight;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (column + turn * 128 < job.head_dim_v) {
        const float4 x = *reinterpret_cast<const float4*>(from + turn * 128);
        o[turn].x = fmaf(weight, x.x, o[turn].x);
        o[turn].y = fmaf(weight, x.y, o[turn].y);
        o[turn].z = fmaf(weight, x.z, o[turn].z);
        o[turn].w = fmaf(weight, x.w, o[turn].w);
      }
    }
  }
  if (used && job.sinks != nullptr) {
    all.sum += core::part_weight(sink, all.reference, exp2);
  }
  const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
  const std::int64_t sequence =
      job.cu_seqlens_q != nullptr ? rows.row * job.o_seq : batch * job.o_batch;
  const std::int64_t at = sequence + i * job.o_seq + head * job.o_head + column;
  const std::int64_t low_at =
      ((rows.row + i) * job.heads_q + head) * job.head_dim_v + std::int64_t{column};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (column + turn * 128 < job.head_dim_v) {
      const float4 x = make_float4(o[turn].x * inverse, o[turn].y * inverse, o[turn].z * inverse,
                                   o[turn].w * inverse);
      store_merged<kDType>(job, at + turn * 128, low_at + turn * 128, x);
    }
  }
  if (column == 0 && job.lse != nullptr) {
    job.lse[core::lse_index(job, rows, batch, head, i)] =
        core::merged_lse(all, [](float x) { return prim::log2_approx(x); });
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kSplitThreads)
    merge_parts(const __grid_constant__ core::SplitJob job) {
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  constexpr int kWarps = kSplitThreads / 32;
  const std::int64_t count = job.total_q * job.heads_q;
  const std::int64_t warp = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
#pragma unroll 1
  for (std::int64_t work = warp; work < count; work += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t row = work / job.heads_q;
    const int head = static_cast<int>(work % job.heads_q);
    const int batch = core::sequence_of_row(job, row);
    if (batch >= job.batch) {
      continue;
    }
    const core::SplitRows rows = core::split_rows(job, batch);
    const int i = static_cast<int>(row - rows.row);
    merge_row<kDType>(job, rows, batch, head, i);
    if (i == 0 && job.max_logit != nullptr) {
      raise_part_logits(job, batch, head);
    }
  }
}

inline cuda::Launch split_launch(std::int64_t work, const DeviceProps& device, void* stream) {
  constexpr int kBlocksPerProcessor = 4;  // as many as 64 registers a thread leave room for
  const std::int64_t blocks = core::ceil_div<std::int64_t>(work, kSplitThreads);
  const std::int64_t most = std::int64_t{kBlocksPerProcessor} * device.multiprocessors;
  return cuda::Launch{dim3(static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most))),
                      dim3(kSplitThreads), 0, static_cast<cudaStream_t>(stream)};
}

inline Status launch_prepare_parts(const core::SplitJob& job, const DeviceProps& device,
                                   void* stream) {
  const cuda::DeviceGuard guard(device.device.index);
  if (!guard.status().ok()) {
    return guard.status();
  }
  const int chunk_bytes = job.wide_q ? 16 : job.element_bytes;
  const std::int64_t chunks = job.head_dim * job.element_bytes / chunk_bytes;
  const cuda::Launch how = split_launch(
      std::max<std::int64_t>(job.total_q * job.heads_q * chunks, job.batch), device, stream);
  return cuda::launch("prepare_parts", how, prepare_parts<>, job);
}

inline Status launch_merge_parts(const core::SplitJob& job, DType output, const DeviceProps& device,
                                 void* stream) {
  const cuda::DeviceGuard guard(device.device.index);
  if (!guard.status().ok()) {
    return guard.status();
  }
  const cuda::Launch how = split_launch(job.total_q * job.heads_q * 32, device, stream);
  switch (output) {
    case DType::f32: return cuda::launch("merge_parts", how, merge_parts<DType::f32>, job);
    case DType::bf16: return cuda::launch("merge_parts", how, merge_parts<DType::bf16>, job);
    case DType::f16: return cuda::launch("merge_parts", how, merge_parts<DType::f16>, job);
    default: break;
  }
  return Status::error(StatusCode::invalid_argument, "merge_parts: output has dtype %s",
                       dtype_name(output));
}

}  // namespace pantile::common
