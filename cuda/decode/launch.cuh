// Launches the decode kernel of one row: fills the parameters, chooses the columns. Allocates
// nothing, waits for nothing, reads no lengths; may be captured into a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/softmax_state.h"
#include "decode/arrays.h"
#include "decode/kernel.cuh"
#include "decode/plan.h"
#include "driver.h"
#include "pantile/kv.h"
#include "pantile/status.h"

namespace pantile::decode {

inline CacheSide cache_side(const void* data, const CacheLayout& layout, int bytes) {
  return CacheSide{static_cast<const char*>(data), layout.block * bytes, layout.slot * bytes,
                   layout.head * bytes};
}

inline ScaleSide scale_side(const KvProblem& p, const float* data, const ScaleLayout& layout) {
  return ScaleSide{p.scale_kind == CacheScale::none ? nullptr : data, layout.block, layout.slot,
                   layout.head};
}

inline void set_tensors(DecodeParams& params, const KvProblem& p, const KvTensors& t, int bytes) {
  params.q = t.q;
  params.o = t.o;
  params.lse = p.wants_lse ? t.lse : nullptr;
  params.k = cache_side(t.k, p.k, bytes);
  params.v = cache_side(t.v, p.v, bytes);
  params.k_scales = scale_side(p, t.scale_k, p.scale_k);
  params.v_scales = p.v_in_k ? params.k_scales : scale_side(p, t.scale_v, p.scale_v);
  params.token_scales = p.scale_kind == CacheScale::token;
  params.q_rows = RowSide{p.packed_q ? 0 : p.q.batch, p.q.seq, p.q.head};
  params.o_rows = RowSide{p.packed_q ? 0 : p.o.batch, p.o.seq, p.o.head};
  params.lse_head = p.packed_q ? p.total_q : p.seqlen_q;
  params.arrays = kv_arrays(p, t);
  params.block_table = p.page_size > 0 ? t.block_table : nullptr;
  params.tree_mask = p.has_tree_mask ? t.tree_mask : nullptr;
  params.sinks = p.has_sinks ? t.sinks : nullptr;
}

inline DecodeParams decode_params(const DecodePlan& plan, const KvTensors& tensors,
                                  void* workspace) {
  const KvProblem& p = plan.problem;
  DecodeParams params{};
  set_tensors(params, p, tensors, p.format == CacheFormat::plain ? 2 : 1);
  params.table_stride = p.table_stride;
  const int group = static_cast<int>(p.heads_q / p.heads_k);
  params.group = core::FastDivmod(group);
  params.page = core::FastDivmod(p.page_size > 0 ? static_cast<int>(p.page_size) : 1 << 30);
  params.whole_slices = p.page_size % kSliceKeys == 0;
  params.batch = static_cast<int>(p.batch);
  params.heads_q = static_cast<int>(p.heads_q);
  params.heads_k = static_cast<int>(p.heads_k);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.row_tiles = core::ceil_div(params.arrays.seqlen_q * group, plan.tile_q);
  const core::Mask mask = core::make_mask(0, 0, p.window_left, p.window_right);
  params.window_left = mask.left;
  params.window_right = mask.right;
  params.scale_log2 = p.scale * core::kLog2E;
  if (p.softcap > 0.0f) {
    params.scale_log2 = p.softcap * core::kLog2E;
    params.cap_inner = 2.0f * core::kLog2E * p.scale / p.softcap;
    params.capped = true;
  }
  params.cuts = p.split == KvSplit::automatic   ? Cuts::anywhere
                : p.split == KvSplit::invariant ? Cuts::by_length
                                                : Cuts::fixed;
  params.cut_tiles = core::FastDivmod(
      params.cuts == Cuts::fixed ? static_cast<int>(p.split_keys) / plan.tile_k : 1);
  params.output = output_dtype(p);
  params.queries = p.dtype;
  params.arrivals = static_cast<int*>(workspace);
  params.parts =
      reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.workspace.zeroed_bytes);
  return params;
}

template <class Config, DType kDType>
Status launch_config(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
  static_assert(sizeof(Storage<Config>) <=
                Config::kStages * Config::kSlices * Config::kSliceBytes +
                    fixed_bytes(Config::kShape, Config::kColumns, Config::kShared));
  static cuda::PreparedDevices prepared{0};
  cuda::Launch how;
  how.grid = dim3(static_cast<unsigned>(plan.blocks));
  how.block = dim3(static_cast<unsigned>(Config::kThreads));
  how.shared_bytes = static_cast<int>(sizeof(Storage<Config>));
  how.stream = stream;
  how.early = plan.device.compute_major >= 9;
  how.prepared = &prepared;
  how.device = plan.device.device.index;
  return cuda::launch("decode", how, decode_kernel<Config, kDType>, params);
}

template <Shape kShape, DType kDType, SharedClass kShared>
Status launch_shape(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
  switch (plan.tile_q) {
#define PANTILE_COLUMNS(columns)                                                            \
  case columns:                                                                             \
    if constexpr (has_columns(kShape, columns, kShared)) {                                  \
      return launch_config<Config<kShape, columns, kShared>, kDType>(plan, params, stream); \
    }                                                                                       \
    break;
    PANTILE_COLUMNS(8)
    PANTILE_COLUMNS(16)
    PANTILE_COLUMNS(32)
    PANTILE_COLUMNS(64)
#undef PANTILE_COLUMNS
    default: break;
  }
  return Status::error(StatusCode::unsupported, "%s has no tile of %d queries", plan.kernel->name,
                       plan.tile_q);
}

}  // namespace pantile::decode
