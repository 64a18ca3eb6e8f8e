// From tensors in memory to operands of matrix products in scratch memory: converted, zero-padded,
// with neighbouring rows one after the other whatever the tensor's strides were.
//
// Only rows that exist are read. Operands that are summed over rows of the tensor ("summed") would
// let a NaN or infinity of one row reach every sum, because 0 * NaN is NaN even where the mask made
// the weight 0. They hold 0 in its place; add_not_finite() puts it back where it is attended.
#pragma once

#include "cpu/isa/elements.h"
#include "cpu/isa/gemm.h"
#include "cpu/kernels.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// Consecutive rows of one head of a tensor.
struct Rows {
  const void* data;
  std::int64_t stride;  // elements
  int count;            // rows
  int dim;              // elements a row
  DType dtype;

  // Asks for a piece of a row that is packed soon: rows are often pages apart, where the hardware
  // does not look ahead. Measured with two threads at d64 and d128 in f32: 7 % off the whole
  // forward.
  template <class Element>
  PANTILE_INLINE void look_ahead(int i, int column) const {
    constexpr int kAhead = 6;
    __builtin_prefetch(row<Element>(core::min_of(i + kAhead, count - 1)) + column);
  }

  template <class Element>
  const typename Element::Raw* row(int i) const {
    return static_cast<const typename Element::Raw*>(data) + i * stride;
  }

  Rows part(int first, int rows) const {
    return Rows{static_cast<const char*>(data) + first * stride * dtype_bytes(dtype), stride, rows,
                dim, dtype};
  }
};

// Transposes kLanes vectors in place: log2(kLanes) rounds that exchange off-diagonal blocks.
template <int kStep, int... kLane>
PANTILE_INLINE void exchange(Floats& a, Floats& b) {
  const Floats low =
      __builtin_shufflevector(a, b, ((kLane & kStep) == 0 ? kLane : kLane - kStep + kLanes)...);
  const Floats high =
      __builtin_shufflevector(a, b, ((kLane & kStep) == 0 ? kLane + kStep : kLane + kLanes)...);
  a = low;
  b = high;
}

template <int kStep>
PANTILE_INLINE void exchange_all(Floats (&rows)[kLanes]) {
  PANTILE_UNROLL for (int i = 0; i < kLanes; ++i) {
    if ((i & kStep) == 0) {
      Floats& a = rows[i];
      Floats& b = rows[i + kStep];
#if defined(__AVX512F__)
      exchange<kStep, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>(a, b);
#elif defined(__AVX2__)
      exchange<kStep, 0, 1, 2, 3, 4, 5, 6, 7>(a, b);
#else
      exchange<kStep, 0, 1, 2, 3>(a, b);
#endif
    }
  }
}

PANTILE_INLINE void transpose(Floats (&rows)[kLanes]) {
  exchange_all<1>(rows);
  exchange_all<2>(rows);
  if constexpr (kLanes >= 8) {
    exchange_all<4>(rows);
  }
  if constexpr (kLanes >= 16) {
    exchange_all<8>(rows);
  }
}

// A operand, walked along rows: to[i * padded(dim) + d]. Rows up to the end of a register block are
// zeroed; `to` has room for `capacity` rows.
inline void pack_rows(float* to, const Rows& from, int capacity) {
  const int width = padded(from.dim);
  with_element(from.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int i = 0; i < from.count; ++i) {
      for (int d = 0; d < width; d += kLanes) {
        from.look_ahead<Element>(i, d);
        store(to + i * width + d, read_row<Element>(from.row<Element>(i), d, from.dim));
      }
    }
  });
  const int end = core::min_of(touched_rows(from.count), capacity);
  for (int at = from.count * width; at < end * width; at += kLanes) {
    store(to + at, Floats{});
  }
}

// B operand, the transpose times `scale`: to[d * ld + i]. Columns past the tensor's rows are 0 up
// to a whole vector.
inline void pack_transposed(float* to, int ld, const Rows& from, float scale) {
  with_element(from.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int i = 0; i < from.count; i += kLanes) {
      for (int d = 0; d < from.dim; d += kLanes) {
        Floats block[kLanes];
        PANTILE_UNROLL for (int lane = 0; lane < kLanes; ++lane) {
          block[lane] = Floats{};
          if (i + lane < from.count) {
            block[lane] =
                read_row<Element>(from.row<Element>(i + lane), d, from.dim) * splat(scale);
          }
        }
        transpose(block);
        const int lanes = core::min_of(kLanes, from.dim - d);
        for (int lane = 0; lane < lanes; ++lane) {
          store(to + (d + lane) * ld + i, block[lane]);
        }
      }
    }
  });
}

// B operand summed over rows, which is also an A operand when all of it is finite:
// to[i * padded(dim) + d]. True when a value was not finite.
inline bool pack_summed(float* to, const Rows& from) {
  const int width = padded(from.dim);
  Ints dropped{};
  with_element(from.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int i = 0; i < from.count; ++i) {
      for (int d = 0; d < width; d += kLanes) {
        from.look_ahead<Element>(i, d);
        const Floats x = read_row<Element>(from.row<Element>(i), d, from.dim);
        const Ints finite = x - x == Floats{};
        dropped |= ~finite;
        store(to + i * width + d, select(finite, x, Floats{}));
      }
    }
  });
  return any(dropped);
}

// Adds A(i, k) * B(k, :) for the values that pack_summed() dropped from B and that row i of C
// attends to. `visible(i, k)` is the mask; `count` of the product's rows exist.
template <Walk kWalk, class Visible>
__attribute__((noinline, cold)) void add_not_finite(const Product& p, int count, const Rows& from,
                                                    Visible visible) {
  with_element(from.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int k = 0; k < from.count; ++k) {
      for (int i = 0; i < count; ++i) {
        if (!visible(i, k)) {
          continue;
        }
        const Floats weight =
            splat(kWalk == Walk::along_rows ? p.a[i * p.lda + k] : p.a[k * p.lda + i]);
        for (int d = 0; d < from.dim; d += kLanes) {
          const Floats x = read_row<Element>(from.row<Element>(k), d, from.dim);
          float* c = p.c + i * p.ldc + d;
          store(c, select(x - x == Floats{}, load(c), load(c) + weight * x));
        }
      }
    }
  });
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
