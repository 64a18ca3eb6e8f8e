// Which rows of the FP8 forwards attend to a key whose V is not finite. Quantised V holds 0 there,
// and a bit in a mask (pantile/quantize.h). Used in rare steps only.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "prim/address.cuh"

namespace pantile::attn {

// Of the 32 keys from `first` on, those in the span.
PANTILE_DEVICE std::uint32_t bits_of(const core::Span& span, int first) {
  const int begin = core::clamp(span.begin - first, 0, 32);
  const int end = core::clamp(span.end - first, 0, 32);
  const auto below = [](int n) { return n >= 32 ? ~0u : (1u << n) - 1; };
  return end > begin ? below(end) & ~below(begin) : 0u;
}

// Whether a row that sees `seen` attends to one of the marked keys of the block of 128 that begins
// with first_key.
PANTILE_DEVICE bool attends(const core::Span& seen, const uint4& marks, int first_key) {
  const std::uint32_t words[4] = {marks.x, marks.y, marks.z, marks.w};
  bool any = false;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    any = any || (words[w] & bits_of(seen, first_key + 32 * w)) != 0;
  }
  return any;
}

}  // namespace pantile::attn
