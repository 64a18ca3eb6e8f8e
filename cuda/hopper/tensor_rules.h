// What TMA demands of a tensor, as refusals with the tensor's name. No CUDA headers.
#pragma once

#include <cinttypes>
#include <cstdint>

#include "pantile/dtype.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::hopper {

inline constexpr std::int64_t kMapStrideLimitBytes = std::int64_t{1} << 40;
inline constexpr int kMapAlignBytes = 16;

// `written` tensors may not be expanded; no tensor may along seq.
inline Status tensor_rule(const char* name, const Layout& layout, DType dtype, std::int64_t batch,
                          std::int64_t rows, std::int64_t heads, bool written) {
  if (layout.base_align_bytes < kMapAlignBytes) {
    return Status::error(StatusCode::unsupported, "%s must be aligned to %d bytes, it is to %d",
                         name, kMapAlignBytes, layout.base_align_bytes);
  }
  const struct {
    const char* name;
    std::int64_t size, stride;
    bool may_expand;
  } axes[] = {{"batch", batch, layout.batch, !written},
              {"seq", rows, layout.seq, false},
              {"head", heads, layout.head, !written}};
  for (const auto& axis : axes) {
    if (axis.size <= 1 || (axis.stride == 0 && axis.may_expand)) {
      continue;
    }
    const std::int64_t bytes = axis.stride * dtype_bytes(dtype);
    if (bytes <= 0 || bytes % kMapAlignBytes != 0 || bytes >= kMapStrideLimitBytes) {
      return Status::error(StatusCode::unsupported,
                           "%s: stride along %s is %" PRId64
                           " bytes; TMA needs a positive multiple of %d below 2^40",
                           name, axis.name, bytes, kMapAlignBytes);
    }
  }
  return Status();
}

}  // namespace pantile::hopper
