// Workspace for the CPU backend: one block per calling thread, grown on demand and used again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "pantile/plan.h"

namespace pantile::python {

// Checked mode: is the zero part of each workspace verified before and after each run?
inline std::atomic<bool>& checks_workspaces() {
  static std::atomic<bool> checks{[] {
    const char* const asked = std::getenv("PANTILE_CHECK_WORKSPACE");
    return asked != nullptr && std::strcmp(asked, "1") == 0;
  }()};
  return checks;
}

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

  // Bytes of the block lent last that are not zero, of the first `count`.
  std::size_t nonzero_bytes(std::size_t count) const {
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i) {
      found += block_.get()[i] != std::byte{0} ? 1 : 0;
    }
    return found;
  }

  // Lends this block no more.
  void forget() {
    block_.reset();
    bytes_ = zero_bytes_ = 0;
  }

  // A very large block is worth more to others than the time to get it again.
  void trim() {
    if (bytes_ > kKeptBytes) {
      forget();
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
