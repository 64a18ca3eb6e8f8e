// What locates the sequences of a call, from its problem and tensors.
#pragma once

#include "core/kv_sequence.h"
#include "pantile/kv.h"

namespace pantile::decode {

inline core::KvArrays kv_arrays(const KvProblem& p, const KvTensors& t) {
  core::KvArrays arrays;
  arrays.lengths = t.lengths;
  arrays.cu_seqlens_q = p.packed_q ? t.cu_seqlens_q : nullptr;
  arrays.cu_seqlens_new = p.packed_new ? t.cu_seqlens_new : nullptr;
  arrays.cache_index = p.has_cache_index ? t.cache_index : nullptr;
  arrays.leftpad = p.has_leftpad ? t.leftpad : nullptr;
  arrays.seqlen_q = static_cast<int>(p.seqlen_q);
  arrays.seqlen_new = static_cast<int>(p.seqlen_new);
  arrays.capacity = static_cast<int>(capacity(p));
  return arrays;
}

}  // namespace pantile::decode
