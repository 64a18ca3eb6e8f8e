// The order in which the forward works through its tiles, decided on the host. No CUDA headers.
#pragma once

#include <cstdint>

#include "core/tile_order.h"
#include "pantile/problem.h"
#include "pantile/registry.h"

namespace pantile::hopper {

// Pages of keys are read in pieces that lie in one page and one tile.
inline constexpr int kPageMultiple = 16;

// The greatest common divisor. std::gcd would bring <numeric> into every .cu of the forward.
inline int page_chunk(std::int64_t page_size, int tile_k) {
  std::int64_t chunk = tile_k;
  for (std::int64_t rest = page_size; rest != 0;) {
    const std::int64_t next = chunk % rest;
    chunk = rest;
    rest = next;
  }
  return static_cast<int>(chunk);
}

// Do tiles differ in length? Then blocks claim them one by one from a counter, longest first;
// otherwise each block takes every blocks-th tile.
inline bool claims_dynamically(const ForwardProblem& p, MaskKind mask) {
  return mask != MaskKind::full || p.packed_q || p.packed_k || p.has_seqused_q || p.has_seqused_k ||
         mask_forms(p.variant) != 0;
}

// Tiles of one head; packed queries: slots of all sequences (load.cuh, locate_rows).
inline std::int64_t forward_row_tiles(const ForwardProblem& p, int tile_q) {
  return p.packed_q ? p.total_q / tile_q + p.batch
                    : core::ceil_div<std::int64_t>(p.seqlen_q, tile_q);
}

// Leaves room above for the blocks that claim past the end.
inline bool forward_tiles_fit(const ForwardProblem& p, int tile_q) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - (std::int64_t{1} << 20);
  const std::int64_t heads = p.packed_q ? p.heads_q : p.heads_q * p.batch;
  return heads == 0 || forward_row_tiles(p, tile_q) <= kMost / heads;
}

// Bytes of K and V of the heads that are worked on at a time: what stays in 50 MiB of L2. Short
// sequences: heads with about one tile for each multiprocessor, so that the first reads of K and V
// spread over the whole run instead of standing at the begin of each section. Causal, 512 keys:
// +10 % at head dims 96 and 128, 0 to -2 % at 64, 192 and 256; 1024 keys: +1 %; from 2048 on 0.
// FP8 was not measured.
inline std::int64_t section_bytes(const ForwardProblem& p, int tiles, int group,
                                  std::int64_t head_bytes) {
  constexpr std::int64_t kMost = std::int64_t{32} << 20;
  constexpr int kTiles = 128;
  if (p.packed_q || p.seqlen_k > 1024 || p.head_dim <= 64 || p.head_dim > 128 ||
      p.dtype == DType::e4m3) {
    return kMost;
  }
  const std::int64_t heads = kTiles / core::max_of<std::int64_t>(std::int64_t{tiles} * group, 1);
  return core::min_of(kMost, heads * head_bytes);
}

inline core::TileOrder forward_order(const ForwardProblem& p, MaskKind mask, int tile_q) {
  const int tiles = static_cast<int>(forward_row_tiles(p, tile_q));
  const int heads = static_cast<int>(p.heads_q);
  const int batch =
      p.packed_q ? core::min_of(static_cast<int>(p.batch), 1) : static_cast<int>(p.batch);
  if (!claims_dynamically(p, mask)) {
    return core::TileOrder(tiles, heads, batch, 1, core::TileDirection::ascending);
  }
  const std::int64_t head_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * dtype_bytes(p.dtype);
  const int group = p.heads_k > 0 ? static_cast<int>(p.heads_q / p.heads_k) : 1;
  const int section = core::heads_per_section(head_bytes, group, heads * batch,
                                              section_bytes(p, tiles, group, head_bytes));
  return core::TileOrder(tiles, heads, batch, section, core::TileDirection::descending);
}

}  // namespace pantile::hopper
