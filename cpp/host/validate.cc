#include "host/validate.h"

#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "core/blocked.h"
#include "host/rules.h"
#include "host/shape.h"
#include "host/softmax.h"
#include "host/split.h"

namespace pantile::host {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

Status dtype_rule(const ForwardProblem& p) {
  switch (p.dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::e4m3: return Status();
  }
  return Status::error(kInvalid, "dtype is %d; it must be f32 (0), f16 (1), bf16 (2) or e4m3 (3)",
                       static_cast<int>(p.dtype));
}

Status batch_rule(const ForwardProblem& p) {
  return between("batch", p.batch, 0, kMaxCount);
}
Status heads_q_rule(const ForwardProblem& p) {
  return between("heads_q", p.heads_q, 0, kMaxCount);
}
Status heads_k_rule(const ForwardProblem& p) {
  return between("heads_k", p.heads_k, 0, kMaxCount);
}
Status seqlen_q_rule(const ForwardProblem& p) {
  return between(seqlen_q_name(p), p.seqlen_q, 0, kMaxLength);
}
Status seqlen_k_rule(const ForwardProblem& p) {
  return between(seqlen_k_name(p), p.seqlen_k, 0, kMaxLength);
}
Status head_dim_rule(const ForwardProblem& p) {
  return between("head_dim", p.head_dim, 1, kMaxHeadDim);
}
Status head_dim_v_rule(const ForwardProblem& p) {
  return between("head_dim_v", p.head_dim_v, 1, kMaxHeadDim);
}

Status group_rule(const ForwardProblem& p) {
  const bool both_zero = p.heads_q == 0 && p.heads_k == 0;
  if (both_zero || (p.heads_q > 0 && p.heads_k > 0 && p.heads_q % p.heads_k == 0)) {
    return Status();
  }
  return Status::error(kInvalid,
                       "heads_q is %" PRId64 " and heads_k is %" PRId64
                       "; heads_q must be a positive multiple of heads_k, or both 0",
                       p.heads_q, p.heads_k);
}

Status work_rule(const ForwardProblem& p) {
  if (p.batch * p.heads_q > kMaxCount) {
    return Status::error(kInvalid, "batch * heads_q is %" PRId64 "; it must be at most %" PRId64,
                         p.batch * p.heads_q, kMaxCount);
  }
  return Status();
}

Status total_rule(const char* name, const char* length_name, bool packed, std::int64_t total,
                  std::int64_t batch, std::int64_t length) {
  if (!packed) {
    if (total != 0 && total != batch * length) {
      return Status::error(kInvalid,
                           "%s is %" PRId64
                           "; for a dense tensor it must be 0 or batch * seqlen, %" PRId64,
                           name, total, batch * length);
    }
    return Status();
  }
  if (batch == 0 && total != 0) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be 0 when batch is 0", name, total);
  }
  Status status = between(name, total, 0, kMaxCount);
  return status.ok() ? packed_length_rule(length_name, length, batch, name, total) : status;
}
Status total_q_rule(const ForwardProblem& p) {
  return total_rule("total_q", seqlen_q_name(p), p.packed_q, p.total_q, p.batch, p.seqlen_q);
}
Status total_k_rule(const ForwardProblem& p) {
  if (p.has_k_begin) {  // sequences may share rows, and leave some out
    return between("total_k", p.total_k, 0, kMaxCount);
  }
  if (p.page_size > 0) {
    return p.total_k == 0
               ? Status()
               : between("total_k", p.total_k, p.pages * p.page_size, p.pages * p.page_size);
  }
  return total_rule("total_k", seqlen_k_name(p), p.packed_k, p.total_k, p.batch, p.seqlen_k);
}

Status window_rule(const char* name, std::int64_t side) {
  if (side < kUnbounded) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be 0 or more, or -1 for unbounded",
                         name, side);
  }
  return Status();
}
Status window_left_rule(const ForwardProblem& p) {
  return window_rule("window_left", p.window_left);
}
Status window_right_rule(const ForwardProblem& p) {
  return window_rule("window_right", p.window_right);
}

Status scale_rule(const ForwardProblem& p) {
  if (!std::isfinite(p.scale)) {
    return Status::error(kInvalid, "scale is %g; it must be finite", static_cast<double>(p.scale));
  }
  return Status();
}

Status float32_precision_rule(const ForwardProblem& p) {
  switch (p.float32_precision) {
    case Float32Precision::highest:
    case Float32Precision::tf32: return Status();
  }
  return Status::error(kInvalid, "float32_precision is %d; it must be highest (0) or tf32 (1)",
                       static_cast<int>(p.float32_precision));
}

Status alignment_rule(const char* name, const Layout& layout, DType dtype) {
  const int align = layout.base_align_bytes;
  if (align < dtype_bytes(dtype) || (align & (align - 1)) != 0) {
    return Status::error(kInvalid,
                         "%s.base_align_bytes is %d; it must be a power of two of at least %d",
                         name, align, dtype_bytes(dtype));
  }
  return Status();
}

