// Copies a tile of rows from global to shared memory by cp.async, and looks after values that are
// not finite in what was copied. Every thread of the block takes part and always handles the same
// chunks of a tile, so it may read back its own copies after wait_copies without a barrier.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/cp_async.cuh"
#include "prim/nonfinite.cuh"
#include "prim/special_registers.cuh"
#include "prim/unpack.cuh"
#include "tile/swizzled_rows_sm80.cuh"

namespace pantile::tile {

// One head of one sequence of a tensor with 16-bit elements.
struct HeadRows {
  std::uint16_t* rows;  // row 0 of the sequence
  std::int64_t stride;  // elements between rows, a multiple of 8
};

template <int kRows, int kColumns, int kThreads>
class RowCopy {
  using Layout = SwizzledRows<kColumns>;

 public:
  static constexpr int kPassRows = kThreads / Layout::kGroup;

 private:
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kGroups = Layout::kChunks / Layout::kGroup;
  static constexpr int kGroupColumns = Layout::kGroup * 8;
  static_assert(kPassRows % 8 == 0 && kRows % kPassRows == 0);

 public:
  // `columns` of the kColumns exist, a multiple of 8. Chunks past them are never written: see
  // clear_missing_columns.
  PANTILE_DEVICE explicit RowCopy(int columns) : columns_(columns) {}

  // Where this thread begins to read a tile whose first row is `first`.
  PANTILE_DEVICE static const char* source(const HeadRows& from, int first) {
    const FirstChunk chunk;
    return reinterpret_cast<const char*>(from.rows + (first + chunk.row) * from.stride +
                                         chunk.column);
  }

  // Copies the tile that `source` belongs to, or nothing unless `wanted`. pass_bytes: from a row to
  // the one kPassRows below it, best a kernel parameter, because a product with the stride would
  // take registers in a loop.
  PANTILE_DEVICE void copy_if(bool wanted, std::uint32_t tile, const char* source,
                              std::int64_t pass_bytes) const {
    const FirstChunk chunk;
    for_chunks(chunk, [&](int pass, int offset, int column) {
      prim::copy_async_16_if(wanted && column < columns_, tile + offset,
                             source + pass * pass_bytes + (column - chunk.column) * 2);
    });
  }

  // Only the first `existing` rows of the tile exist: zeros for the others.
  PANTILE_DEVICE void copy_ragged_if(bool wanted, std::uint32_t tile, const char* source,
                                     std::int64_t pass_bytes, int existing) const {
    const FirstChunk chunk;
    for_chunks(chunk, [&](int pass, int offset, int column) {
      prim::copy_async_16_or_zero_if(wanted && column < columns_, tile + offset,
                                     source + pass * pass_bytes + (column - chunk.column) * 2,
                                     chunk.row + pass * kPassRows < existing);
    });
  }

  // The same for rows that lie anywhere: address(row) is where row `row` of the tile begins, which
  // is asked of rows that exist only.
  template <class Address>
  PANTILE_DEVICE void copy_rows_if(bool wanted, std::uint32_t tile, int existing,
                                   Address address) const {
    const FirstChunk chunk;
    const char* from = nullptr;
    for_chunks(chunk, [&](int pass, int offset, int column) {
      const int row = chunk.row + pass * kPassRows;
      const bool exists = wanted && row < existing;
      if (column == chunk.column) {
        from = exists ? address(row) : nullptr;
      }
      prim::copy_async_16_or_zero_if(wanted && column < columns_, tile + offset, from + column * 2,
                                     exists);
    });
  }

  // Zeros in the chunks that copy() leaves out; once per tile buffer, before the first copy.
  PANTILE_DEVICE void clear_missing_columns(void* tile) const {
    for_own_chunks([&](int offset, int column) {
      if (column >= columns_) {
        at(tile, offset) = uint4{0, 0, 0, 0};
      }
    });
  }

  // Whether this warp's part of the tile holds an infinity or a NaN.
  template <DType kDType>
  PANTILE_DEVICE static bool holds_nonfinite(const void* tile) {
    prim::NonFiniteScan<kDType> scan;
    for_own_chunks([&](int offset, int) { scan.add(at(tile, offset)); });
    return scan.any();
  }

  // Replaces infinities and NaNs in this thread's part of the tile by zeros.
  template <DType kDType>
  PANTILE_DEVICE static void clear_nonfinite(void* tile) {
    for_own_chunks([&](int offset, int) {
      uint4& chunk = at(tile, offset);
      chunk = uint4{prim::zero_nonfinite<kDType>(chunk.x), prim::zero_nonfinite<kDType>(chunk.y),
                    prim::zero_nonfinite<kDType>(chunk.z), prim::zero_nonfinite<kDType>(chunk.w)};
    });
  }

  // Multiplies this thread's part of the tile and rounds it again.
  template <DType kDType>
  PANTILE_DEVICE static void multiply(void* tile, float factor) {
    const auto product = [&](std::uint32_t word) {
      if constexpr (kDType == DType::f32) {
        return __float_as_uint(__uint_as_float(word) * factor);
      } else {
        const float2 x = prim::unpack<kDType>(word);
        return prim::pack<kDType>(x.x * factor, x.y * factor);
      }
    };
    for_own_chunks([&](int offset, int) {
      uint4& chunk = at(tile, offset);
      chunk = uint4{product(chunk.x), product(chunk.y), product(chunk.z), product(chunk.w)};
    });
  }

  // Changes the sign of this thread's part of the tile.
  PANTILE_DEVICE static void negate(void* tile) {
    constexpr std::uint32_t kSigns = 0x80008000u;
    for_own_chunks([&](int offset, int) {
      uint4& chunk = at(tile, offset);
      chunk = uint4{chunk.x ^ kSigns, chunk.y ^ kSigns, chunk.z ^ kSigns, chunk.w ^ kSigns};
    });
  }

 private:
  // This thread's first chunk of any tile; worked out where it is needed, see
  // special_registers.cuh.
  struct FirstChunk {
    int row, column;  // column: in elements
    int offset;       // bytes from the tile's start
    PANTILE_DEVICE FirstChunk() {
      const int thread = prim::fresh_thread_index();
      row = thread / Layout::kGroup;
      column = thread % Layout::kGroup * 8;
      offset = Layout::offset(row, column / 8);
    }
  };

  // Calls visit(pass, offset, column) for each chunk that this thread handles.
  template <class Visit>
  PANTILE_DEVICE static void for_chunks(const FirstChunk& chunk, Visit visit) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        visit(pass, chunk.offset + pass * kPassRows * Layout::kRowBytes + group * kGroupColumns * 2,
              chunk.column + group * kGroupColumns);
      }
    }
  }

  template <class Visit>
  PANTILE_DEVICE static void for_own_chunks(Visit visit) {
    for_chunks(FirstChunk(), [&](int, int offset, int column) { visit(offset, column); });
  }

  PANTILE_DEVICE static uint4& at(void* tile, int offset) {
    return *reinterpret_cast<uint4*>(static_cast<char*>(tile) + offset);
  }
  PANTILE_DEVICE static const uint4& at(const void* tile, int offset) {
    return *reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + offset);
  }

  int columns_;
};

}  // namespace pantile::tile
