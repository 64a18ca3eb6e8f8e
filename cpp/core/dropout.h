// Which weights dropout removes. Random bytes come from Philox4x32-10, a counter-based generator:
// the byte of an element depends on the seed and the element's coordinates, and on nothing else. It
// does not depend on tiles, threads, packing or backend, so the backward recomputes the forward's
// mask and a CPU reproduces a GPU's.
//
// One call of the generator serves a cell of 16 elements, rows {2a, 2a + 1} + {0, 8} of a block of
// 16 rows and keys {2b, 2b + 1} + {0, 8} of a block of 16 keys:
//   counter  { key block * 4 + b, row block * 4 + a, head, batch }
//   word     2 * (row % 2) + key % 2
//   byte     2 * (row / 8 % 2) + key / 8 % 2
// In the fragment of a product Q K^T a lane holds rows r, r + 8 and key pairs; in that of K Q^T, as
// backwards compute it, keys and row pairs. In both a lane needs half of the words of two
// cells, and one exchange with the lane 4 further gives it those.
//
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

inline constexpr std::uint32_t kPhiloxWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};  // added each round

// One round. `key` is that of the round.
PANTILE_HD constexpr PhiloxWords philox_round(const PhiloxWords& counter, std::uint32_t key0,
                                              std::uint32_t key1) {
  const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter.word[0];
  const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter.word[2];
  return PhiloxWords{{static_cast<std::uint32_t>(b >> 32) ^ counter.word[1] ^ key0,
                      static_cast<std::uint32_t>(b),
                      static_cast<std::uint32_t>(a >> 32) ^ counter.word[3] ^ key1,
                      static_cast<std::uint32_t>(a)}};
}

PANTILE_HD constexpr PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
  constexpr std::uint32_t kWeyl0 = kPhiloxWeyl[0], kWeyl1 = kPhiloxWeyl[1];
  for (int round = 0; round < 10; ++round) {
    counter = philox_round(counter, key.word[0], key.word[1]);
    key.word[0] += kWeyl0;
    key.word[1] += kWeyl1;
  }
  return counter;
}

// The key of one call. `offset` is the position of a generator that moves on with each call. It
// enters through a bijection of 64-bit numbers, so that two calls of one seed never share a key.
// Source of the bijection: Steele, Lea, Flood 2014 (the finalizer of SplitMix64).
PANTILE_HD constexpr PhiloxKey philox_key(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t mixed = offset;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  mixed = seed ^ mixed ^ (mixed >> 31);
  return PhiloxKey{{static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)}};
}

// The cell of an element. Rows and keys count from the start of their sequence; heads and sequences
// count over all ranks that share the work.
PANTILE_HD constexpr PhiloxWords dropout_cell(std::uint32_t batch, std::uint32_t head,
                                              std::uint32_t row, std::uint32_t key) {
  return PhiloxWords{{key / 16 * 4 + key % 8 / 2, row / 16 * 4 + row % 8 / 2, head, batch}};
}

// The byte of an element among the words of its cell.
PANTILE_HD constexpr std::uint32_t dropout_byte(const PhiloxWords& words, std::uint32_t row,
                                                std::uint32_t key) {
  const std::uint32_t word = words.word[2 * (row % 2) + key % 2];
  return (word >> (8 * (2 * (row / 8 % 2) + key / 8 % 2))) & 0xffu;
}

// Of 256 byte values, `dropped` remove the weight: the smallest ones.
PANTILE_HD constexpr bool dropout_keeps(const PhiloxKey& key, int dropped, std::uint32_t batch,
                                        std::uint32_t head, std::uint32_t row,
                                        std::uint32_t attended_key) {
  const PhiloxWords words = philox4x32_10(dropout_cell(batch, head, row, attended_key), key);
  return dropout_byte(words, row, attended_key) >= static_cast<std::uint32_t>(dropped);
}

// Kept weights are multiplied by this, so that the expectation is exactly that without dropout.
PANTILE_HD constexpr float dropout_scale(int dropped) {
  return 256.0f / static_cast<float>(256 - dropped);
}

}  // namespace pantile::core
