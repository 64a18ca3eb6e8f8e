// Workspace for the CPU backend: one block per calling thread, grown on demand and used again.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "pantile/plan.h"

namespace pantile::python {

class CpuScratch {
 public:
  // A block for one run of this thread. The first `zeroed_bytes` are zero, as run_* demands.
  void* lend(const Workspace& needed) {
    if (needed.bytes > bytes_) {
      block_.reset();
      block_.reset(static_cast<std::byte*>(::operator new(needed.bytes, kAlign)));
      bytes_ = needed.bytes;
      zero_bytes_ = 0;
    }
    if (needed.zeroed_bytes > zero_bytes_) {
      std::memset(block_.get(), 0, needed.zeroed_bytes);
      zero_bytes_ = needed.zeroed_bytes;
    }
    if (needed.bytes > needed.zeroed_bytes) {
      zero_bytes_ = needed.zeroed_bytes;  // what lies behind will be written over
    }
    return block_.get();
  }

  // A very large block is worth more to others than the time to get it again.
  void trim() {
    if (bytes_ > kKeptBytes) {
      block_.reset();
      bytes_ = zero_bytes_ = 0;
    }
  }

 private:
  static constexpr std::align_val_t kAlign{256};
  static constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

  struct Free {
    void operator()(std::byte* block) const { ::operator delete(block, kAlign); }
  };
  std::unique_ptr<std::byte, Free> block_;
  std::size_t bytes_ = 0;
  std::size_t zero_bytes_ = 0;  // a prefix that is known to be zero
};

inline CpuScratch& cpu_scratch() {
  thread_local CpuScratch scratch;
  return scratch;
}

}  // namespace pantile::python
