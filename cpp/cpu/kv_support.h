// What the files of decode and append share.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kv_job.h"
#include "pantile/kv.h"

namespace pantile::cpu {

// backend.cc: the kernels of an instruction set, and whether this CPU has it.
const KernelTable& kernels_for(CpuIsa isa);
Status check_isa(const DeviceProps& device);

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

// A key's place: the page or row that holds it, and its slot there.
struct Place {
  std::int64_t block, slot;
};

inline Place place_of(const KvProblem& p, const KvTensors& t, const core::KvSequence& sequence,
                      std::int64_t key) {
  if (p.page_size == 0) {
    return Place{sequence.cache_row, key};
  }
  return Place{t.block_table[sequence.cache_row * p.table_stride + key / p.page_size],
               key % p.page_size};
}

}  // namespace pantile::cpu
