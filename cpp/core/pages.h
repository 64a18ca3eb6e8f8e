// A paged key/value cache: the keys of a sequence lie in pages of equal size, anywhere in a pool,
// and a table names the page of each stretch of keys.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integer.h"

namespace pantile::core {

struct PagedKeys {
  const std::int32_t* page_table = nullptr;  // [batch, pages of a sequence]
  std::int64_t table_stride = 0;             // entries between sequences
  std::int64_t page_stride = 0;              // elements between pages of the pool
  std::int64_t slot_stride = 0;              // elements between keys of a page
  FastDivmod page_keys;                      // keys of a page
};

// Elements from the pool's first element to key `key` of sequence `batch`.
PANTILE_HD constexpr std::int64_t key_offset(const PagedKeys& pages, int batch, int key) {
  const FastDivmod::Result place = pages.page_keys.divmod(key);
  const std::int64_t page = pages.page_table[batch * pages.table_stride + place.quotient];
  return page * pages.page_stride + place.remainder * pages.slot_stride;
}

// Keys from `key` on that follow each other in its page, at most `wanted`.
PANTILE_HD constexpr int keys_in_page(const PagedKeys& pages, int key, int wanted) {
  return min_of(pages.page_keys.divisor() - pages.page_keys.divmod(key).remainder, wanted);
}

}  // namespace pantile::core
