// Loops over the work items of a run: how many threads they are worth, and scratch memory for each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integer.h"
#include "cpu/parallel.h"
#include "pantile/device.h"
#include "pantile/problem.h"

namespace pantile::cpu {

// A second thread pays for waking it with more work than this, in multiply-adds.
inline constexpr double kWorkPerThread = 1e6;

inline double multiply_adds(const ForwardProblem& problem) {
  return static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q) *
         static_cast<double>(problem.seqlen_q) * static_cast<double>(problem.seqlen_k) *
         static_cast<double>(problem.head_dim + problem.head_dim_v);
}

// Threads worth using for `items` work items.
inline int workers_for(const ForwardProblem& problem, const DeviceProps& device,
                       std::int64_t items) {
  const auto useful =
      static_cast<std::int64_t>(core::min_of(multiply_adds(problem) / kWorkPerThread, 1e6));
  return static_cast<int>(
      core::clamp<std::int64_t>(core::min_of(useful, items), 1, core::max_of(device.threads, 1)));
}

inline std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlign = 256;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// What the loop's body needs to run one item: for kernels and the reference alike.
template <class Job>
struct ItemLoop {
  const Job* job;
  void (*function)(const Job&, int item, void* scratch);
  char* scratch;
  std::size_t scratch_bytes;  // of one worker

  static void run(int item, int worker, void* context) {
    const auto* loop = static_cast<const ItemLoop*>(context);
    loop->function(*loop->job, item,
                   loop->scratch + static_cast<std::size_t>(worker) * loop->scratch_bytes);
  }
};

template <class Job>
Status run_items(const Job& job, void (*function)(const Job&, int, void*), int items, int workers,
                 void* scratch, std::size_t scratch_bytes) {
  ItemLoop<Job> loop{&job, function, static_cast<char*>(scratch), scratch_bytes};
  return for_each_item(items, workers, ItemLoop<Job>::run, &loop);
}

}  // namespace pantile::cpu