// Strides that are not negative and keep every address within 63 bits.
Status reach_rule(const char* name, const Layout& layout, const TensorShape& shape,
                  const char* const* axis_names) {
  const std::int64_t strides[kAxes] = {layout.batch, layout.seq, layout.head};
  std::int64_t reach = shape.dim;
  for (int axis = 0; axis < kAxes; ++axis) {
    if (shape.sizes[axis] <= 1) {
      continue;
    }
    if (strides[axis] < 0) {
      return Status::error(kInvalid, "%s: stride along %s is %" PRId64 "; it must be 0 or more",
                           name, axis_names[axis], strides[axis]);
    }
    const std::int64_t steps = shape.sizes[axis] - 1;
    if (strides[axis] > (kMaxReach - reach) / steps) {
      return Status::error(kInvalid,
                           "%s: stride along %s is %" PRId64 "; with %" PRId64
                           " elements on that axis the tensor spans more than 2^60 elements",
                           name, axis_names[axis], strides[axis], shape.sizes[axis]);
    }
    reach += strides[axis] * steps;
  }
  return Status();
}

// What is written must not overlap itself: along the axes in order of stride, each step must clear
// all that the smaller steps span.
Status overlap_rule(const char* name, const Layout& layout, const TensorShape& shape,
                    const char* const* axis_names) {
  const std::int64_t strides[kAxes] = {layout.batch, layout.seq, layout.head};
  bool done[kAxes] = {shape.sizes[0] <= 1, shape.sizes[1] <= 1, shape.sizes[2] <= 1};
  std::int64_t span = shape.dim;
  for (int round = 0; round < kAxes; ++round) {
    int smallest = -1;
    for (int axis = 0; axis < kAxes; ++axis) {
      if (!done[axis] && (smallest < 0 || strides[axis] < strides[smallest])) {
        smallest = axis;
      }
    }
    if (smallest < 0) {
      break;
    }
    if (strides[smallest] < span) {
      return Status::error(kInvalid,
                           "%s: stride along %s is %" PRId64 "; it must be at least %" PRId64
                           ", or its elements overlap",
                           name, axis_names[smallest], strides[smallest], span);
    }
    span += strides[smallest] * (shape.sizes[smallest] - 1);
    done[smallest] = true;
  }
  return Status();
}

}  // namespace

Status between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    return Status::error(kInvalid, "%s is %" PRId64 "; it must be from %" PRId64 " to %" PRId64,
                         name, value, low, high);
  }
  return Status();
}

