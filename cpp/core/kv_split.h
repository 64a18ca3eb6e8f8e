// How the keys of a sequence are cut into parts that are computed apart, for bits that do not
// depend on the batch: shared by every backend's decode kernels. Parts are merged in ascending
// order.
#pragma once

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

inline constexpr int kLeastInvariantKeys = 256;
inline constexpr int kMostInvariantKeys = 4096;

// Keys of a part of a sequence of `keys` slots: a power of two, about a sixteenth of the sequence.
// Of the sequence's own length alone.
PANTILE_HD constexpr int invariant_part_keys(int keys) {
  int part = kLeastInvariantKeys;
  while (part < kMostInvariantKeys && part * 16 < keys) {
    part *= 2;
  }
  return part;
}

// Parts of a sequence whose slots 0 <= j < keys are cut at multiples of part_keys. A sequence
// without keys has none.
PANTILE_HD constexpr int part_count(int keys, int part_keys) {
  return keys <= 0 ? 0 : (keys - 1) / part_keys + 1;
}

// The most parts that split `invariant` gives a sequence of at most `capacity` slots.
PANTILE_HD constexpr int most_invariant_parts(int capacity) {
  return max_of(min_of(part_count(capacity, kLeastInvariantKeys), 16),
                part_count(capacity, kMostInvariantKeys));
}

}  // namespace pantile::core
