// Grouped-query attention: which key/value head serves a query head.
#pragma once

#include "core/host_device.h"

namespace pantile::core {

struct Heads {
  int heads_q, heads_k;  // heads_q is a multiple of heads_k; both positive
  PANTILE_HD constexpr int group() const { return heads_q / heads_k; }
  PANTILE_HD constexpr int key_head(int query_head) const { return query_head / group(); }
  PANTILE_HD constexpr int first_query_head(int key_head) const { return key_head * group(); }
};

}  // namespace pantile::core
