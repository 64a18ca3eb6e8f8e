// Launches the append kernel: one for every dtype and format, which it learns at run time.
#pragma once

#include <cuda_runtime.h>

#include "decode/append.cuh"
#include "decode/arrays.h"
#include "driver.h"
#include "pantile/kv.h"
#include "pantile/status.h"

namespace pantile::decode {

inline SourceRows source_rows(const void* data, const Layout& layout) {
  return SourceRows{data, layout.batch, layout.seq, layout.head};
}

inline TargetRows target_rows(void* data, const CacheLayout& layout, float* scales,
                              const ScaleLayout& scale, std::int64_t dim) {
  return TargetRows{data,        layout.block, layout.slot, layout.head,          scales,
                    scale.block, scale.slot,   scale.head,  static_cast<int>(dim)};
}

inline AppendParams append_params(const KvProblem& p, const KvTensors& t) {
  AppendParams params{};
  params.arrays = kv_arrays(p, t);
  params.k_new = source_rows(t.k_new, p.k_new);
  params.v_new = source_rows(t.v_new, p.v_new);
  params.q = source_rows(t.q, p.q);
  params.k = target_rows(t.k, p.k, t.scale_k, p.scale_k, p.head_dim);
  params.v = target_rows(t.v, p.v, t.scale_v, p.scale_v, p.head_dim_v);
  params.q_rotated.data = t.q_rotated;
  params.q_rotated.block = p.q_rotated.batch;
  params.q_rotated.slot = p.q_rotated.seq;
  params.q_rotated.head = p.q_rotated.head;
  params.q_rotated.dim = static_cast<int>(p.head_dim);
  params.block_table = p.page_size > 0 ? t.block_table : nullptr;
  params.table_stride = p.table_stride;
  params.table_rows = p.table_rows;
  params.blocks = p.blocks;
  params.page = core::FastDivmod(p.page_size > 0 ? static_cast<int>(p.page_size) : 1);
  params.cosines = t.rotary_cos;
  params.sines = t.rotary_sin;
  params.rotary_stride = p.rotary_stride;
  params.rotary_positions = p.rotary_positions;
  params.rotary_dtype = p.rotary_dtype;
  params.format = p.format;
  params.scale_kind = p.format == CacheFormat::plain ? CacheScale::none : p.scale_kind;
  params.heads_k = static_cast<int>(p.heads_k);
  params.heads_q = static_cast<int>(p.heads_q);
  params.rows_new = static_cast<int>(p.seqlen_new);
  params.rows_q = p.rotates_q ? static_cast<int>(p.seqlen_q) : 0;
  params.sides = p.v_in_k ? 1 : 2;
  params.rotary_dim = static_cast<int>(p.rotary_dim);
  params.rotary_base = p.v_in_k ? static_cast<int>(p.head_dim - p.rotary_dim) : 0;
  params.interleaved = p.rotary_interleaved;
  params.sequence_blocks = static_cast<int>(append_blocks(p));
  return params;
}

template <DType kDType>
Status launch_append(const AppendPlan& plan, const KvTensors& tensors, cudaStream_t stream) {
  if (plan.blocks == 0) {
    return Status();
  }
  const cuda::DeviceGuard device(plan.device.device.index);
  if (!device.status().ok()) {
    return device.status();
  }
  cuda::Launch how;
  how.grid = dim3(static_cast<unsigned>(plan.blocks));
  how.block = dim3(kAppendThreads);
  how.stream = stream;
  how.early = plan.device.compute_major >= 9;
  how.device = plan.device.device.index;
  return cuda::launch("append", how, append_kernel<kDType>, append_params(plan.problem, tensors));
}

}  // namespace pantile::decode