Status first_error(std::initializer_list<Status> list) {
  for (const Status& status : list) {
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status input_layout(const char* name, const Layout& layout, const TensorShape& shape, DType dtype,
                    const char* const* axis_names) {
  Status status = alignment_rule(name, layout, dtype);
  if (status.ok() && !shape.empty()) {
    status = reach_rule(name, layout, shape, axis_names);
  }
  return status;
}

Status output_layout(const char* name, const Layout& layout, const TensorShape& shape, DType dtype,
                     const char* const* axis_names) {
  Status status = input_layout(name, layout, shape, dtype, axis_names);
  if (status.ok() && !shape.empty()) {
    status = overlap_rule(name, layout, shape, axis_names);
  }
  return status;
}

namespace {

// FP8 operands have one form; their layouts are not read.
bool quantized(const ForwardProblem& p) {
  return p.dtype == DType::e4m3;
}

Status q_layout_rule(const ForwardProblem& p) {
  return quantized(p) ? Status() : input_layout("q", p.q, query_shape(p, p.head_dim), p.dtype);
}
Status k_layout_rule(const ForwardProblem& p) {
  return quantized(p) ? Status() : input_layout("k", p.k, key_shape(p, p.head_dim), p.dtype);
}
Status v_layout_rule(const ForwardProblem& p) {
  return quantized(p) ? Status() : input_layout("v", p.v, key_shape(p, p.head_dim_v), p.dtype);
}
// The forward writes o, the backward reads it.
Status o_written_rule(const ForwardProblem& p) {
  return output_layout("o", p.o, query_shape(p, p.head_dim_v), output_dtype(p));
}

Status output_rule(const ForwardProblem& p) {
  if (quantized(p) && (p.output_f32 || p.wants_max_logit)) {
    return Status::error(kInvalid, "%s is true; it must be false when dtype is e4m3",
                         p.output_f32 ? "output_f32" : "wants_max_logit");
  }
  return Status();
}

// What O lacks to more than 16 bits: of a 16-bit O only.
Status low_bits_rule(const char* name, bool wanted, const ForwardProblem& p) {
  if (!wanted || p.dtype == DType::f16 || p.dtype == DType::bf16) {
    return Status();
  }
  return Status::error(kInvalid,
                       "%s is true; it must be false unless dtype is f16 or bf16, it is %s", name,
                       dtype_name(p.dtype));
}

Status o_low_rule(const ForwardProblem& p) {
  Status status = low_bits_rule("wants_o_low", p.wants_o_low, p);
  if (status.ok() && p.wants_o_low && p.output_f32) {
    return Status::error(kInvalid, "wants_o_low is true; it must be false when output_f32 is true");
  }
  return status;
}

// In the order in which a reader of problem.h meets the fields; later rules rely on earlier ones.
// These hold in both passes.
constexpr Status (*kCommonRules[])(const ForwardProblem&) = {
    dtype_rule,        batch_rule,           heads_q_rule,
    heads_k_rule,      seqlen_q_rule,        seqlen_k_rule,
    head_dim_rule,     head_dim_v_rule,      group_rule,
    work_rule,         total_q_rule,         key_places_rule,
    pages_rule,        total_k_rule,         window_left_rule,
    window_right_rule, scale_rule,           float32_precision_rule,
    output_rule,       o_low_rule,           num_splits_rule,
    fp8_rule,          q_layout_rule,        k_layout_rule,
    v_layout_rule,     softmax_options_rule, variant_rule,
};

Status wants_lse_rule(const BackwardProblem& p) {
  if (!p.forward.wants_lse) {
    return Status::error(kInvalid,
                         "forward.wants_lse is false; the backward needs the LSE of the forward");
  }
  return Status();
}
Status forward_only_rule(const BackwardProblem& p) {
  const ForwardProblem& f = p.forward;
  if (f.wants_max_logit || f.output_f32 || f.wants_o_low) {
    return Status::error(kInvalid, "forward.%s is true; it must be false in a backward problem",
                         f.output_f32    ? "output_f32"
                         : f.wants_o_low ? "wants_o_low"
                                         : "wants_max_logit");
  }
  return Status();
}
Status has_o_low_rule(const BackwardProblem& p) {
  return low_bits_rule("has_o_low", p.has_o_low, p.forward);
}
Status o_read_rule(const BackwardProblem& p) {
  return input_layout("o", p.forward.o, query_shape(p.forward, p.forward.head_dim_v),
                      output_dtype(p.forward));
}
Status grad_o_layout_rule(const BackwardProblem& p) {
  return input_layout("grad_o", p.grad_o, query_shape(p.forward, p.forward.head_dim_v),
                      output_dtype(p.forward));
}
Status grad_q_layout_rule(const BackwardProblem& p) {
  return output_layout("grad_q", p.grad_q, query_shape(p.forward, p.forward.head_dim),
                       output_dtype(p.forward));
}
Status grad_k_layout_rule(const BackwardProblem& p) {
  return output_layout("grad_k", p.grad_k, key_shape(p.forward, p.forward.head_dim),
                       output_dtype(p.forward));
}
Status grad_v_layout_rule(const BackwardProblem& p) {
  return output_layout("grad_v", p.grad_v, key_shape(p.forward, p.forward.head_dim_v),
                       output_dtype(p.forward));
}

Status fp8_backward_rule(const BackwardProblem& p) {
  if (!quantized(p.forward)) {
    return Status();
  }
  const Fp8Format& format = p.forward.fp8;
  if (format.block_q != core::kBlockedRows || format.block_k != core::kBlockedRows) {
    const bool queries = format.block_q != core::kBlockedRows;
    return Status::error(kInvalid, "forward.fp8.%s is %d; it must be %d in a backward problem",
                         queries ? "block_q" : "block_k", queries ? format.block_q : format.block_k,
                         core::kBlockedRows);
  }
  return Status();
}

constexpr Status (*kBackwardRules[])(const BackwardProblem&) = {
    wants_lse_rule,      forward_only_rule,  has_o_low_rule,         fp8_backward_rule,
    key_statistics_rule, o_read_rule,        grad_o_layout_rule,     grad_q_layout_rule,
    grad_k_layout_rule,  grad_v_layout_rule, variant_gradients_rule,
};

template <class Problem, std::size_t kCount>
Status apply(Status (*const (&rules)[kCount])(const Problem&), const Problem& problem) {
  for (const auto rule : rules) {
    Status status = rule(problem);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

}  // namespace

Status validate(const ForwardProblem& problem) {
  Status status = apply(kCommonRules, problem);
  return status.ok() ? o_written_rule(problem) : status;
}

Status validate(const BackwardProblem& problem) {
  Status status = apply(kCommonRules, problem.forward);
  return status.ok() ? apply(kBackwardRules, problem) : status;
}

Status validate(const DeviceProps& device) {
  if (device.device.type != DeviceType::cpu && device.device.type != DeviceType::cuda) {
    return Status::error(kInvalid, "device.type is %d; it must be cpu (0) or cuda (1)",
                         static_cast<int>(device.device.type));
  }
  if (device.device.index < 0) {
    return Status::error(kInvalid, "device.index is %d; it must be 0 or more", device.device.index);
  }
  if (device.device.type == DeviceType::cpu && device.threads < 1) {
    return Status::error(kInvalid, "device.threads is %d; it must be 1 or more", device.threads);
  }
  return Status();
}

Status validate(const PlanOptions& options) {
  switch (options.backend) {
    case Backend::automatic:
    case Backend::hopper:
    case Backend::ampere:
    case Backend::cpu:
    case Backend::reference: return Status();
  }
  return Status::error(kInvalid,
                       "options.backend is %d; it must be auto (0), hopper (1), ampere (2), cpu "
                       "(3) or reference (4)",
                       static_cast<int>(options.backend));
}

}  // namespace pantile::host
