// The rules of decode and append problems (kv.h) and of their tensors, in the order of the fields.
#include <cinttypes>
#include <cmath>
#include <cstdint>

#include "host/rules.h"
#include "host/shape.h"
#include "host/validate.h"
#include "pantile/kv.h"

namespace pantile::host {
namespace {

constexpr std::int64_t kMaxLength = (std::int64_t{1} << 29) - 1;  // core/geometry.h
constexpr std::int64_t kMaxCount = (std::int64_t{1} << 31) - 1;   // int32 page numbers and offsets
constexpr StatusCode kInvalid = StatusCode::invalid_argument;
constexpr const char* kCacheAxes[kAxes] = {"block", "slot", "head"};

Status between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be from %" PRId64 " to %" PRId64,
                         name, value, low, high);
  }
  return Status();
}

Status dtype_rule(const KvProblem& p) {
  if (p.dtype == DType::f32 || p.dtype == DType::f16 || p.dtype == DType::bf16) {
    return Status();
  }
  return Status::error(kInvalid, "dtype is %s (%d); it must be f32 (0), f16 (1) or bf16 (2)",
                       dtype_name(p.dtype), static_cast<int>(p.dtype));
}

Status size_rules(const KvProblem& p) {
  return first_error({between("batch", p.batch, 0, kMaxCount),
                      between("heads_q", p.heads_q, 0, kMaxCount),
                      between("heads_k", p.heads_k, 0, kMaxCount),
                      between("head_dim", p.head_dim, 1, kMaxKvHeadDim),
                      between("head_dim_v", p.head_dim_v, 1, kMaxHeadDim)});
}

Status heads_rule(const KvProblem& p) {
  const bool both_zero = p.heads_q == 0 && p.heads_k == 0;
  if (!both_zero && (p.heads_q == 0 || p.heads_k == 0 || p.heads_q % p.heads_k != 0)) {
    return Status::error(kInvalid,
                         "heads_q is %" PRId64 " and heads_k is %" PRId64
                         "; heads_q must be a positive multiple of heads_k, or both 0",
                         p.heads_q, p.heads_k);
  }
  if (p.batch * p.heads_q > kMaxCount) {
    return Status::error(kInvalid, "batch * heads_q is %" PRId64 "; it must be at most %" PRId64,
                         p.batch * p.heads_q, kMaxCount);
  }
  if (p.v_in_k && p.head_dim_v > p.head_dim) {
    return Status::error(
        kInvalid, "head_dim_v is %" PRId64 "; with v_in_k it must be at most head_dim, %" PRId64,
        p.head_dim_v, p.head_dim);
  }
  return Status();
}

Status rows_rule(const char* length_name, const char* total_name, std::int64_t length, bool packed,
                 std::int64_t total, std::int64_t batch) {
  Status status = between(length_name, length, 0, kMaxLength);
  if (!status.ok()) {
    return status;
  }
  if (!packed) {
    return total == 0 || total == batch * length
               ? Status()
               : Status::error(kInvalid,
                               "%s is %" PRId64
                               "; unless packed it must be 0 or batch * %s, %" PRId64,
                               total_name, total, length_name, batch * length);
  }
  status = between(total_name, total, 0, batch == 0 ? 0 : kMaxCount);
  return status.ok() ? packed_length_rule(length_name, length, batch, total_name, total) : status;
}

Status new_rows_rule(const KvProblem& p) {
  return rows_rule("seqlen_new", "total_new", p.seqlen_new, p.packed_new, p.total_new, p.batch);
}
// Decode reads no rows of new K.
Status new_length_rule(const KvProblem& p) {
  return between("seqlen_new", p.seqlen_new, 0, kMaxLength);
}

Status cache_rows_rule(const char* name, std::int64_t rows, const KvProblem& p) {
  if (rows < p.batch && !p.has_cache_index) {
    return Status::error(
        kInvalid, "%s is %" PRId64 "; without cache_index it must be at least batch, %" PRId64,
        name, rows, p.batch);
  }
  return Status();
}

