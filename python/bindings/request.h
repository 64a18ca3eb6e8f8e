// From the tensors of one Python call to the problem and the pointers of the C++ API. What only the
// tensors can show is checked here (ranks, dtypes, devices, agreeing shapes); everything about the
// problem itself is checked by plan_*.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "call.h"
#include "pantile/pantile.h"
#include "tensor_view.h"

namespace pantile::python {

// That of a tensor with nothing between its rows.
inline Layout contiguous_layout(std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
  return Layout{seqlen * heads * dim, heads * dim, dim, 16};
}

inline DType parse_dtype(const TensorView& view, bool takes_codes) {
  if (view.code == dlpack::kFloat && view.bits == 32) {
    return DType::f32;
  }
  if (view.code == dlpack::kFloat && view.bits == 16) {
    return DType::f16;
  }
  if (view.code == dlpack::kBfloat && view.bits == 16) {
    return DType::bf16;
  }
  const bool codes = view.code == dlpack::kFloat8E4M3FN;
  if (codes && takes_codes) {
    return DType::e4m3;
  }
  raise_type_error("%s has dtype %s; it must be float32, float16 or bfloat16%s", view.name,
                   dtype_text(view.code, view.bits).c_str(),
                   takes_codes ? " or float8_e4m3fn"
                   : codes     ? "; pantile.quantize takes it, with descales"
                               : "");
}

inline Device parse_device(const TensorView& view) {
  if (view.device_type == dlpack::kCpu) {
    return Device{DeviceType::cpu, 0};
  }
  if (view.device_type == dlpack::kCuda) {
    return Device{DeviceType::cuda, view.device_index};
  }
  raise_value_error("%s is on %s; it must be on the CPU or a CUDA device", view.name,
                    device_text(view.device_type, view.device_index).c_str());
}

inline void require_same_device(const TensorView& view, const TensorView& first) {
  if (view.device_type != first.device_type || view.device_index != first.device_index) {
    raise_value_error("%s is on %s; it must be on the device of %s, %s", view.name,
                      device_text(view.device_type, view.device_index).c_str(), first.name,
                      device_text(first.device_type, first.device_index).c_str());
  }
}

inline void require_like(const TensorView& view, const TensorView& first) {
  if (view.code != first.code || view.bits != first.bits) {
    raise_type_error("%s has dtype %s; it must have the dtype of %s, %s", view.name,
                     dtype_text(view.code, view.bits).c_str(), first.name,
                     dtype_text(first.code, first.bits).c_str());
  }
  require_same_device(view, first);
}

inline void require_rank(const TensorView& view, int rank, const char* axes) {
  if (view.rank != rank) {
    raise_value_error("%s has %d dimensions; it must have %d: %s", view.name, view.rank, rank,
                      axes);
  }
}

inline void require_size(const TensorView& view, int axis, const char* what, std::int64_t expected,
                         const char* source) {
  if (view.shape[axis] != expected) {
    raise_value_error("%s has %s %lld; it must be %lld, the %s of %s", view.name, what,
                      static_cast<long long>(view.shape[axis]), static_cast<long long>(expected),
                      what, source);
  }
}

inline std::string shape_text(const std::int64_t* shape, int rank) {
  std::string text = "[";
  for (int axis = 0; axis < rank; ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  }
  return text + "]";
}

inline void require_shape(const TensorView& view, std::initializer_list<std::int64_t> expected) {
  const int rank = static_cast<int>(expected.size());
  if (view.rank != rank || !std::equal(expected.begin(), expected.end(), view.shape)) {
    raise_value_error("%s has shape %s; it must be %s", view.name,
                      shape_text(view.shape, std::min(view.rank, kMaxRank)).c_str(),
                      shape_text(expected.begin(), rank).c_str());
  }
}

inline void require_float32(const TensorView& view) {
  if (view.code != dlpack::kFloat || view.bits != 32) {
    raise_type_error("%s has dtype %s; it must be float32", view.name,
                     dtype_text(view.code, view.bits).c_str());
  }
}

// Sequence boundaries or lengths: int32, one dimension, contiguous.
inline const std::int32_t* read_lengths(nb::handle object, const char* name, const TensorView& q,
                                        std::int64_t* count) {
  const TensorView view = read_tensor(object, name);
  if (view.code != dlpack::kInt || view.bits != 32) {
    raise_type_error("%s has dtype %s; it must be int32", name,
                     dtype_text(view.code, view.bits).c_str());
  }
  require_same_device(view, q);
  require_rank(view, 1, "one entry per sequence");
  if (view.shape[0] > 1 && view.stride[0] != 1) {
    raise_value_error("%s has stride %lld; it must be contiguous", name,
                      static_cast<long long>(view.stride[0]));
  }
  *count = view.shape[0];
  return static_cast<const std::int32_t*>(view.data);
}

inline Layout layout_of(const TensorView& view) {
  const int axis = view.rank - 3;  // of seq; packed tensors have no batch axis before it
  Layout layout;
  layout.batch = axis > 0 ? view.stride[0] : 0;
  layout.seq = view.stride[axis];
  layout.head = view.stride[axis + 1];
  layout.base_align_bytes = view.base_align_bytes();
  return layout;
}

// The layout of a fresh row-major tensor with the rows of `rows` and `head_dim` columns.
inline Layout fresh_layout(const TensorView& rows, std::int64_t head_dim) {
  TensorView fresh = rows;
  fresh.data = nullptr;
  fresh.shape[fresh.rank - 1] = head_dim;
  fresh.make_strides_canonical();
  return layout_of(fresh);
}

// One call: views of q, k and v, the problem they make and the device they are on.
struct Request {
  TensorView q, k, v;
  ForwardProblem problem;
  ForwardTensors tensors;
  Device device;
  PlanOptions options;
  bool packed = false;
  bool paged = false;                    // K and V are in pages
  bool backend_preferred = false;        // it gives way where it has no kernel that serves
  bool softmax_preferred = false;        // the softmax gives way where no kernel has it
  std::vector<CapturedTensor> captured;  // of the score, then of the mask; `tensors` points to them
};

// What holds for tensors of every form.
inline void read_options(const Call& call, Request* request) {
  ForwardProblem& problem = request->problem;
  request->packed = call.packed();
  request->paged = call.paged();
  request->options.backend = call.backend;
  request->backend_preferred = call.backend_preferred;
  request->softmax_preferred = call.softmax_preferred;
  problem.softmax = call.softmax_options();
  problem.float32_precision = call.float32_precision.value_or(Float32Precision::highest);
  problem.num_splits = static_cast<int>(std::clamp<std::int64_t>(
      call.num_splits, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
  problem.window_left = call.window_left;
  problem.window_right = call.window_right;
}

inline void read_dense(Request* request) {
  const TensorView &q = request->q, &k = request->k, &v = request->v;
  require_rank(q, 4, "[batch, seqlen_q, heads_q, head_dim]");
  require_rank(k, 4, "[batch, seqlen_k, heads_k, head_dim]");
  require_rank(v, 4, "[batch, seqlen_k, heads_k, head_dim_v]");
  require_size(k, 0, "batch size", q.shape[0], "q");
  require_size(v, 0, "batch size", q.shape[0], "q");
  require_size(v, 1, "sequence length", k.shape[1], "k");
  ForwardProblem& problem = request->problem;
  problem.batch = q.shape[0];
  problem.seqlen_q = q.shape[1];
  problem.seqlen_k = k.shape[1];
  problem.total_q = problem.batch * problem.seqlen_q;
  problem.total_k = problem.batch * problem.seqlen_k;
}

// Whether the sequences' keys follow each other in k, as cu_seqlens_k says. If not, seqused_k gives
// their lengths.
inline bool places_keys(const Call& call) {
  if (!call.paged() && !call.has_k_begin()) {
    return true;
  }
  const char* const form = call.paged() ? "block_table" : "k_begin";
  if (call.paged() && call.has_k_begin()) {
    raise_value_error("k_begin and block_table are both set; keys lie in ranges or in pages");
  }
  if (!call.cu_seqlens_k.is_none()) {
    raise_value_error(
        "cu_seqlens_k is set; it must be None with %s: seqused_k gives the number of "
        "keys",
        form);
  }
  if (call.seqused_k.is_none()) {
    raise_value_error("seqused_k is None; with %s it gives the number of keys of each sequence",
                      form);
  }
  return false;
}

inline void read_packed(const Call& call, Request* request) {
  const TensorView &q = request->q, &k = request->k, &v = request->v;
  require_rank(q, 3, "[total_q, heads_q, head_dim]");
  if (request->paged) {
    require_rank(k, 4, "[pages, page_size, heads_k, head_dim]");
    require_rank(v, 4, "[pages, page_size, heads_k, head_dim_v]");
    require_size(v, 0, "page count", k.shape[0], "k");
    require_size(v, 1, "page size", k.shape[1], "k");
  } else {
    require_rank(k, 3, "[total_k, heads_k, head_dim]");
    require_rank(v, 3, "[total_k, heads_k, head_dim_v]");
    require_size(v, 0, "total length", k.shape[0], "k");
  }
  std::int64_t bounds_q = 0;
  std::int64_t bounds_k = 0;
  ForwardTensors& tensors = request->tensors;
  tensors.cu_seqlens_q = read_lengths(call.cu_seqlens_q, "cu_seqlens_q", q, &bounds_q);
  if (bounds_q < 1) {
    raise_value_error("cu_seqlens_q is empty; it must hold batch + 1 entries");
  }
  if (places_keys(call)) {
    tensors.cu_seqlens_k = read_lengths(call.cu_seqlens_k, "cu_seqlens_k", q, &bounds_k);
    if (bounds_k != bounds_q) {
      raise_value_error("cu_seqlens_k has %lld entries; it must have as many as cu_seqlens_q, %lld",
                        static_cast<long long>(bounds_k), static_cast<long long>(bounds_q));
    }
  }
  ForwardProblem& problem = request->problem;
  problem.packed_q = true;
  problem.packed_k = !request->paged;
  problem.batch = bounds_q - 1;
  problem.seqlen_q = call.max_seqlen_q;
  problem.seqlen_k = call.max_seqlen_k;
  problem.total_q = q.shape[0];
  problem.total_k = request->paged ? k.shape[0] * k.shape[1] : k.shape[0];
}

// Paged K and V.
inline void read_pages(const Call& call, Request* request) {
  const TensorView table = read_tensor(call.block_table, "block_table");
  if (table.code != dlpack::kInt || table.bits != 32) {
    raise_type_error("block_table has dtype %s; it must be int32",
                     dtype_text(table.code, table.bits).c_str());
  }
  require_same_device(table, request->q);
  require_rank(table, 2, "[batch, pages of the longest sequence]");
  ForwardProblem& problem = request->problem;
  if (table.shape[0] != problem.batch) {
    raise_value_error("block_table has %lld rows; it must have one per sequence, %lld",
                      static_cast<long long>(table.shape[0]),
                      static_cast<long long>(problem.batch));
  }
  if (table.shape[1] > 1 && table.stride[1] != 1) {
    raise_value_error("block_table has stride %lld along its last axis; it must be 1",
                      static_cast<long long>(table.stride[1]));
  }
  problem.pages = request->k.shape[0];
  problem.page_size = request->k.shape[1];
  problem.max_pages = table.shape[1];
  problem.table_stride = table.shape[0] > 1 ? table.stride[0] : table.shape[1];
  if (problem.page_size == 0) {
    raise_value_error("k has pages of 0 slots; they must have 1 or more");
  }
  request->tensors.block_table = static_cast<const std::int32_t*>(table.data);
}

inline const std::int32_t* read_used(nb::handle object, const char* name, const Request& request) {
  std::int64_t count = 0;
  const std::int32_t* lengths = read_lengths(object, name, request.q, &count);
  if (count != request.problem.batch) {
    raise_value_error("%s has %lld entries; it must have one per sequence, %lld", name,
                      static_cast<long long>(count), static_cast<long long>(request.problem.batch));
  }
  return lengths;
}

inline void read_used_lengths(const Call& call, Request* request) {
  ForwardProblem& problem = request->problem;
  problem.has_seqused_q = !call.seqused_q.is_none();
  problem.has_seqused_k = !call.seqused_k.is_none();
  if (problem.has_seqused_q) {
    request->tensors.seqused_q = read_used(call.seqused_q, "seqused_q", *request);
  }
  if (problem.has_seqused_k) {
    request->tensors.seqused_k = read_used(call.seqused_k, "seqused_k", *request);
  }
  problem.has_k_begin = call.has_k_begin();
  if (problem.has_k_begin) {
    request->tensors.k_begin = read_used(call.k_begin, "k_begin", *request);
  }
  problem.has_mask_shift = !call.mask_shift.is_none();
  if (problem.has_mask_shift) {
    request->tensors.mask_shift = read_used(call.mask_shift, "mask_shift", *request);
  }
  if (request->paged) {
    read_pages(call, request);
  }
}

// Before a run: pages are read in place, because no call copies a cache.
inline void require_readable_pages(const Request& request) {
  for (const TensorView* view : {&request.k, &request.v}) {
    if (view->stride[3] != 1 || *std::min_element(view->stride, view->stride + 4) < 0) {
      raise_value_error(
          "%s has strides %s; pages are read where they are, and need stride 1 along "
          "their last axis",
          view->name, shape_text(view->stride, view->rank).c_str());
    }
  }
}

inline Request make_request(const TensorView& q, const TensorView& k, const TensorView& v,
                            const Call& call, bool takes_codes) {
  Request request;
  request.q = q;
  request.k = k;
  request.v = v;
  ForwardProblem& problem = request.problem;
  problem.dtype = parse_dtype(request.q, takes_codes);
  require_like(request.k, request.q);
  require_like(request.v, request.q);
  request.device = parse_device(request.q);
  read_options(call, &request);
  if (request.packed) {
    read_packed(call, &request);
  } else {
    read_dense(&request);
  }
  const int heads = request.packed ? 1 : 2;  // axis
  const int key_heads = request.k.rank - 2;
  require_size(request.k, key_heads + 1, "head_dim", request.q.shape[heads + 1], "q");
  require_size(request.v, key_heads, "head count", request.k.shape[key_heads], "k");
  problem.heads_q = request.q.shape[heads];
  problem.heads_k = request.k.shape[key_heads];
  problem.head_dim = request.q.shape[heads + 1];
  problem.head_dim_v = request.v.shape[key_heads + 1];
  read_used_lengths(call, &request);
  problem.scale = call.scale_for(problem.head_dim);
  problem.q = layout_of(request.q);
  problem.k = layout_of(request.k);
  problem.v = layout_of(request.v);
  problem.o = fresh_layout(request.q, problem.head_dim_v);
  request.tensors.q = request.q.data;
  request.tensors.k = request.k.data;
  request.tensors.v = request.v.data;
  return request;
}

// `takes_codes`: whether q, k and v may be float8_e4m3fn.
inline Request read_request(nb::handle q, nb::handle k, nb::handle v, const Call& call,
                            bool takes_codes = false) {
  return make_request(read_tensor(q, "q"), read_tensor(k, "k"), read_tensor(v, "v"), call,
                      takes_codes);
}

inline void require_query_shape(const TensorView& view, const Request& request,
                                std::int64_t head_dim) {
  const ForwardProblem& problem = request.problem;
  if (request.packed) {
    require_shape(view, {problem.total_q, problem.heads_q, head_dim});
  } else {
    require_shape(view, {problem.batch, problem.seqlen_q, problem.heads_q, head_dim});
  }
}

inline void require_query_rows(const TensorView& view, const Request& request,
                               std::int64_t head_dim) {
  require_like(view, request.q);
  require_query_shape(view, request, head_dim);
}

inline void require_key_rows(const TensorView& view, const Request& request,
                             std::int64_t head_dim) {
  const ForwardProblem& problem = request.problem;
  require_like(view, request.q);
  if (request.paged) {
    require_shape(view, {problem.pages, problem.page_size, problem.heads_k, head_dim});
  } else if (request.packed) {
    require_shape(view, {problem.total_k, problem.heads_k, head_dim});
  } else {
    require_shape(view, {problem.batch, problem.seqlen_k, problem.heads_k, head_dim});
  }
}

inline void require_lse(const TensorView& view, const Request& request) {
  const ForwardProblem& problem = request.problem;
  require_float32(view);
  require_same_device(view, request.q);
  if (request.packed) {
    require_shape(view, {problem.heads_q, problem.total_q});
  } else {
    require_shape(view, {problem.batch, problem.heads_q, problem.seqlen_q});
  }
}

inline void require_max_logit(const TensorView& view, const Request& request) {
  require_float32(view);
  require_same_device(view, request.q);
  require_shape(view, {request.problem.batch, request.problem.heads_q});
}

// A tensor that kernels write in its own strides: they cannot write a copy of it. That its elements
// do not overlap is a rule of the problem.
inline void require_writable_rows(const TensorView& view) {
  bool expressible =
      view.stride[view.rank - 1] == 1 && view.base_align_bytes() * 8 >= static_cast<int>(view.bits);
  for (int axis = 0; axis < view.rank; ++axis) {
    expressible = expressible && view.stride[axis] >= 0;
  }
  if (!expressible) {
    raise_value_error(
        "%s has strides %s; it is written, and needs stride 1 along its last axis, no negative "
        "stride and an address that is a multiple of its element size",
        view.name, shape_text(view.stride, view.rank).c_str());
  }
}

inline void require_contiguous(const TensorView& view) {
  if (!view.contiguous()) {
    raise_value_error("%s has strides %s; it is written and must be contiguous", view.name,
                      shape_text(view.stride, view.rank).c_str());
  }
}

}  // namespace pantile::python
