#include "host/shape.h"

namespace pantile::host {
namespace {

Layout canonical_layout(const Layout& layout, const TensorShape& shape) {
  Layout result = layout;
  const std::int64_t row = shape.sizes[2] * shape.dim;
  if (shape.sizes[2] <= 1) {
    result.head = shape.dim;
  }
  if (shape.sizes[1] <= 1) {
    result.seq = row;
  }
  if (shape.sizes[0] <= 1) {
    result.batch = shape.sizes[1] * row;
  }
  return result;
}

}  // namespace

ForwardProblem canonical(const ForwardProblem& problem) {
  ForwardProblem result = problem;
  // The first row (i = 0) of the longest sequence sits sq - 1 before the last key at most, and the
  // last row sits at the last key, sk - 1 after the first one.
  // With a shift they may sit anywhere.
  if (!problem.has_mask_shift && problem.window_left >= problem.seqlen_k - 1) {
    result.window_left = kUnbounded;
  }
  if (!problem.has_mask_shift && problem.window_right >= problem.seqlen_q - 1) {
    result.window_right = kUnbounded;
  }
  if (!problem.packed_q) {
    result.total_q = problem.batch * problem.seqlen_q;
  }
  if (problem.page_size > 0) {
    result.total_k = problem.pages * problem.page_size;
  } else if (!problem.packed_k) {
    result.total_k = problem.batch * problem.seqlen_k;
  }
  result.q = canonical_layout(problem.q, query_shape(problem, problem.head_dim));
  result.k = canonical_layout(problem.k, key_shape(problem, problem.head_dim));
  result.v = canonical_layout(problem.v, key_shape(problem, problem.head_dim_v));
  result.o = canonical_layout(problem.o, query_shape(problem, problem.head_dim_v));
  result.variant = canonical_variant(problem);
  if (problem.dtype == DType::e4m3) {
    result.q = result.k = result.v = Layout{0, 0, 0, Layout().base_align_bytes};
  } else {
    result.fp8 = Fp8Format();
  }
  return result;
}

BackwardProblem canonical(const BackwardProblem& problem) {
  const ForwardProblem& forward = problem.forward;
  BackwardProblem result = problem;
  result.forward = canonical(forward);
  result.forward.num_splits = 1;  // how O and LSE were made does not matter
  result.grad_o = canonical_layout(problem.grad_o, query_shape(forward, forward.head_dim_v));
  result.grad_q = canonical_layout(problem.grad_q, query_shape(forward, forward.head_dim));
  result.grad_k = canonical_layout(problem.grad_k, key_shape(forward, forward.head_dim));
  result.grad_v = canonical_layout(problem.grad_v, key_shape(forward, forward.head_dim_v));
  return result;
}

ForwardProblem operands_only(const QuantizeProblem& problem) {
  ForwardProblem result = problem.forward;
  result.window_left = result.window_right = kUnbounded;
  result.scale = 1.0f;
  result.wants_lse = false;
  result.num_splits = 1;
  const std::int64_t row = result.heads_q * result.head_dim_v;
  result.o = Layout{result.seqlen_q * row, row, result.head_dim_v, 16};
  result.fp8.output = DType::bf16;
  result.fp8.exp = Fp8Exp::code;
  result.variant = Variant();
  return result;
}

QuantizeProblem canonical(const QuantizeProblem& problem) {
  QuantizeProblem result = problem;
  result.forward = canonical(operands_only(problem));
  result.q = canonical_layout(problem.q, query_shape(problem.forward, problem.forward.head_dim));
  result.k = canonical_layout(problem.k, key_shape(problem.forward, problem.forward.head_dim));
  result.v = canonical_layout(problem.v, key_shape(problem.forward, problem.forward.head_dim_v));
  return result;
}

namespace {

CacheLayout canonical_cache(const CacheLayout& layout, const TensorShape& shape) {
  const Layout given{layout.block, layout.slot, layout.head, layout.base_align_bytes};
  const Layout result = canonical_layout(given, shape);
  return CacheLayout{result.batch, result.seq, result.head, result.base_align_bytes};
}

// What decode and append both read.
KvProblem canonical_cache_only(const KvProblem& p) {
  KvProblem result = p;
  result.k = canonical_cache(p.k, cache_shape(p, p.head_dim));
  result.v =
      p.v_in_k ? CacheLayout{0, 0, 0, 16} : canonical_cache(p.v, cache_shape(p, p.head_dim_v));
  if (p.page_size == 0) {
    result.table_rows = result.table_pages = result.table_stride = 0;
  } else if (p.table_rows <= 1) {
    result.table_stride = p.table_pages;
  }
  if (p.scale_kind == CacheScale::none) {
    result.scale_k = result.scale_v = ScaleLayout();
  } else if (p.scale_kind == CacheScale::head) {
    result.scale_k.slot = result.scale_v.slot = 0;
  }
  if (p.v_in_k) {
    result.scale_v = ScaleLayout();
  }
  return result;
}

}  // namespace

KvProblem canonical_decode(const KvProblem& p) {
  const KvProblem defaults;
  KvProblem result = canonical_cache_only(p);
  result.total_new = 0;
  result.rotary_dim = result.rotary_positions = result.rotary_stride = 0;
  result.rotary_interleaved = result.rotates_q = false;
  result.rotary_dtype = DType::f32;
  result.k_new = result.v_new = result.q_rotated = defaults.k_new;
  result.q = canonical_layout(p.q, kv_query_shape(p, p.head_dim));
  result.o = canonical_layout(p.o, kv_query_shape(p, p.head_dim_v));
  if (!p.packed_q) {
    result.total_q = p.batch * p.seqlen_q;
  }
  if (p.window_left >= capacity(p) - 1) {
    result.window_left = kUnbounded;
  }
  if (p.has_tree_mask || p.window_right >= p.seqlen_q - 1) {
    result.window_right = kUnbounded;
  }
  return result;
}

KvProblem canonical_append(const KvProblem& p) {
  const KvProblem defaults;
  KvProblem result = canonical_cache_only(p);
  result.window_left = result.window_right = kUnbounded;
  result.has_tree_mask = result.has_sinks = result.wants_lse = result.output_f32 = false;
  result.softcap = 0.0f;
  result.scale = 1.0f;
  result.split = KvSplit::automatic;
  result.split_keys = 0;
  result.o = defaults.o;
  result.k_new = canonical_layout(p.k_new, kv_new_shape(p, p.head_dim));
  result.v_new =
      p.v_in_k ? defaults.v_new : canonical_layout(p.v_new, kv_new_shape(p, p.head_dim_v));
  if (!p.packed_new) {
    result.total_new = p.batch * p.seqlen_new;
  }
  if (p.rotates_q) {
    result.q = canonical_layout(p.q, kv_query_shape(p, p.head_dim));
    result.q_rotated = canonical_layout(p.q_rotated, kv_query_shape(p, p.head_dim));
    if (!p.packed_q) {
      result.total_q = p.batch * p.seqlen_q;
    }
  } else {
    result.q = result.q_rotated = defaults.q;
    result.seqlen_q = result.total_q = 0;
    result.packed_q = false;
  }
  if (p.rotary_dim == 0) {
    result.rotary_interleaved = false;
    result.rotary_dtype = DType::f32;
    result.rotary_positions = result.rotary_stride = 0;
  } else if (p.rotary_positions == 1) {
    result.rotary_stride = p.rotary_dim / 2;
  }
  return result;
}

bool writes_nothing(const ForwardProblem& problem) {
  return problem.batch == 0 || query_shape(problem, problem.head_dim_v).empty();
}

bool writes_nothing(const BackwardProblem& problem) {
  // Gradients of the variant's tensors are written whole, as zeros where there is no query.
  const bool of_variant =
      problem.wants_grad_alibi || problem.wants_grad_sinks || problem.wants_grad_bias;
  if (of_variant && problem.forward.heads_q > 0) {
    return false;
  }
  return problem.forward.batch == 0 ||
         (query_shape(problem.forward, problem.forward.head_dim).empty() &&
          key_shape(problem.forward, problem.forward.head_dim).empty());
}

bool writes_nothing(const QuantizeProblem& problem) {
  return problem.forward.batch == 0 ||
         (query_shape(problem.forward, problem.forward.head_dim).empty() &&
          key_shape(problem.forward, problem.forward.head_dim).empty());
}

}  // namespace pantile::host
