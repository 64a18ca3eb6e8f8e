// Problems and devices that every host test starts from: valid, then changed in one place.
#pragma once

#include <cstdio>

#include "pantile/pantile.h"

namespace pantile::testing {

inline Layout contiguous(std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
  return Layout{seqlen * heads * dim, heads * dim, dim, 16};
}

// Sets the strides of all tensors to those of contiguous ones.
inline void set_contiguous(ForwardProblem* p) {
  p->q = contiguous(p->seqlen_q, p->heads_q, p->head_dim);
  p->k = contiguous(p->seqlen_k, p->heads_k, p->head_dim);
  p->v = contiguous(p->seqlen_k, p->heads_k, p->head_dim_v);
  p->o = contiguous(p->seqlen_q, p->heads_q, p->head_dim_v);
}

// Batch 2, 8 query heads on 2 key heads, 1024 rows, 1024 keys, bf16, head dim 128.
inline ForwardProblem forward_problem() {
  ForwardProblem p;
  p.dtype = DType::bf16;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_k = 2;
  p.seqlen_q = 1024;
  p.seqlen_k = 1024;
  p.head_dim = 128;
  p.head_dim_v = 128;
  p.scale = 0.125f;
  set_contiguous(&p);
  return p;
}

// The same rows packed: 2048 in all, no sequence longer than 1024.
inline ForwardProblem packed_problem() {
  ForwardProblem p = forward_problem();
  p.packed_q = p.packed_k = true;
  p.total_q = p.total_k = 2048;
  return p;
}

inline BackwardProblem backward_problem(const ForwardProblem& forward = forward_problem()) {
  BackwardProblem p;
  p.forward = forward;
  p.grad_o = forward.o;
  p.grad_q = forward.q;
  p.grad_k = forward.k;
  p.grad_v = forward.v;
  return p;
}

inline DeviceProps cpu_device() {
  DeviceProps props;
  props.device = Device{DeviceType::cpu, 0};
  props.threads = 2;
  return props;
}

inline DeviceProps gpu_device(const char* name, int major, int minor, int multiprocessors,
                              int smem_optin_bytes, std::int64_t l2_bytes) {
  DeviceProps props;
  props.device = Device{DeviceType::cuda, 0};
  props.compute_major = major;
  props.compute_minor = minor;
  props.multiprocessors = multiprocessors;
  props.smem_optin_bytes = smem_optin_bytes;
  props.l2_bytes = l2_bytes;
  std::snprintf(props.name, sizeof props.name, "%s", name);
  return props;
}

inline DeviceProps h100() {
  return gpu_device("H100", 9, 0, 132, 232448, 50 << 20);
}
inline DeviceProps a100() {
  return gpu_device("A100", 8, 0, 108, 166912, 40 << 20);
}
// The first compute capability with products of e4m3.
inline DeviceProps l40s() {
  return gpu_device("L40S", 8, 9, 142, 101376, 96 << 20);
}

}  // namespace pantile::testing
