// Random bytes of dropout for the fragments of score tiles (core/dropout.h has their layout), and
// how weights are removed by them: four bytes at a time, from weights packed in pairs.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "prim/warp.cuh"

namespace pantile::attn {

// Of two cells, what belongs to a lane's own line (row, or key): two words of each, of the even and
// the odd element across the line. Kept bits, see DropoutStream::kept().
struct CellPair {
  std::uint32_t first[2], second[2];
};

struct DropoutStream {
  core::PhiloxKey key;
  std::uint32_t head, batch;  // counter words 2 and 3
  std::uint32_t add;          // 256 - dropped in every byte

  PANTILE_DEVICE void start(const std::int64_t* seed, std::uint32_t dropout_add,
                            std::uint32_t head_index, std::uint32_t batch_index) {
    key =
        core::philox_key(static_cast<std::uint64_t>(seed[0]), static_cast<std::uint64_t>(seed[1]));
    // In uniform registers, and with them the keys of all rounds.
    key.word[0] = static_cast<std::uint32_t>(prim::uniform(static_cast<int>(key.word[0])));
    key.word[1] = static_cast<std::uint32_t>(prim::uniform(static_cast<int>(key.word[1])));
    head = head_index;
    batch = batch_index;
    add = dropout_add;
  }

  // The top bit of every byte says whether its element is kept: whether byte + 256 - dropped
  // carries. Bytes of 4 elements, see core/dropout.h.
  PANTILE_DEVICE std::uint32_t kept(std::uint32_t bytes) const {
    const std::uint32_t low = (bytes & 0x7f7f7f7fu) + (add & 0x7f7f7f7fu);
    return (bytes & add) | (low & (bytes | add));  // the majority of the three top bits
  }

  // The byte of one element.
  PANTILE_DEVICE std::uint32_t byte(std::uint32_t row, std::uint32_t attended_key) const {
    const core::PhiloxWords words =
        core::philox4x32_10(core::dropout_cell(batch, head, row, attended_key), key);
    const std::uint32_t even = row % 2 == 0 ? words.word[0] : words.word[2];
    const std::uint32_t odd = row % 2 == 0 ? words.word[1] : words.word[3];
    const std::uint32_t word = attended_key % 2 == 0 ? even : odd;
    return (word >> (8 * (2 * (row / 8 % 2) + attended_key / 8 % 2))) & 0xffu;
  }

  // The cell `cell` and the one `step` further in counter word kWord. The lane 4 further has the
  // neighbouring line of the same cells; `odd`: this lane's line is the odd one. A pair of cells
  // costs each lane one call. kOwn: the word with which the odd line begins, 2 where lines are rows
  // and 1 where they are keys.
  template <int kWord, int kOwn>
  PANTILE_DEVICE CellPair pair(core::PhiloxWords cell, std::uint32_t step, bool odd) const {
    cell.word[kWord] += odd ? step : 0;
    const core::PhiloxWords words = core::philox4x32_10(cell, key);
    constexpr int kAcross = 3 - kOwn;
    const std::uint32_t even_line[2] = {words.word[0], words.word[kAcross]};
    const std::uint32_t odd_line[2] = {words.word[kOwn], words.word[3]};
    CellPair result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t sent = odd ? even_line[i] : odd_line[i];
      const std::uint32_t mine = odd ? odd_line[i] : even_line[i];
      const std::uint32_t got = __shfl_xor_sync(prim::kAllLanes, sent, 4);
      result.first[i] = kept(odd ? got : mine);
      result.second[i] = kept(odd ? mine : got);
    }
    return result;
  }
};

// For a packed pair of weights: all ones over each half whose element is kept. `even`, `odd`: kept
// bits of the pair's first and second element; both have them in byte `kByte`.
template <int kByte>
PANTILE_DEVICE std::uint32_t kept_halves(std::uint32_t even, std::uint32_t odd) {
  // Selectors with the sign bit set replicate the top bit of the byte that they name.
  constexpr std::uint32_t kEven = 8u + kByte, kOdd = 8u + 4u + kByte;
  std::uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(mask)
      : "r"(even), "r"(odd), "n"(kEven | kEven << 4 | kOdd << 8 | kOdd << 12));
  return mask;
}

}  // namespace pantile::attn
