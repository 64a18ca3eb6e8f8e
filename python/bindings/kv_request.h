// From the tensors of one decode or append to its problem and pointers (pantile/kv.h). The tensors
// of the cache travel as one tuple, in the order of pantile._kv_ops.CACHE, and so do the numbers of
// a decode, DecodeNumbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "request.h"
#include "tensor_view.h"

namespace pantile::python {

// One call: the problem, the pointers, and where it runs.
struct KvRequest {
  KvProblem problem;
  KvTensors tensors;
  TensorView k;  // of the cache; all else must be on its device
  Device device;
  PlanOptions options;
  bool slots_before_heads = true;  // NHD
};

inline const std::int32_t* read_ints(const nb::handle object, const char* name,
                                     const KvRequest& request, std::int64_t count,
                                     const char* what) {
  std::int64_t found = 0;
  const std::int32_t* const data = read_lengths(object, name, request.k, &found);
  if (found != count) {
    raise_value_error("%s has %lld entries; it must have %s, %lld", name,
                      static_cast<long long>(found), what, static_cast<long long>(count));
  }
  return data;
}

inline CacheFormat format_of(const TensorView& cache, const TensorView& rows) {
  if (cache.code == rows.code && cache.bits == rows.bits) {
    return CacheFormat::plain;
  }
  if (cache.code == dlpack::kFloat8E4M3FN) {
    return CacheFormat::e4m3;
  }
  if (cache.code == dlpack::kInt && cache.bits == 8) {
    return CacheFormat::int8;
  }
  raise_type_error("%s has dtype %s; it must be the dtype of %s, %s, or float8_e4m3fn or int8",
                   cache.name, dtype_text(cache.code, cache.bits).c_str(), rows.name,
                   dtype_text(rows.code, rows.bits).c_str());
}

// A cache is never copied: its rows must be dense.
inline void require_dense_rows(const TensorView& view) {
  if (view.stride[view.rank - 1] != 1 && !view.empty()) {
    raise_value_error("%s has stride %lld along its last axis; it must be 1", view.name,
                      static_cast<long long>(view.stride[view.rank - 1]));
  }
}

inline CacheLayout cache_layout(const TensorView& view, bool slots_before_heads) {
  CacheLayout layout;
  layout.block = view.stride[0];
  layout.slot = view.stride[slots_before_heads ? 1 : 2];
  layout.head = view.stride[slots_before_heads ? 2 : 1];
  layout.base_align_bytes = view.base_align_bytes();
  return layout;
}

// Scales by rank: of the tensor, [heads_k], [batch, heads_k], or one a slot and head, shaped like
// the cache without its last axis.
inline float* read_scale(nb::handle object, const char* name, const KvRequest& request,
                         CacheScale* kind, ScaleLayout* layout) {
  if (object.is_none()) {
    *kind = CacheScale::none;
    return nullptr;
  }
  const KvProblem& p = request.problem;
  const TensorView view = read_tensor(object, name);
  require_float32(view);
  require_same_device(view, request.k);
  *kind = view.rank == 3 ? CacheScale::token : CacheScale::head;
  switch (view.rank) {
    case 0: break;
    case 1:
      require_shape(view, {p.heads_k});
      layout->head = view.stride[0];
      break;
    case 2:
      require_shape(view, {p.batch, p.heads_k});
      layout->block = view.stride[0];
      layout->head = view.stride[1];
      break;
    case 3: {
      require_shape(view, {request.k.shape[0], request.k.shape[1], request.k.shape[2]});
      const bool slots_first = request.slots_before_heads;
      *layout = ScaleLayout{view.stride[0], view.stride[slots_first ? 1 : 2],
                            view.stride[slots_first ? 2 : 1]};
      break;
    }
    default: raise_value_error("%s has %d dimensions; it must have 0, 1, 2 or 3", name, view.rank);
  }
  return static_cast<float*>(view.data);
}

// Places in the tuple.
inline constexpr int kCacheK = 0, kCacheV = 1, kCacheScaleK = 2, kCacheScaleV = 3,
                     kCacheLengths = 4, kCacheBlockTable = 5, kCacheCacheIndex = 6,
                     kCacheLeftpad = 7, kCacheCuSeqlensQ = 8, kCacheCuSeqlensNew = 9,
                     kCacheCount = 10;

inline const std::int32_t* read_bounds(nb::handle object, const char* name,
                                       const KvRequest& request) {
  return read_ints(object, name, request, request.problem.batch + 1, "batch + 1");
}

inline void read_block_table(nb::handle object, KvRequest* request) {
  KvProblem& p = request->problem;
  const std::int64_t slots = request->k.shape[request->slots_before_heads ? 1 : 2];
  p.blocks = request->k.shape[0];
  if (object.is_none()) {
    p.block_slots = slots;
    return;
  }
  const TensorView table = read_tensor(object, "block_table");
  if (table.code != dlpack::kInt || table.bits != 32) {
    raise_type_error("block_table has dtype %s; it must be int32",
                     dtype_text(table.code, table.bits).c_str());
  }
  require_same_device(table, request->k);
  require_rank(table, 2, "[rows, pages of a row]");
  if (table.shape[1] > 1 && table.stride[1] != 1) {
    raise_value_error("block_table has stride %lld along its last axis; it must be 1",
                      static_cast<long long>(table.stride[1]));
  }
  p.page_size = slots;
  p.table_rows = table.shape[0];
  p.table_pages = table.shape[1];
  p.table_stride = table.stride[0];
  request->tensors.block_table = static_cast<const std::int32_t*>(table.data);
}

inline const char* cache_axes(bool slots_before_heads) {
  return slots_before_heads ? "[pages, slots, heads_k, head_dim]"
                            : "[pages, heads_k, slots, head_dim]";
}

// K, and V unless it is part of K.
inline void read_keys_and_values(const nb::tuple& cache, KvRequest* request) {
  KvProblem& p = request->problem;
  const bool slots_first = request->slots_before_heads;
  const TensorView& k = request->k;
  p.heads_k = k.shape[slots_first ? 2 : 1];
  p.head_dim = k.shape[3];
  p.v_in_k = cache[kCacheV].is_none();
  p.k = cache_layout(k, slots_first);
  request->tensors.k = k.data;
  if (!p.v_in_k) {
    const TensorView v = read_tensor(cache[kCacheV], "cache.v");
    require_like(v, k);
    require_rank(v, 4, cache_axes(slots_first));
    require_dense_rows(v);
    require_shape(v, {k.shape[0], k.shape[1], k.shape[2], p.head_dim_v});
    p.v = cache_layout(v, slots_first);
    request->tensors.v = v.data;
  }
}

inline void read_scales(const nb::tuple& cache, KvRequest* request) {
  KvProblem& p = request->problem;
  KvTensors& t = request->tensors;
  CacheScale kind_v = CacheScale::none;
  t.scale_k = read_scale(cache[kCacheScaleK], "scale_k", *request, &p.scale_kind, &p.scale_k);
  t.scale_v = read_scale(cache[kCacheScaleV], "scale_v", *request, &kind_v, &p.scale_v);
  if (!p.v_in_k && kind_v != p.scale_kind) {
    raise_value_error("scale_v is of a %s and scale_k of a %s; they must be alike",
                      cache_scale_name(kind_v), cache_scale_name(p.scale_kind));
  }
}

// Arrays that say where sequences are. request->k and problem.batch are set.
inline void read_places(const nb::tuple& cache, KvRequest* request) {
  KvProblem& p = request->problem;
  KvTensors& t = request->tensors;
  p.has_cache_index = !cache[kCacheCacheIndex].is_none();
  p.has_leftpad = !cache[kCacheLeftpad].is_none();
  p.packed_new = !cache[kCacheCuSeqlensNew].is_none();
  p.packed_q = !cache[kCacheCuSeqlensQ].is_none();
  if (p.has_cache_index) {
    t.cache_index =
        read_ints(cache[kCacheCacheIndex], "cache_index", *request, p.batch, "one per sequence");
  }
  if (p.has_leftpad) {
    t.leftpad = read_ints(cache[kCacheLeftpad], "leftpad", *request, p.batch, "one per sequence");
  }
  if (p.packed_new) {
    t.cu_seqlens_new = read_bounds(cache[kCacheCuSeqlensNew], "cu_seqlens_new", *request);
  }
  if (p.packed_q) {
    t.cu_seqlens_q = read_bounds(cache[kCacheCuSeqlensQ], "cu_seqlens_q", *request);
  }
}

// `rows`: q or new keys, whose dtype is that of the call.
inline KvRequest read_cache(const nb::tuple& cache, const TensorView& rows, bool slots_before_heads,
                            std::int64_t head_dim_v, Backend backend) {
  if (nb::len(cache) != kCacheCount) {
    raise_type_error("a cache has %d tensors; %zu were given", kCacheCount, nb::len(cache));
  }
  KvRequest request;
  request.slots_before_heads = slots_before_heads;
  request.options.backend = backend;
  request.k = read_tensor(cache[kCacheK], "cache.k");
  require_rank(request.k, 4, cache_axes(slots_before_heads));
  require_dense_rows(request.k);
  request.device = parse_device(request.k);
  require_same_device(rows, request.k);
  KvProblem& p = request.problem;
  p.dtype = parse_dtype(rows, false);
  p.format = format_of(request.k, rows);
  p.head_dim_v = head_dim_v;
  read_keys_and_values(cache, &request);
  request.tensors.lengths = read_lengths(cache[kCacheLengths], "lengths", request.k, &p.batch);
  read_block_table(cache[kCacheBlockTable], &request);
  read_scales(cache, &request);
  read_places(cache, &request);
  return request;
}

// The rows of q: [batch, seqlen_q, heads_q, head_dim], packed [total_q, heads_q, head_dim].
inline void read_query(const TensorView& q, std::int64_t longest, KvRequest* request) {
  KvProblem& p = request->problem;
  require_rank(
      q, p.packed_q ? 3 : 4,
      p.packed_q ? "[total_q, heads_q, head_dim]" : "[batch, seqlen_q, heads_q, head_dim]");
  const int heads = q.rank - 2;
  require_size(q, heads + 1, "head_dim", p.head_dim, "cache.k");
  p.heads_q = q.shape[heads];
  if (p.packed_q) {
    p.seqlen_q = longest;
    p.total_q = q.shape[0];
  } else {
    require_size(q, 0, "batch size", p.batch, "lengths");
    p.seqlen_q = q.shape[1];
    p.total_q = p.batch * p.seqlen_q;
  }
  p.q = layout_of(q);
  request->tensors.q = q.data;
}

// Rows like q with another last axis.
inline void require_rows_of(const TensorView& view, const TensorView& q, std::int64_t dim) {
  std::vector<std::int64_t> shape(q.shape, q.shape + q.rank);
  shape.back() = dim;
  if (view.rank != q.rank || !std::equal(shape.begin(), shape.end(), view.shape)) {
    raise_value_error("%s has shape %s; it must be %s", view.name,
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(shape.data(), q.rank).c_str());
  }
}

inline KvSplit split_of(const std::string& name) {
  for (const KvSplit split : {KvSplit::automatic, KvSplit::invariant, KvSplit::fixed}) {
    if (name == kv_split_name(split)) {
      return split;
    }
  }
  raise_value_error("split is %s; it must be automatic, invariant or fixed", name.c_str());
}

// What decode and its schedule are asked beside the tensors, in the order of the operators.
struct DecodeNumbers {
  std::int64_t seqlen_q, seqlen_new;
  bool slots_before_heads;
  std::int64_t head_dim_v;
  std::optional<double> scale;
  std::int64_t window_left, window_right;
  double softcap;
  std::string split;
  std::int64_t split_keys;
  Backend backend;
};

inline DecodeNumbers read_decode_numbers(const nb::tuple& values) {
  constexpr std::size_t kCount = 11;
  if (nb::len(values) != kCount) {
    raise_type_error("decode has %zu numbers; %zu were given", kCount, nb::len(values));
  }
  DecodeNumbers n{};
  read_field(values[0], "max_seqlen_q", &n.seqlen_q);
  read_field(values[1], "seqlen_new", &n.seqlen_new);
  read_field(values[2], "slots_before_heads", &n.slots_before_heads);
  read_field(values[3], "head_dim_v", &n.head_dim_v);
  read_field(values[4], "scale", &n.scale);
  read_field(values[5], "window_left", &n.window_left);
  read_field(values[6], "window_right", &n.window_right);
  read_field(values[7], "softcap", &n.softcap);
  n.split = nb::cast<std::string>(values[8]);
  read_field(values[9], "split_keys", &n.split_keys);
  read_field(values[10], "backend", &n.backend);
  return n;
}

inline KvRequest read_decode(const TensorView& q, const nb::tuple& cache, const DecodeNumbers& n) {
  KvRequest request = read_cache(cache, q, n.slots_before_heads, n.head_dim_v, n.backend);
  KvProblem& p = request.problem;
  p.seqlen_new = n.seqlen_new;
  read_query(q, n.seqlen_q, &request);
  p.scale = static_cast<float>(n.scale.value_or(
      1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(p.head_dim, 1)))));
  p.window_left = n.window_left;
  p.window_right = n.window_right;
  p.softcap = static_cast<float>(n.softcap);
  p.split = split_of(n.split);
  p.split_keys = n.split_keys;
  p.o = fresh_layout(q, p.head_dim_v);
  return request;
}

}  // namespace pantile::python
