// Random numbers for dropout: Philox4x32-10, a counter-based generator. The number of an element of
// P depends on the seed, the call and the element's coordinates, and on nothing else: not on tiles,
// threads, packing or backend, so that the backward recomputes the forward's mask and a CPU
// reproduces a GPU's.
// Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pantile::core {

struct PhiloxWords {
  std::uint32_t word[4];
};

struct PhiloxKey {
  std::uint32_t word[2];
};

PANTILE_HD constexpr PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57u;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u;  // golden ratio
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter.word[0];
    const std::uint64_t product1 = kMultiplier1 * counter.word[2];
    counter =
        PhiloxWords{{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
                     static_cast<std::uint32_t>(product1),
                     static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
                     static_cast<std::uint32_t>(product0)}};
    key.word[0] += kWeyl0;
    key.word[1] += kWeyl1;
  }
  return counter;
}

// The key of one call. `offset` is the position of a generator that moves on with each call; it
// enters through a bijection of 64-bit numbers, so that two calls of one seed never share a key.
// Source of the bijection: Steele, Lea, Flood 2014 (the finalizer of SplitMix64).
PANTILE_HD constexpr PhiloxKey philox_key(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t mixed = offset;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
  mixed = seed ^ mixed ^ mixed >> 31;
  return PhiloxKey{{static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)}};
}

// The numbers of the four keys 4 key_group .. 4 key_group + 3 that query `row` meets. Rows and keys
// count from the start of their sequence.
PANTILE_HD constexpr PhiloxWords random_words(const PhiloxKey& key, int batch, int head, int row,
                                              int key_group) {
  return philox4x32_10(
      PhiloxWords{{static_cast<std::uint32_t>(key_group), static_cast<std::uint32_t>(row),
                   static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(batch)}},
      key);
}

PANTILE_HD constexpr std::uint32_t random_word(const PhiloxKey& key, int batch, int head, int row,
                                               int attended_key) {
  return random_words(key, batch, head, row, attended_key / 4).word[attended_key % 4];
}

// A multiple of 2^-24 in [0, 1).
PANTILE_HD constexpr float uniform(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 5.9604644775390625e-8f;
}

}  // namespace pantile::core
