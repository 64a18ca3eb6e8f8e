// Decode, append and their schedule for Python: outputs, plans and runs.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_request.h"
#include "runs.h"

namespace pantile::python {

template <class Plan>
Plan find_plan(const KvRequest& request) {
  const DeviceProps device = properties_of(request.device);
  Status status;
  const Plan* const found =
      plan_cache<KvProblem, Plan>().find(request.problem, device, request.options, &status);
  raise_unless_ok(status);
  return *found;
}

// Arrays in host memory are always checked: a wrong entry would make a kernel read elsewhere.
inline void check_host_cache(const KvRequest& request) {
  if (request.device.type == DeviceType::cpu) {
    raise_unless_ok(check_cache(request.problem, request.tensors));
  }
}

inline void read_decode_outputs(nb::handle o, nb::handle lse, const TensorView& q,
                                KvRequest* request) {
  KvProblem& p = request->problem;
  const TensorView output = read_tensor(o, "o");
  p.output_f32 = output.code == dlpack::kFloat && output.bits == 32 && p.dtype != DType::f32;
  if (p.output_f32) {
    require_same_device(output, q);
  } else {
    require_like(output, q);
  }
  require_rows_of(output, q, p.head_dim_v);
  require_contiguous(output);
  p.o = layout_of(output);
  request->tensors.o = output.data;
  p.wants_lse = !lse.is_none();
  if (p.wants_lse) {
    const TensorView rows = read_tensor(lse, "lse");
    require_float32(rows);
    require_same_device(rows, q);
    if (p.packed_q) {
      require_shape(rows, {p.heads_q, p.total_q});
    } else {
      require_shape(rows, {p.batch, p.heads_q, p.seqlen_q});
    }
    require_contiguous(rows);
    request->tensors.lse = static_cast<float*>(rows.data);
  }
}

inline void read_decode_extras(nb::handle tree_mask, nb::handle sinks, const TensorView& q,
                               KvRequest* request) {
  KvProblem& p = request->problem;
  p.has_tree_mask = !tree_mask.is_none();
  if (p.has_tree_mask) {
    const TensorView mask = read_tensor(tree_mask, "tree_mask");
    if (mask.code != dlpack::kInt || mask.bits != 64) {
      raise_type_error("tree_mask has dtype %s; it must be int64",
                       dtype_text(mask.code, mask.bits).c_str());
    }
    require_same_device(mask, q);
    if (p.packed_q) {
      require_shape(mask, {p.total_q});
    } else {
      require_shape(mask, {p.batch, p.seqlen_q});
    }
    if (!mask.contiguous()) {
      raise_value_error("tree_mask has strides %s; it must be contiguous",
                        shape_text(mask.stride, mask.rank).c_str());
    }
    request->tensors.tree_mask = static_cast<const std::int64_t*>(mask.data);
  }
  p.has_sinks = !sinks.is_none();
  if (p.has_sinks) {
    const TensorView view = read_tensor(sinks, "sinks");
    require_float32(view);
    require_same_device(view, q);
    require_shape(view, {p.heads_q});
    if (!view.contiguous()) {
      raise_value_error("sinks has stride %lld; it must be contiguous",
                        static_cast<long long>(view.stride[0]));
    }
    request->tensors.sinks = static_cast<const float*>(view.data);
  }
}

inline void decode(nb::handle q, nb::handle o, nb::handle lse, const nb::tuple& cache,
                   const nb::tuple& numbers, nb::handle tree_mask, nb::handle sinks,
                   nb::handle schedule) {
  const TensorView query = read_tensor(q, "q");
  KvRequest request = read_decode(query, cache, read_decode_numbers(numbers));
  read_decode_outputs(o, lse, query, &request);
  read_decode_extras(tree_mask, sinks, query, &request);
  check_host_cache(request);
  const auto plan = find_plan<DecodePlan>(request);
  if (!schedule.is_none()) {
    request.tensors.schedule =
        read_ints(schedule, "schedule", request, plan.schedule_ints, "what this call's plan has");
  }
  void* const stream = stream_of(request.device);
  const Lent workspace = lend(plan.workspace, request.device, stream, Pass::decode);
  Status status;
  {
    const Unlocked unlocked;
    status = run_decode(plan, request.tensors, workspace.pointer, stream);
  }
  if (status.ok()) {
    check_after_run(plan.workspace, workspace, request.device, stream, Pass::decode);
  }
  if (request.device.type == DeviceType::cpu) {
    cpu_scratch().trim();
  }
  raise_unless_ok(status);
}

// The entries of a schedule for calls of this form; with a tensor, they are written.
inline std::int64_t decode_schedule(nb::handle q, const nb::tuple& cache, const nb::tuple& numbers,
                                    bool tree, bool sinks, bool output_f32, bool lse,
                                    nb::handle schedule) {
  const TensorView query = read_tensor(q, "q");
  KvRequest request = read_decode(query, cache, read_decode_numbers(numbers));
  request.problem.has_tree_mask = tree;
  request.problem.has_sinks = sinks;
  request.problem.output_f32 = output_f32 && request.problem.dtype != DType::f32;
  request.problem.wants_lse = lse;
  const auto plan = find_plan<DecodePlan>(request);
  if (schedule.is_none()) {
    return plan.schedule_ints;
  }
  check_host_cache(request);
  const std::int32_t* const data =
      read_ints(schedule, "schedule", request, plan.schedule_ints, "what this call's plan has");
  void* const stream = stream_of(request.device);
  Status status;
  {
    const Unlocked unlocked;
    status = run_schedule(plan, request.tensors, const_cast<std::int32_t*>(data), stream);
  }
  raise_unless_ok(status);
  return plan.schedule_ints;
}

inline void read_rotary(nb::handle cos, nb::handle sin, bool interleaved, KvRequest* request) {
  if (cos.is_none()) {
    return;
  }
  KvProblem& p = request->problem;
  const TensorView cosines = read_tensor(cos, "rotary cos");
  const TensorView sines = read_tensor(sin, "rotary sin");
  require_same_device(cosines, request->k);
  require_like(sines, cosines);
  require_rank(cosines, 2, "[positions, rotary_dim / 2]");
  require_shape(sines, {cosines.shape[0], cosines.shape[1]});
  p.rotary_dtype = parse_dtype(cosines, false);
  p.rotary_dim = 2 * cosines.shape[1];
  p.rotary_positions = cosines.shape[0];
  p.rotary_stride = cosines.stride[0];
  p.rotary_interleaved = interleaved;
  const bool dense = cosines.stride[1] == 1 && sines.stride[1] == 1;
  if (cosines.shape[1] > 1 && (!dense || sines.stride[0] != cosines.stride[0])) {
    raise_value_error("rotary cos and sin have strides %s and %s; they must be alike, 1 last",
                      shape_text(cosines.stride, 2).c_str(), shape_text(sines.stride, 2).c_str());
  }
  request->tensors.rotary_cos = cosines.data;
  request->tensors.rotary_sin = sines.data;
}

inline void read_new_rows(const TensorView& k_new, nb::handle v_new, std::int64_t longest,
                          KvRequest* request) {
  KvProblem& p = request->problem;
  require_rank(
      k_new, p.packed_new ? 3 : 4,
      p.packed_new ? "[total_new, heads_k, head_dim]" : "[batch, seqlen_new, heads_k, head_dim]");
  const int heads = k_new.rank - 2;
  require_size(k_new, heads, "head count", p.heads_k, "cache.k");
  require_size(k_new, heads + 1, "head_dim", p.head_dim, "cache.k");
  if (p.packed_new) {
    p.seqlen_new = longest;
    p.total_new = k_new.shape[0];
  } else {
    require_size(k_new, 0, "batch size", p.batch, "lengths");
    p.seqlen_new = k_new.shape[1];
    p.total_new = p.batch * p.seqlen_new;
  }
  p.k_new = layout_of(k_new);
  request->tensors.k_new = k_new.data;
  if (v_new.is_none() != p.v_in_k) {
    raise_value_error("v_new is %s; the cache has %s", v_new.is_none() ? "None" : "set",
                      p.v_in_k ? "no values of its own" : "values");
  }
  if (!p.v_in_k) {
    const TensorView values = read_tensor(v_new, "v_new");
    require_like(values, k_new);
    require_rows_of(values, k_new, p.head_dim_v);
    p.v_new = layout_of(values);
    request->tensors.v_new = values.data;
  }
}

// With q_rotated: q, rotated.
inline void append(const nb::tuple& cache, nb::handle k_new, nb::handle v_new, nb::handle q,
                   nb::handle q_rotated, nb::handle cos, nb::handle sin, bool interleaved,
                   std::int64_t max_seqlen_q, std::int64_t max_seqlen_new, bool slots_before_heads,
                   std::int64_t head_dim_v, nb::handle backend_name) {
  Backend backend = Backend::automatic;
  read_field(backend_name, "backend", &backend);
  const TensorView rows = read_tensor(k_new, "k_new");
  KvRequest request = read_cache(cache, rows, slots_before_heads, head_dim_v, backend);
  read_new_rows(rows, v_new, max_seqlen_new, &request);
  read_rotary(cos, sin, interleaved, &request);
  KvProblem& p = request.problem;
  p.heads_q = p.heads_k;
  p.rotates_q = !q_rotated.is_none();
  if (p.rotates_q) {
    const TensorView query = read_tensor(q, "q");
    require_like(query, rows);
    read_query(query, max_seqlen_q, &request);
    const TensorView rotated = read_tensor(q_rotated, "q_rotated");
    require_like(rotated, query);
    require_rows_of(rotated, query, p.head_dim);
    require_contiguous(rotated);
    p.q_rotated = layout_of(rotated);
    request.tensors.q_rotated = rotated.data;
  } else {
    p.packed_q = false;
    request.tensors.cu_seqlens_q = nullptr;
  }
  check_host_cache(request);
  const auto plan = find_plan<AppendPlan>(request);
  void* const stream = stream_of(request.device);
  Status status;
  {
    const Unlocked unlocked;
    status = run_append(plan, request.tensors, stream);
  }
  raise_unless_ok(status);
}

// Checked mode on a GPU: the same arrays in host memory, in the places of the cache's tuple; the
// cache itself is not read.
inline void check_cache_contents(const nb::tuple& arrays, std::int64_t blocks, std::int64_t slots,
                                 std::int64_t total_q, std::int64_t max_seqlen_q,
                                 std::int64_t total_new, std::int64_t seqlen_new) {
  KvRequest request;
  KvProblem& p = request.problem;
  request.k.device_type = dlpack::kCpu;
  request.k.name = "cache.k";
  request.k.rank = 4;
  request.k.shape[0] = blocks;
  request.k.shape[1] = slots;
  request.tensors.lengths = read_lengths(arrays[kCacheLengths], "lengths", request.k, &p.batch);
  read_block_table(arrays[kCacheBlockTable], &request);
  p.seqlen_q = max_seqlen_q;
  p.total_q = total_q;
  p.seqlen_new = seqlen_new;
  p.total_new = total_new;
  read_places(arrays, &request);
  raise_unless_ok(check_cache(p, request.tensors));
}

// What decode would do: {"kernel": name or None, "reason", "tile_q", "tile_k", "blocks",
// "workspace_bytes", "schedule_ints", "rows"}.
inline nb::dict explain_decode(nb::handle q, const nb::tuple& cache, const nb::tuple& numbers,
                               bool tree, bool sinks, bool output_f32, bool lse) {
  const TensorView query = read_tensor(q, "q");
  KvRequest request = read_decode(query, cache, read_decode_numbers(numbers));
  request.problem.has_tree_mask = tree;
  request.problem.has_sinks = sinks;
  request.problem.output_f32 = output_f32 && request.problem.dtype != DType::f32;
  request.problem.wants_lse = lse;
  const DeviceProps device = properties_of(request.device);
  DecodePlan plan;
  const Status status = plan_decode(request.problem, device, request.options, &plan);
  if (status.code() == StatusCode::invalid_argument) {
    raise_unless_ok(status);
  }
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int rows = pantile::explain_decode(request.problem, device, request.options,
                                           verdicts.data(), static_cast<int>(verdicts.size()));
  verdicts.resize(static_cast<std::size_t>(rows));
  nb::dict answer;
  answer["rows"] = verdict_list(verdicts);
  answer["reason"] = status.message();
  answer["kernel"] = status.ok() ? nb::object(nb::str(plan.kernel->name)) : nb::none();
  answer["tile_q"] = plan.tile_q;
  answer["tile_k"] = plan.tile_k;
  answer["blocks"] = plan.blocks;
  answer["workspace_bytes"] = plan.workspace.bytes;
  answer["schedule_ints"] = plan.schedule_ints;
  return answer;
}

inline void bind_kv(nb::module_& module) {
  using namespace nb::literals;
  module.def("decode", &decode, "q"_a, "o"_a, "lse"_a.none(), "cache"_a, "numbers"_a,
             "tree_mask"_a.none(), "sinks"_a.none(), "schedule"_a.none());
  module.def("decode_schedule", &decode_schedule, "q"_a, "cache"_a, "numbers"_a, "tree"_a,
             "sinks"_a, "output_f32"_a, "lse"_a, "schedule"_a.none());
  module.def("explain_decode", &explain_decode, "q"_a, "cache"_a, "numbers"_a, "tree"_a, "sinks"_a,
             "output_f32"_a, "lse"_a);
  module.def("append", &append, "cache"_a, "k_new"_a, "v_new"_a.none(), "q"_a.none(),
             "q_rotated"_a.none(), "cos"_a.none(), "sin"_a.none(), "interleaved"_a,
             "max_seqlen_q"_a, "max_seqlen_new"_a, "slots_before_heads"_a, "head_dim_v"_a,
             "backend"_a);
  module.def("check_cache", &check_cache_contents, "arrays"_a, "blocks"_a, "slots"_a, "total_q"_a,
             "max_seqlen_q"_a, "total_new"_a, "seqlen_new"_a);
}

}  // namespace pantile::python
