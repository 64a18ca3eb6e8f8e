// The part of a sequence that takes part in its gradients, and how tiles of all sequences of a
// batch are numbered. Shared by the kernels of one backward pass, so that they cannot disagree.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/host_device.h"
#include "core/integer.h"
#include "core/sequence.h"

namespace pantile::common {

// Queries at the front that see no key (causal, more rows than keys) and keys at the front that no
// query sees (windows, more keys than rows) are cut off before tiles are laid out. No tile then
// reads them, so that what they hold cannot matter, and the mask of the rest is bottom-right
// aligned again. The last query always faces the last key: nothing is cut at the back.
struct Attended {
  int first_row;    // queries cut off
  int first_key;    // keys cut off
  core::Mask mask;  // of the rest: mask.rows queries, mask.keys keys; both 0 if nothing is attended
};

PANTILE_HD constexpr Attended attended_part(const core::Mask& mask) {
  if (mask.rows == 0 || mask.keys == 0) {
    return Attended{0, 0, {0, 0, mask.left, mask.right}};
  }
  const int first_row = core::max_of(0, -(mask.shift() + mask.right));
  const int first_key = core::max_of(0, mask.shift() - mask.left);
  return Attended{first_row, first_key,
                  core::Mask{mask.rows - first_row, mask.keys - first_key, mask.left, mask.right}};
}

// dQ is summed in fp32 or integer fragments of 64 rows x 64 columns, each in the register order of
// a wgmma accumulator; a tile's fragments follow each other.
inline constexpr int kFragmentRows = 64;
inline constexpr int kFragmentColumns = 64;
inline constexpr int kFragmentFloats = kFragmentRows * kFragmentColumns;

// Of a tile of dQ: sums of dS, where they are wanted (backward_key_means.cuh).
PANTILE_HD constexpr int row_sum_floats(int tile_floats) {
  return tile_floats / kFragmentColumns;
}

// The same with room for one sum of every row, if dQ has no fragments.
PANTILE_HD constexpr int row_sum_floats(int tile_floats, int tile_rows) {
  return core::max_of(row_sum_floats(tile_floats), tile_rows);
}

// Numbers the tiles of all sequences of one side so that each sequence's tiles follow each other
// and no sum over sequences is needed. Packed sequence b, which begins at row cu[b], starts with
// number cu[b] / tile + b: cu[b + 1] / tile + 1 is at least (cu[b] + length) / tile rounded up, so
// that tiles never overlap. At most one number a sequence stays unused.
struct TileNumbers {
  int tile;                        // rows
  int batch;                       //
  int tiles_per_sequence;          // dense
  const std::int32_t* cu_seqlens;  // [batch + 1] packed, else null

  PANTILE_HD constexpr int first(int b) const {
    return cu_seqlens == nullptr ? b * tiles_per_sequence : cu_seqlens[b] / tile + b;
  }

  // The sequence that holds number `number`: the last one with first(b) <= number.
  PANTILE_HD constexpr int sequence(int number) const {
    if (cu_seqlens == nullptr) {
      return number / tiles_per_sequence;
    }
    int low = 0;
    int high = batch;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (first(middle) <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// How many numbers there are; `rows` is the longest sequence (dense) or the total (packed).
PANTILE_HD constexpr std::int64_t tile_numbers(bool packed, std::int64_t rows, std::int64_t batch,
                                               int tile) {
  return packed ? rows / tile + batch : core::ceil_div<std::int64_t>(rows, tile) * batch;
}

}  // namespace pantile::common
