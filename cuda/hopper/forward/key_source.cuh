// Where the bytes of a key tile lie. Plain kernels read rows of the sequence one after the other
// (dense or packed) and mask from the bottom right. A kernel of another source is compiled at run
// time. Walks know key tiles by number; only what is here turns a number into coordinates.
#pragma once

#include "core/geometry.h"
#include "core/integer.h"
#include "hopper/forward/storage.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

struct KeySource {
  bool ranges = false;  // the keys of a sequence begin at row k_begin[b]
  bool pages = false;   // key j is slot j % page_size of page block_table[b][j / page_size]
  bool shift = false;   // query i sits at key position i + mask_shift[b]

  constexpr bool operator==(const KeySource&) const = default;
};

// Rows before the keys of a sequence in the maps of K and V, and its number of keys.
template <KeySource kSource>
PANTILE_DEVICE void locate_sequence_keys(const ForwardParams& p, TileInfo& info) {
  info.k_row = 0;
  info.keys = p.seqlen_k;
  if constexpr (kSource.ranges) {
    info.k_row = p.k_begin[info.batch];
  } else if constexpr (!kSource.pages) {
    if (p.cu_seqlens_k != nullptr) {
      info.k_row = p.cu_seqlens_k[info.batch];
      info.keys = p.cu_seqlens_k[info.batch + 1] - info.k_row;
    }
  }
  if (p.seqused_k != nullptr) {
    info.keys = core::clamp(p.seqused_k[info.batch], 0, info.keys);
  }
}

// The mask of a tile's sequence.
template <KeySource kSource>
PANTILE_DEVICE auto mask_of(const ForwardParams& p, const TileInfo& info) {
  const core::Mask mask{info.rows, info.keys, p.window_left, p.window_right};
  if constexpr (kSource.shift) {
    return core::with_shift(mask, p.mask_shift[info.batch]);
  } else {
    return mask;
  }
}

// The key that query `row` of a tile's sequence sits at.
template <KeySource kSource>
PANTILE_DEVICE int position_of(const ForwardParams& p, const TileInfo& info, int row) {
  if constexpr (kSource.shift) {
    return row + mask_of<kSource>(p, info).shift();
  }
  return row + info.keys - info.rows;
}

// Page and slot of a key.
struct PagedKey {
  int page, slot;
};

PANTILE_DEVICE PagedKey paged_key(const ForwardParams& p, int batch, int key) {
  const core::FastDivmod::Result at = p.page_size.divmod(key);
  return PagedKey{__ldg(p.block_table + batch * p.table_stride + at.quotient), at.remainder};
}

// The same; behind the last key of a sequence coordinates outside the tensor, which read as zeros.
PANTILE_DEVICE PagedKey paged_key_or_none(const ForwardParams& p, const TileInfo& info, int key) {
  return key < info.keys ? paged_key(p, info.batch, key) : PagedKey{p.pages, 0};
}

// Copies the key tile whose first key is `key0`, chunk by chunk: `page_chunk` keys lie in one page.
// The table is read one chunk ahead. Rows of whole panels are split into panels by an axis of the
// map, others by columns (hopper/tensor_map.h): `panels_per_copy` says which.
template <tile::PanelTile kTile>
PANTILE_DEVICE void copy_pages(unsigned char* to, const CUtensorMap& map, prim::Mbarrier& full,
                               const ForwardParams& p, const TileInfo& info, int key0,
                               int panels_per_copy) {
  const bool whole = panels_per_copy > 1;
  PagedKey next = paged_key_or_none(p, info, key0);
#pragma unroll 1
  for (int row = 0; row < kTile.rows; row += p.page_chunk) {
    const PagedKey at = next;
    if (row + p.page_chunk < kTile.rows) {
      next = paged_key_or_none(p, info, key0 + row + p.page_chunk);
    }
#pragma unroll
    for (int panel = 0; panel < kTile.panels(); ++panel) {
      prim::tma_load(to + panel * kTile.panel_bytes() + row * tile::kPanelRowBytes, &map, full,
                     prim::TileOrigin{whole ? 0 : panel * tile::kPanelColumns, at.slot,
                                      whole ? panel : 0, info.k_head, at.page});
    }
  }
}

// Row `key` of V of a tile's sequence and head.
template <KeySource kSource>
PANTILE_DEVICE const std::uint16_t* value_row(const ForwardParams& p, const TileInfo& info,
                                              int key) {
  const auto* v = static_cast<const std::uint16_t*>(p.v);
  if constexpr (kSource.pages) {
    const PagedKey at = paged_key(p, info.batch, key);
    return v + at.page * p.v_strides.batch + at.slot * p.v_strides.seq +
           info.head / p.group * p.v_strides.head;
  }
  return v + info.batch * p.v_strides.batch + info.k_row * p.v_strides.seq +
         info.head / p.group * p.v_strides.head + key * p.v_strides.seq;
}

}  // namespace pantile::hopper
