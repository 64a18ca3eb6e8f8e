// What the dispatcher and the kernels of decode agree on.
//
// An item is a chunk of the parts of one (sequence, key head, tile of packed rows); parts are cut
// at multiples of part_keys. A packed row r is query r / group, query head r % group of the key
// head. With one chunk the item folds its parts in ascending order and writes O. With more, each
// part's state goes to the workspace, and a second loop folds them in the same order: the bits do
// not depend on the number of chunks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integer.h"
#include "core/kv_sequence.h"
#include "core/kv_split.h"
#include "cpu/kernels.h"
#include "pantile/kv.h"

namespace pantile::cpu {

inline constexpr int kDecodeKeys = 64;  // of a step; parts begin at multiples of it
inline constexpr int kDecodeRows = 32;  // packed rows of a tile
static_assert(kSplitGranule % kDecodeKeys == 0 && core::kLeastInvariantKeys % kDecodeKeys == 0);

struct DecodeJob {
  const KvProblem* problem = nullptr;
  KvTensors tensors;
  core::KvArrays arrays;
  const float* decoded_e4m3 = nullptr;     // [256]
  const std::int32_t* schedule = nullptr;  // [batch]: keys of a part
  int group = 1;
  int row_tiles = 1;
  int chunks = 1;
  int state_floats = 0;         // of a packed row: max, sum, O
  std::int64_t most_parts = 0;  // of a sequence
  float* states = nullptr;  // [batch][heads_k][row_tiles][most_parts][kDecodeRows][state_floats]
};

// (batch * heads_k + head) * row_tiles + tile, and a chunk of it.
struct DecodeItem {
  int batch, head, tile, chunk;
};

PANTILE_HD constexpr DecodeItem decode_item(const DecodeJob& job, int item) {
  DecodeItem result{};
  result.chunk = item % job.chunks;
  item /= job.chunks;
  result.tile = item % job.row_tiles;
  item /= job.row_tiles;
  const auto heads = static_cast<int>(job.problem->heads_k);
  result.head = item % heads;
  result.batch = item / heads;
  return result;
}

// The state of a tile of a part, behind those of the parts before it.
PANTILE_HD float* part_states(const DecodeJob& job, const DecodeItem& item, std::int64_t part) {
  const std::int64_t pair = item.batch * job.problem->heads_k + item.head;
  const std::int64_t tile = pair * job.row_tiles + item.tile;
  return job.states + (tile * job.most_parts + part) * kDecodeRows * job.state_floats;
}

struct DecodeScratch {
  float* queries;  // [kDecodeRows][padded(head_dim)], times scale
  float* keys;     // [kDecodeKeys][padded(head_dim)]
  float* values;   // [kDecodeKeys][padded(head_dim_v)]; with v_in_k the keys
  float* scale_k;  // [kDecodeKeys]
  float* scale_v;  // [kDecodeKeys]
  float* weights;  // [kDecodeKeys]
  float* folded;   // [kDecodeRows][state_floats]
  float* part;     // [kDecodeRows][state_floats]
  std::size_t bytes;
};

PANTILE_HD DecodeScratch decode_scratch(const DecodeJob& job, void* base) {
  const std::int64_t dim = padded(static_cast<int>(job.problem->head_dim));
  const std::int64_t dim_v = padded(static_cast<int>(job.problem->head_dim_v));
  Carver carver(base);
  DecodeScratch scratch{};
  scratch.queries = carver.take<float>(kDecodeRows * dim);
  scratch.keys = carver.take<float>(kDecodeKeys * dim);
  scratch.values = carver.take<float>(kDecodeKeys * (job.problem->v_in_k ? dim : dim_v));
  scratch.scale_k = carver.take<float>(kDecodeKeys);
  scratch.scale_v = carver.take<float>(kDecodeKeys);
  scratch.weights = carver.take<float>(kDecodeKeys);
  scratch.folded = carver.take<float>(std::int64_t{kDecodeRows} * job.state_floats);
  scratch.part = carver.take<float>(std::int64_t{kDecodeRows} * job.state_floats);
  scratch.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return scratch;
}

}  // namespace pantile::cpu