Status paged_rules(const KvProblem& p) {
  Status status = first_error({between("page_size", p.page_size, 1, kMaxLength),
                               between("table_rows", p.table_rows, 0, kMaxCount),
                               between("table_pages", p.table_pages, 0, kMaxCount),
                               cache_rows_rule("table_rows", p.table_rows, p)});
  if (!status.ok()) {
    return status;
  }
  if (p.block_slots != 0) {
    return Status::error(kInvalid, "block_slots is %" PRId64 "; it must be 0 when page_size is set",
                         p.block_slots);
  }
  if (p.table_rows > 1 && p.table_stride < p.table_pages) {
    return Status::error(kInvalid,
                         "table_stride is %" PRId64 "; it must be at least table_pages, %" PRId64,
                         p.table_stride, p.table_pages);
  }
  if (p.table_pages > kMaxLength / p.page_size) {
    return Status::error(kInvalid,
                         "table_pages is %" PRId64 " and page_size %" PRId64
                         "; their product must be at most %" PRId64,
                         p.table_pages, p.page_size, kMaxLength);
  }
  return Status();
}

Status cache_rules(const KvProblem& p) {
  Status status = between("blocks", p.blocks, 0, kMaxCount);
  if (!status.ok()) {
    return status;
  }
  if (p.page_size != 0) {
    return paged_rules(p);
  }
  return first_error({between("block_slots", p.block_slots, 0, kMaxLength),
                      cache_rows_rule("blocks", p.blocks, p)});
}

Status format_rules(const KvProblem& p) {
  if (p.format != CacheFormat::plain && p.format != CacheFormat::e4m3 &&
      p.format != CacheFormat::int8) {
    return Status::error(kInvalid, "format is %d; it must be plain (0), e4m3 (1) or int8 (2)",
                         static_cast<int>(p.format));
  }
  if (p.scale_kind != CacheScale::none && p.scale_kind != CacheScale::head &&
      p.scale_kind != CacheScale::token) {
    return Status::error(kInvalid, "scale_kind is %d; it must be none (0), head (1) or token (2)",
                         static_cast<int>(p.scale_kind));
  }
  const bool fits = p.format == CacheFormat::plain  ? p.scale_kind == CacheScale::none
                    : p.format == CacheFormat::int8 ? p.scale_kind == CacheScale::token
                                                    : true;
  if (!fits) {
    return Status::error(kInvalid, "scale_kind is %s; a cache of format %s needs %s",
                         cache_scale_name(p.scale_kind), cache_format_name(p.format),
                         p.format == CacheFormat::plain ? "none" : "token");
  }
  const auto negative = [](const ScaleLayout& layout) {
    return layout.block < 0 || layout.slot < 0 || layout.head < 0;
  };
  if (negative(p.scale_k) || negative(p.scale_v)) {
    return Status::error(kInvalid, "%s has a negative stride; strides must be 0 or more",
                         negative(p.scale_k) ? "scale_k" : "scale_v");
  }
  return Status();
}

DType element(const KvProblem& p) {
  return p.format == CacheFormat::plain ? p.dtype : DType::e4m3;  // of as many bytes
}

Layout as_layout(const CacheLayout& cache) {
  return Layout{cache.block, cache.slot, cache.head, cache.base_align_bytes};
}

Status cache_layouts_rule(const KvProblem& p, bool written) {
  const auto rule = written ? output_layout : input_layout;
  Status status = rule("k", as_layout(p.k), cache_shape(p, p.head_dim), element(p), kCacheAxes);
  return !status.ok() || p.v_in_k
             ? status
             : rule("v", as_layout(p.v), cache_shape(p, p.head_dim_v), element(p), kCacheAxes);
}

Status common_rules(const KvProblem& p) {
  for (const auto rule : {dtype_rule, size_rules, heads_rule, cache_rules, format_rules}) {
    Status status = rule(p);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status query_rows_rule(const KvProblem& p) {
  return rows_rule("seqlen_q", "total_q", p.seqlen_q, p.packed_q, p.total_q, p.batch);
}

Status window_rule(const char* name, std::int64_t side) {
  if (side < kUnbounded) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be 0 or more, or -1 for unbounded",
                         name, side);
  }
  return Status();
}

