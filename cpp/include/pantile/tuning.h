// Choices between the softmax units of a kernel that were measured on this machine. They take the
// place of the table of GPU generations (cuda/ampere/forward/softmax_choice.h) in plans made from
// then on, where the caller leaves the unit automatic. Python's pantile.autotune measures them and
// keeps them on disk.
#pragma once

#include <cstdint>

#include "pantile/export.h"
#include "pantile/plan.h"

namespace pantile {

// For the calls of one shape class: those that one kernel serves on one kind of device, of about as
// many keys and queries.
struct TunedSoftmax {
  const char* kernel = "";  // KernelInfo::name
  const char* device = "";  // DeviceProps::name
  int log2_keys = 0;        // of the longest sequence, rounded up
  int log2_queries = 0;     // of batch * heads_q * the longest sequence's queries, rounded up
  SoftmaxUnit unit = SoftmaxUnit::automatic;
  const char* source = "";  // for explain: where it was measured, and what it brought
};

// Of n: 0 for 0 and 1.
constexpr int rounded_up_log2(std::int64_t n) {
  int result = 0;
  while (result < 62 && (std::int64_t{1} << result) < n) {
    ++result;
  }
  return result;
}

// Replaces all of them; texts are copied. A class that is named twice has the last choice. Plans
// that exist keep theirs.
PANTILE_API void set_tuned_softmax(const TunedSoftmax* choices, int count);

}  // namespace pantile
