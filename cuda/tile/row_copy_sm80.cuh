// Copies a tile of rows from global to shared memory by cp.async, and looks after values that are
// not finite in what was copied. Every thread of the block takes part and always handles the same
// chunks of a tile, so it may read back its own copies after wait_copies without a barrier.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/cp_async.cuh"
#include "tile/nonfinite_sm80.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::tile {

// One head of one sequence of a tensor with 16-bit elements.
struct HeadRows {
  std::uint16_t* rows;        // row 0 of the sequence
  std::int64_t stride;        // elements between rows, a multiple of 8
};

template <int kRows, int kColumns, int kThreads>
class RowCopy {
  using Layout = SwizzledRows<kColumns>;
  static constexpr int kPassRows = kThreads / Layout::kGroup;
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kGroups = Layout::kChunks / Layout::kGroup;
  static_assert(kPassRows % 8 == 0 && kRows % kPassRows == 0);

 public:
  // `columns` of the kColumns exist, a multiple of 8. Chunks past them are never written: see
  // clear_missing_columns.
  PANTILE_DEVICE explicit RowCopy(int columns)
      : row_(static_cast<int>(threadIdx.x) / Layout::kGroup),
        column_(static_cast<int>(threadIdx.x) % Layout::kGroup * 8),
        columns_(columns),
        offset_(Layout::offset(row_, column_ / 8)) {}

  // Rows first..first + kRows of the sequence; those at or past `end` are filled with zeros.
  PANTILE_DEVICE void copy(std::uint32_t tile, const HeadRows& from, int first, int end) const {
    const std::uint16_t* source = from.rows + (first + row_) * from.stride + column_;
    if (first + kRows <= end) {
      copy_passes<false>(tile, source, from, 0);
    } else {
      copy_passes<true>(tile, source, from, end - first - row_);
    }
  }

  // Zeros in the chunks that copy() leaves out; once per tile buffer, before the first copy.
  PANTILE_DEVICE void clear_missing_columns(void* tile) const {
    for_own_chunks([&](int offset, int column) {
      if (column >= columns_) {
        at(tile, offset) = uint4{0, 0, 0, 0};
      }
    });
  }

  // Whether this thread's part of the tile holds an infinity or a NaN.
  template <DType kDType>
  PANTILE_DEVICE bool holds_nonfinite(const void* tile) const {
    NonfiniteSearch<kDType> search;
    for_own_chunks([&](int offset, int) {
      const uint4 chunk = at(tile, offset);
      search.add(chunk.x);
      search.add(chunk.y);
      search.add(chunk.z);
      search.add(chunk.w);
    });
    return search.found();
  }

  // Replaces infinities and NaNs in this thread's part of the tile by zeros.
  template <DType kDType>
  PANTILE_DEVICE void clear_nonfinite(void* tile) const {
    for_own_chunks([&](int offset, int) {
      uint4& chunk = at(tile, offset);
      chunk = uint4{finite_or_zero<kDType>(chunk.x), finite_or_zero<kDType>(chunk.y),
                    finite_or_zero<kDType>(chunk.z), finite_or_zero<kDType>(chunk.w)};
    });
  }

  // Changes the sign of this thread's part of the tile.
  PANTILE_DEVICE void negate(void* tile) const {
    constexpr std::uint32_t kSigns = 0x80008000u;
    for_own_chunks([&](int offset, int) {
      uint4& chunk = at(tile, offset);
      chunk = uint4{chunk.x ^ kSigns, chunk.y ^ kSigns, chunk.z ^ kSigns, chunk.w ^ kSigns};
    });
  }

 private:
  template <bool kRagged>
  PANTILE_DEVICE void copy_passes(std::uint32_t tile, const std::uint16_t* source,
                                  const HeadRows& from, int rows_left) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        constexpr int kGroupColumns = Layout::kGroup * 8;
        const std::uint32_t to =
            tile + offset_ + pass * kPassRows * Layout::kRowBytes + group * kGroupColumns * 2;
        if (column_ + group * kGroupColumns < columns_) {
          if constexpr (kRagged) {
            const bool exists = pass * kPassRows < rows_left;
            prim::copy_async_16_or_zero(to, exists ? source + group * kGroupColumns : from.rows,
                                        exists);
          } else {
            prim::copy_async_16(to, source + group * kGroupColumns);
          }
        }
      }
      source += kPassRows * from.stride;
    }
  }

  template <class Visit>
  PANTILE_DEVICE void for_own_chunks(Visit visit) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        visit(offset_ + pass * kPassRows * Layout::kRowBytes + group * Layout::kGroup * 16,
              column_ + group * Layout::kGroup * 8);
      }
    }
  }

  PANTILE_DEVICE static uint4& at(void* tile, int offset) {
    return *reinterpret_cast<uint4*>(static_cast<char*>(tile) + offset);
  }
  PANTILE_DEVICE static const uint4& at(const void* tile, int offset) {
    return *reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + offset);
  }

  int row_, column_;  // of the first chunk
  int columns_;
  int offset_;  // bytes from the tile's start to the first chunk
};

}  // namespace pantile::tile
