#include "host/row_rules.h"

#include <cinttypes>

#include "host/features.h"

namespace pantile::host {

Status row_rule(const KernelInfo& row, const ForwardProblem& p, DType dtype, FeatureSet required) {
  constexpr StatusCode kUnsupported = StatusCode::unsupported;
  if (dtype != row.dtype) {
    return Status::error(kUnsupported, "serves %s, dtype is %s", dtype_name(row.dtype),
                         dtype_name(dtype));
  }
  if (p.head_dim > row.head_dim || p.head_dim_v > row.head_dim_v) {
    return Status::error(kUnsupported,
                         "serves head dims up to %d and %d, they are %" PRId64 " and %" PRId64,
                         row.head_dim, row.head_dim_v, p.head_dim, p.head_dim_v);
  }
  if (row.mask != MaskKind::any && row.mask != mask_kind(p)) {
    return Status::error(kUnsupported,
                         "serves %s masks, window_left is %" PRId64 " and window_right %" PRId64,
                         mask_kind_name(row.mask), p.window_left, p.window_right);
  }
  return feature_rule(row, required);
}

}  // namespace pantile::host
