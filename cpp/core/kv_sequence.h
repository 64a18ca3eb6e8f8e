// Where a sequence of a decode or append call lives (pantile/kv.h): its rows of Q and of new keys,
// its slots of the cache. Lengths are read here and nowhere else, and clamped, so that no reader or
// writer leaves the sequence's slots whatever the arrays hold.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

struct KvArrays {
  const std::int32_t* lengths = nullptr;
  const std::int32_t* cu_seqlens_q = nullptr;    // null: seqlen_q each
  const std::int32_t* cu_seqlens_new = nullptr;  // null: seqlen_new each
  const std::int32_t* cache_index = nullptr;     // null: sequence b uses row b
  const std::int32_t* leftpad = nullptr;         // null: 0
  int seqlen_q = 0, seqlen_new = 0;
  int capacity = 0;  // slots of a sequence
};

struct KvSequence {
  std::int64_t query_row;  // of its first query, in rows of packed Q; dense: batch * seqlen_q
  std::int64_t new_row;    // of its first new key, likewise
  int queries;
  int added;      // new keys
  int before;     // slots in use before the step
  int first_key;  // 0, or what leftpad leaves out
  int keys;       // slots that hold keys after the step end here
  int cache_row;  // row of the block table or of the dense cache
};

PANTILE_HD constexpr KvSequence locate_kv_sequence(const KvArrays& arrays, int batch) {
  KvSequence s{};
  s.query_row = static_cast<std::int64_t>(batch) * arrays.seqlen_q;
  s.queries = arrays.seqlen_q;
  if (arrays.cu_seqlens_q != nullptr) {
    s.query_row = arrays.cu_seqlens_q[batch];
    s.queries = max_of(arrays.cu_seqlens_q[batch + 1] - arrays.cu_seqlens_q[batch], 0);
  }
  s.new_row = static_cast<std::int64_t>(batch) * arrays.seqlen_new;
  s.added = arrays.seqlen_new;
  if (arrays.cu_seqlens_new != nullptr) {
    s.new_row = arrays.cu_seqlens_new[batch];
    s.added = max_of(arrays.cu_seqlens_new[batch + 1] - arrays.cu_seqlens_new[batch], 0);
  }
  s.before = arrays.lengths[batch];
  const std::int64_t end = static_cast<std::int64_t>(max_of(s.before, 0)) + s.added;
  s.keys = static_cast<int>(min_of<std::int64_t>(end, arrays.capacity));
  s.first_key = arrays.leftpad != nullptr ? clamp(arrays.leftpad[batch], 0, s.keys) : 0;
  s.cache_row = arrays.cache_index != nullptr ? arrays.cache_index[batch] : batch;
  return s;
}

// Keys begin <= j < end that query i of the sequence sees; -1 lifts a side of the window.
struct KeyRange {
  int begin, end;
};
PANTILE_HD constexpr KeyRange visible_keys(const KvSequence& s, int query, std::int64_t window_left,
                                           std::int64_t window_right) {
  const std::int64_t at = static_cast<std::int64_t>(query) + s.keys - s.queries;
  const std::int64_t low = window_left < 0 ? 0 : at - window_left;
  const std::int64_t high = window_right < 0 ? s.keys : at + window_right + 1;
  const auto begin = static_cast<int>(clamp<std::int64_t>(low, s.first_key, s.keys));
  const auto end = static_cast<int>(clamp<std::int64_t>(high, 0, s.keys));
  return KeyRange{begin, max_of(begin, end)};
}

// Whether a tree mask hides key j from a query: among the last `queries` keys, those without a bit.
PANTILE_HD constexpr bool tree_hides(const KvSequence& s, std::uint64_t bits, int key) {
  const int draft = key - (s.keys - s.queries);
  return draft >= 0 && ((bits >> draft) & 1) == 0;
}

}  // namespace pantile::core
