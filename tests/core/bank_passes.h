// How many passes shared memory needs for an access, for the tests of cpp/core/swizzle.h.
#pragma once

#include <cstdint>

#include "core/swizzle.h"

namespace pantile::core {

inline constexpr int kBanks = 32;
inline constexpr int kBankBytes = 4;

// Passes that shared memory needs to serve one access of `bytes` (4, 8 or 16) by each of `lanes`
// lanes: in each pass every bank delivers one word, and equal words are delivered once. Accesses of
// 8 and 16 bytes go by halves and quarters of a warp, as the hardware does; `ldmatrix` of one 8x8
// matrix is eight accesses of 16 bytes.
constexpr int bank_passes(const std::uint32_t* addresses, int lanes, int bytes) {
  const int words = bytes / kBankBytes;
  const int together = kBanks / words;  // lanes served at a time
  int passes = 0;
  for (int first = 0; first < lanes; first += together) {
    const int count = lanes - first < together ? lanes - first : together;
    int per_bank[kBanks] = {};
    std::uint32_t seen[kBanks] = {};  // the distinct words asked for so far
    int distinct = 0;
    int worst = 0;
    for (int i = 0; i < count * words; ++i) {
      const std::uint32_t word =
          addresses[first + i / words] / kBankBytes + static_cast<std::uint32_t>(i % words);
      bool is_new = true;
      for (int j = 0; j < distinct; ++j) {
        is_new = is_new && seen[j] != word;
      }
      if (is_new) {
        seen[distinct++] = word;
        const int load = ++per_bank[word % kBanks];
        worst = load > worst ? load : worst;
      }
    }
    passes += worst;
  }
  return passes;
}

}  // namespace pantile::core