Status mask_rules(const KvProblem& p) {
  Status status = first_error(
      {window_rule("window_left", p.window_left), window_rule("window_right", p.window_right)});
  if (!status.ok() || !p.has_tree_mask) {
    return status;
  }
  if (p.seqlen_q > kMaxTreeQueries) {
    return Status::error(kInvalid,
                         "seqlen_q is %" PRId64 "; with a tree mask it must be at most %d",
                         p.seqlen_q, kMaxTreeQueries);
  }
  if (p.window_left != kUnbounded) {
    return Status::error(kInvalid, "window_left is %" PRId64 "; with a tree mask it must be -1",
                         p.window_left);
  }
  return Status();
}

Status score_rules(const KvProblem& p) {
  if (!std::isfinite(p.softcap) || p.softcap < 0.0f) {
    return Status::error(kInvalid, "softcap is %g; it must be 0 (none) or positive and finite",
                         static_cast<double>(p.softcap));
  }
  if (!std::isfinite(p.scale)) {
    return Status::error(kInvalid, "scale is %g; it must be finite", static_cast<double>(p.scale));
  }
  return Status();
}

Status split_rule(const KvProblem& p) {
  switch (p.split) {
    case KvSplit::automatic:
    case KvSplit::invariant:
      return p.split_keys == 0
                 ? Status()
                 : Status::error(kInvalid,
                                 "split_keys is %" PRId64 "; it must be 0 unless split is fixed",
                                 p.split_keys);
    case KvSplit::fixed:
      return p.split_keys > 0 && p.split_keys % kSplitGranule == 0 && p.split_keys <= kMaxLength
                 ? Status()
                 : Status::error(kInvalid,
                                 "split_keys is %" PRId64 "; it must be a positive multiple of %d",
                                 p.split_keys, kSplitGranule);
  }
  return Status::error(kInvalid,
                       "split is %d; it must be automatic (0), invariant (1) or fixed (2)",
                       static_cast<int>(p.split));
}

Status decode_layouts_rule(const KvProblem& p) {
  return first_error({input_layout("q", p.q, kv_query_shape(p, p.head_dim), p.dtype),
                      output_layout("o", p.o, kv_query_shape(p, p.head_dim_v), output_dtype(p)),
                      cache_layouts_rule(p, false)});
}

Status rotary_rules(const KvProblem& p) {
  if (p.rotary_dim < 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) {
    return Status::error(
        kInvalid, "rotary_dim is %" PRId64 "; it must be even and from 0 to head_dim, %" PRId64,
        p.rotary_dim, p.head_dim);
  }
  if (p.rotary_dim == 0) {
    return p.rotates_q ? Status::error(kInvalid, "rotates_q is true; it needs rotary_dim > 0")
                       : Status();
  }
  if (p.rotary_dtype != DType::f32 && p.rotary_dtype != p.dtype) {
    return Status::error(kInvalid, "rotary_dtype is %s; it must be f32 or dtype, %s",
                         dtype_name(p.rotary_dtype), dtype_name(p.dtype));
  }
  if (p.rotary_positions > 1 && p.rotary_stride < 0) {
    return Status::error(kInvalid, "rotary_stride is %" PRId64 "; it must be 0 or more",
                         p.rotary_stride);
  }
  return between("rotary_positions", p.rotary_positions, 1, kMaxCount);
}

Status append_layouts_rule(const KvProblem& p) {
  Status status = input_layout("k_new", p.k_new, kv_new_shape(p, p.head_dim), p.dtype);
  if (status.ok() && !p.v_in_k) {
    status = input_layout("v_new", p.v_new, kv_new_shape(p, p.head_dim_v), p.dtype);
  }
  if (status.ok() && p.rotates_q) {
    const TensorShape shape = kv_query_shape(p, p.head_dim);
    status = first_error({input_layout("q", p.q, shape, p.dtype),
                          output_layout("q_rotated", p.q_rotated, shape, p.dtype)});
  }
  return status.ok() ? cache_layouts_rule(p, true) : status;
}

}  // namespace

