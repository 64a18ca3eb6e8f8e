// Q of a pair from memory to shared memory, where the warps take operand B from. Rows are packed:
// query by query, the heads of the group within. By all threads, between two barriers.
#pragma once

#include <cstdint>

#include "decode/codes.cuh"
#include "decode/schedule.cuh"

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

template <class Config>
PANTILE_DEVICE uint4 load_q_chunk(const DecodeParams& p, const Walk<Config>& walk, int column,
                                  int dim) {
  const uint4* const from = q_chunk(p, walk, column, dim);
  return from != nullptr ? *from : make_uint4(0, 0, 0, 0);
}

// Asks L2 for Q of the first pair before the keys, which then do not stand in its way.
template <class Config>
PANTILE_DEVICE void prefetch_q(const DecodeParams& p, const Walk<Config>& walk) {
  constexpr int kLines = Config::kHeadDim / 64 + 1;  // of 128 bytes
  for (int i = static_cast<int>(threadIdx.x); i < Config::kColumns * kLines;
       i += Config::kThreads) {
    const uint4* const from = q_chunk(p, walk, i / kLines, i % kLines * 64);
    if (from != nullptr) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }
}

template <class Config>
PANTILE_DEVICE void copy_q(const DecodeParams& p, const Walk<Config>& walk, unsigned char* to) {
  constexpr int kChunks = Config::kHeadDim / 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < Config::kColumns * kChunks;
       i += Config::kThreads) {
    const int column = i / kChunks;
    const int chunk = i % kChunks;
    *reinterpret_cast<uint4*>(to + column * Config::kQPitch + chunk * 16) =
        load_q_chunk(p, walk, column, chunk * 8);
  }
}

PANTILE_DEVICE float2 unpack_q(DType dtype, std::uint32_t pair) {
  return dtype == DType::bf16 ? prim::unpack<DType::bf16>(pair) : prim::unpack<DType::f16>(pair);
}

// As f16, for 8-bit caches: divided by a power of two that brings the largest element of a row to
// 1 .. 2. A warp a row.
template <class Config>
PANTILE_DEVICE void convert_q(const DecodeParams& p, const Walk<Config>& walk, unsigned char* to,
                              float* units) {
  constexpr int kChunks = Config::kHeadDim / 8;
  static_assert(kChunks <= 32);
  const int lane = prim::lane_index();
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x) / 32; column < Config::kColumns;
       column += Config::kThreads / 32) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (lane < kChunks) {
      x = load_q_chunk(p, walk, column, lane * 8);
    }
    const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_q(p.queries, pairs[i]);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(prim::kAllLanes, most, lanes));
    }
    const float unit = unit_of(most);
    std::uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_q(p.queries, pairs[i]);
      packed[i] = prim::pack<DType::f16>(pair.x / unit, pair.y / unit);
    }
    if (lane < kChunks) {
      *reinterpret_cast<uint4*>(to + column * Config::kQPitch + lane * 16) =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    if (lane == 0) {
      units[column] = unit;
    }
  }
}

}  // namespace pantile::decode
