// Pointers against the problem that they belong to, before a run.
#include <cstdint>

#include "host/rules.h"
#include "host/shape.h"
#include "host/validate.h"

namespace pantile::host {
namespace {

constexpr std::uintptr_t kWorkspaceAlign = 256;  // bytes, pantile/plan.h

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

}  // namespace

// A tensor's pointer: there when the tensor has elements, and as aligned as the layout says.
Status tensor_pointer(const char* name, const void* pointer, const Layout& layout, bool empty) {
  if (empty) {
    return Status();
  }
  if (pointer == nullptr) {
    return Status::error(kInvalid, "%s is null; it must point to the tensor", name);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % static_cast<std::uintptr_t>(layout.base_align_bytes) != 0) {
    return Status::error(
        kInvalid, "%s is at %p; the problem says base_align_bytes = %d, which must divide it", name,
        pointer, layout.base_align_bytes);
  }
  return Status();
}

// An optional array: there exactly when the problem says so.
Status optional_pointer(const char* name, const void* pointer, bool wanted, const char* because) {
  if (wanted && pointer == nullptr) {
    return Status::error(kInvalid, "%s is null; it must be set because %s is true", name, because);
  }
  if (!wanted && pointer != nullptr) {
    return Status::error(kInvalid, "%s is set; it must be null because %s is false", name, because);
  }
  return Status();
}

Status sequence_pointers(const ForwardProblem& p, const ForwardTensors& t) {
  return first_error({
      optional_pointer("cu_seqlens_q", t.cu_seqlens_q, p.packed_q, "packed_q"),
      optional_pointer("cu_seqlens_k", t.cu_seqlens_k, p.packed_k && !p.has_k_begin,
                       p.has_k_begin ? "packed_k without has_k_begin" : "packed_k"),
      optional_pointer("seqused_q", t.seqused_q, p.has_seqused_q, "has_seqused_q"),
      optional_pointer("seqused_k", t.seqused_k, p.has_seqused_k, "has_seqused_k"),
      optional_pointer("k_begin", t.k_begin, p.has_k_begin, "has_k_begin"),
      optional_pointer("mask_shift", t.mask_shift, p.has_mask_shift, "has_mask_shift"),
      optional_pointer("block_table", t.block_table, p.page_size > 0 && p.max_pages > 0,
                       "page_size > 0"),
  });
}

namespace {

Status lse_pointer(const ForwardProblem& p, const ForwardTensors& t) {
  if (p.wants_lse && t.lse == nullptr && !query_shape(p, p.head_dim).empty()) {
    return Status::error(kInvalid, "lse is null; it must be set because wants_lse is true");
  }
  return Status();
}

// Low bits are read and written 16 bytes at a time.
Status o_low_pointer(const void* o_low, bool wanted, const char* because, bool no_rows) {
  constexpr std::uintptr_t kAlign = 16;
  if (no_rows) {
    return Status();
  }
  const Status status = optional_pointer("o_low", o_low, wanted, because);
  if (status.ok() && reinterpret_cast<std::uintptr_t>(o_low) % kAlign != 0) {
    return Status::error(kInvalid, "o_low is at %p; its address must be a multiple of %d bytes",
                         o_low, static_cast<int>(kAlign));
  }
  return status;
}

Status max_logit_pointer(const ForwardProblem& p, const ForwardTensors& t) {
  if (p.batch == 0 || p.heads_q == 0) {
    return Status();
  }
  return optional_pointer("max_logit", t.max_logit, p.wants_max_logit, "wants_max_logit");
}

}  // namespace

namespace {

Status forward_tensors(const ForwardProblem& p, const ForwardTensors& t, bool is_backward) {
  const bool no_rows = query_shape(p, p.head_dim).empty();
  const bool no_keys = key_shape(p, p.head_dim).empty();
  return first_error({
      tensor_pointer("q", t.q, p.q, no_rows),
      tensor_pointer("k", t.k, p.k, no_keys),
      tensor_pointer("v", t.v, p.v, no_keys),
      tensor_pointer("o", t.o, p.o, no_rows),
      lse_pointer(p, t),
      o_low_pointer(t.o_low, p.wants_o_low, "wants_o_low", no_rows),
      max_logit_pointer(p, t),
      sequence_pointers(p, t),
      fp8_pointers(p, t.fp8, is_backward),
      variant_pointers(p, t.variant),
  });
}

}  // namespace

Status validate_tensors(const ForwardProblem& p, const ForwardTensors& t) {
  return forward_tensors(p, t, false);
}

namespace {

Status key_statistics_pointer(const BackwardProblem& p, const BackwardTensors& t) {
  const bool wanted = p.key_statistics != KeyStatistics::own;
  const bool any = p.forward.batch > 0 && p.forward.heads_k > 0;
  if (wanted && any && t.key_statistics == nullptr) {
    return Status::error(kInvalid,
                         "tensors.key_statistics is null; it must be set because key_statistics "
                         "is given or written");
  }
  if (!wanted && t.key_statistics != nullptr) {
    return Status::error(kInvalid,
                         "tensors.key_statistics is set; it must be null because key_statistics "
                         "is own");
  }
  return Status();
}

}  // namespace

Status validate_tensors(const BackwardProblem& p, const BackwardTensors& t) {
  const bool no_rows = query_shape(p.forward, p.forward.head_dim).empty();
  const bool no_keys = key_shape(p.forward, p.forward.head_dim).empty();
  if (p.key_statistics == KeyStatistics::written) {
    return first_error({
        tensor_pointer("k", t.forward.k, p.forward.k, no_keys),
        tensor_pointer("v", t.forward.v, p.forward.v, no_keys),
        sequence_pointers(p.forward, t.forward),
        key_statistics_pointer(p, t),
    });
  }
  return first_error({
      key_statistics_pointer(p, t),
      forward_tensors(p.forward, t.forward, true),
      tensor_pointer("grad_o", t.grad_o, p.grad_o, no_rows),
      tensor_pointer("grad_q", t.grad_q, p.grad_q, no_rows),
      tensor_pointer("grad_k", t.grad_k, p.grad_k, no_keys),
      tensor_pointer("grad_v", t.grad_v, p.grad_v, no_keys),
      no_rows ? Status() : optional_pointer("grad_lse", t.grad_lse, p.has_grad_lse, "has_grad_lse"),
      o_low_pointer(t.o_low, p.has_o_low, "has_o_low", no_rows),
      variant_gradient_pointers(p, t.variant),
  });
}

Status validate_workspace(const Workspace& needed, const void* workspace) {
  if (needed.bytes == 0) {
    return Status();
  }
  if (workspace == nullptr) {
    return Status::error(kInvalid, "workspace is null; the plan needs %zu bytes", needed.bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlign != 0) {
    return Status::error(kInvalid, "workspace is at %p; its address must be a multiple of %d bytes",
                         workspace, static_cast<int>(kWorkspaceAlign));
  }
  return Status();
}

}  // namespace pantile::host