Status validate_decode(const KvProblem& p) {
  for (const auto rule : {common_rules, query_rows_rule, new_length_rule, mask_rules, score_rules,
                          split_rule, decode_layouts_rule}) {
    Status status = rule(p);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status validate_append(const KvProblem& p) {
  Status status = first_error({common_rules(p), rotary_rules(p)});
  if (status.ok() && p.rotates_q) {
    status = query_rows_rule(p);
  }
  if (status.ok()) {
    status = new_rows_rule(p);
  }
  return status.ok() ? append_layouts_rule(p) : status;
}

namespace {

Status required_pointer(const char* name, const void* pointer, bool needed) {
  if (needed && pointer == nullptr) {
    return Status::error(kInvalid, "%s is null; it must be set", name);
  }
  return Status();
}

Status cache_pointers(const KvProblem& p, const KvTensors& t) {
  const bool no_cache = cache_shape(p, p.head_dim).empty();
  const bool scaled = p.scale_kind != CacheScale::none;
  return first_error({
      tensor_pointer("k", t.k, as_layout(p.k), no_cache),
      p.v_in_k ? Status() : tensor_pointer("v", t.v, as_layout(p.v), no_cache),
      required_pointer("scale_k", t.scale_k, scaled && !no_cache),
      required_pointer("scale_v", t.scale_v, scaled && !no_cache && !p.v_in_k),
      required_pointer("lengths", t.lengths, p.batch > 0),
      optional_pointer("cu_seqlens_new", t.cu_seqlens_new, p.packed_new, "packed_new"),
      required_pointer("block_table", t.block_table,
                       p.page_size > 0 && p.table_rows > 0 && p.table_pages > 0),
      optional_pointer("cache_index", t.cache_index, p.has_cache_index, "has_cache_index"),
      optional_pointer("leftpad", t.leftpad, p.has_leftpad, "has_leftpad"),
  });
}

}  // namespace

Status validate_decode_tensors(const KvProblem& p, const KvTensors& t) {
  const bool no_rows = kv_query_shape(p, p.head_dim).empty();
  return first_error({
      tensor_pointer("q", t.q, p.q, no_rows),
      tensor_pointer("o", t.o, p.o, no_rows),
      required_pointer("lse", t.lse, p.wants_lse && !no_rows),
      cache_pointers(p, t),
      optional_pointer("cu_seqlens_q", t.cu_seqlens_q, p.packed_q, "packed_q"),
      no_rows ? Status()
              : optional_pointer("tree_mask", t.tree_mask, p.has_tree_mask, "has_tree_mask"),
      no_rows ? Status() : optional_pointer("sinks", t.sinks, p.has_sinks, "has_sinks"),
  });
}

Status validate_append_tensors(const KvProblem& p, const KvTensors& t) {
  const bool no_rows = kv_query_shape(p, p.head_dim).empty();
  const bool no_keys = kv_new_shape(p, p.head_dim).empty();
  return first_error({
      tensor_pointer("k_new", t.k_new, p.k_new, no_keys),
      p.v_in_k ? Status() : tensor_pointer("v_new", t.v_new, p.v_new, no_keys),
      cache_pointers(p, t),
      required_pointer("rotary_cos", t.rotary_cos, p.rotary_dim > 0),
      required_pointer("rotary_sin", t.rotary_sin, p.rotary_dim > 0),
      p.rotates_q ? tensor_pointer("q", t.q, p.q, no_rows) : Status(),
      p.rotates_q ? tensor_pointer("q_rotated", t.q_rotated, p.q_rotated, no_rows) : Status(),
      p.rotates_q ? optional_pointer("cu_seqlens_q", t.cu_seqlens_q, p.packed_q, "packed_q")
                  : Status(),
  });
}

}  // namespace pantile::host
