// Q of a pair from memory to shared memory, where the warps take operand B from. Rows are packed:
// query by query, the heads of the group within. By all threads.
#pragma once

#include <cstdint>

#include "decode/codes.cuh"
#include "decode/schedule.cuh"
#include "prim/cp_async.cuh"

namespace pantile::decode {

// Eight elements of a packed query; null where there is none.
template <class Config>
PANTILE_DEVICE const uint4* q_chunk(const DecodeParams& p, const Walk<Config>& walk, int column,
                                    int dim) {
  const auto row = p.group.divmod(walk.pair % p.row_tiles * Config::kColumns + column);
  if (row.quotient >= walk.s.queries || dim >= p.head_dim) {
    return nullptr;
  }
  const int head = walk.pair / p.row_tiles * p.group.divisor() + row.remainder;
  const std::int64_t at = walk.b * p.q_rows.batch +
                          (walk.s.first_query + row.quotient) * p.q_rows.seq +
                          head * p.q_rows.head + dim;
  return reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.q) + at);
}

// Q of a pair as one group of copies, for all threads.
template <class Config>
PANTILE_DEVICE void copy_q(const DecodeParams& p, const Walk<Config>& walk, std::uint32_t to) {
  constexpr int kChunks = Config::kHeadDim / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Config::kColumns * kChunks;
       i += Config::kThreads) {
    const int column = i / kChunks;
    const int chunk = i % kChunks;
    const uint4* const from = q_chunk(p, walk, column, chunk * 8);
    prim::copy_async_16_or_zero_if(true, to + column * Config::kQPitch + chunk * 16,
                                   from != nullptr ? from : p.q, from != nullptr);
  }
  prim::commit_copies();
}

PANTILE_DEVICE float2 unpack_q(DType dtype, std::uint32_t pair) {
  return dtype == DType::bf16 ? prim::unpack<DType::bf16>(pair) : prim::unpack<DType::f16>(pair);
}

// Q in shared memory as f16, for 8-bit caches: divided by a power of two that brings the largest
// element of a row to 1 .. 2. A warp a row.
template <class Config>
PANTILE_DEVICE void convert_q(const DecodeParams& p, unsigned char* q, float* units) {
  constexpr int kPairs = Config::kHeadDim / 2;
  const int lane = prim::lane_index();
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x) / 32; column < Config::kColumns;
       column += Config::kThreads / 32) {
    std::uint32_t* const row = reinterpret_cast<std::uint32_t*>(q + column * Config::kQPitch);
    float most = 0.0f;
#pragma unroll 1
    for (int i = lane; i < kPairs; i += 32) {
      const float2 pair = unpack_q(p.queries, row[i]);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
    }
    const float unit = unit_of(most);
    const float inverse = inverse_unit(unit);
#pragma unroll 1
    for (int i = lane; i < kPairs; i += 32) {
      const float2 pair = unpack_q(p.queries, row[i]);
      row[i] = prim::pack<DType::f16>(pair.x * inverse, pair.y * inverse);
    }
    if (lane == 0) {
      units[column] = unit;
    }
  }
}

}  // namespace pantile::decode
