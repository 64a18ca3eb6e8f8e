// In the first kernel of the backward: the mean of the keys of each head, and whether it is so
// large that dQ needs it.
//
// Rows of dS sum to 0, or to dLSE where that is given. What the sum of a row of the 16-bit dS lacks
// of it - the leak - goes into dQ with the mean of the keys: with a mean of 3 sigma and values of
// mean 1 it was most of dQ's error, 0.8 % instead of 0.24 %. So in heads with such keys the main
// kernel also sums dS, and finish_rows takes leak * mean away. Exact rows of dS would leave dQ as
// it is, whatever vector stands for the mean, so that some of the keys are enough for it.
#pragma once

#include "common/backward_rows.cuh"
#include "core/softmax_state.h"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::common {

struct KeyMeanParams {
  const void* k;    // [keys, heads_k, head_dim]
  Layout k_layout;  //
  int head_dim;
};

inline constexpr int kMeanThreads = 256;
inline constexpr int kMeanRounds = 4;   // keys of a group of threads, all on their way
inline constexpr int kMeanGroups = 16;  // at most: 32 to 64 keys

// Which keys these are is known outside, too (core::key_sample()).
static_assert(core::key_sample_count(64) ==
              kMeanRounds * core::min_of(kMeanThreads / 8, kMeanGroups));
static_assert(core::key_sample_count(128) ==
              kMeanRounds * core::min_of(kMeanThreads / 16, kMeanGroups));
static_assert(core::key_sample_count(256) ==
              kMeanRounds * core::min_of(kMeanThreads / 32, kMeanGroups));

// The leak of a head is taken away if the squared mean is at least this part of the variance: a
// mean of half a standard deviation.
inline constexpr float kLargeMean = 0.25f;

// Of the middle half of some numbers: their mean, and how far apart its ends are.
struct MiddleHalf {
  float mean, width;
};

// Of `count` numbers, a multiple of 4, `stride` apart. The order of equal ones is that in memory.
PANTILE_DEVICE MiddleHalf middle_half(const float* numbers, int count, int stride) {
  float sum = 0.0f;
  float low = 0.0f;
  float high = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float x = numbers[i * stride];
    int rank = 0;
    for (int j = 0; j < count; ++j) {
      const float y = numbers[j * stride];
      rank += y < x || (y == x && j < i) ? 1 : 0;
    }
    low = rank == count / 4 ? x : low;
    high = rank == 3 * count / 4 - 1 ? x : high;
    sum += rank >= count / 4 && rank < 3 * count / 4 ? x : 0.0f;
  }
  return MiddleHalf{sum / static_cast<float>(count / 2), high - low};
}

// The sum over a block of kMeanThreads, in a fixed order; all threads get it.
PANTILE_DEVICE float block_sum(float x, float (&warps)[kMeanThreads / 32]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(prim::kAllLanes, x, step);
  }
  __syncthreads();
  if (prim::lane_index() == 0) {
    warps[threadIdx.x / 32] = x;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (const float warp : warps) {
    sum += warp;
  }
  return sum;
}

// A block takes key head `number` of [batch][heads_k]. Numbers that are not finite are left out: a
// key that some rows do not see must not reach them.
template <DType kDType>
PANTILE_DEVICE void sample_keys(const RowPass& pass, const KeyMeanParams& params, int number) {
  __shared__ float columns[kMeanThreads * 8];  // [group][column]
  __shared__ float warps[kMeanThreads / 32];
  const int heads_k = pass.heads_q / pass.group;
  const int batch = number / heads_k;
  const core::Sequence queries = core::locate_sequence(pass.queries, batch);
  const core::Sequence keys = core::locate_sequence(pass.keys, batch);
  const Attended part =
      attended_part(core::Mask{queries.length, keys.length, pass.window_left, pass.window_right});
  const int key_threads = params.head_dim <= 64 ? 8 : params.head_dim <= 128 ? 16 : 32;
  const int groups = core::min_of(kMeanThreads / key_threads, kMeanGroups);
  const int samples = kMeanRounds * groups;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % key_threads * 8;
  const auto* const from = static_cast<const std::uint16_t*>(params.k) +
                           (pass.keys.cu_seqlens != nullptr ? keys.row * params.k_layout.seq
                                                            : batch * params.k_layout.batch) +
                           part.first_key * params.k_layout.seq +
                           number % heads_k * params.k_layout.head + column;
  uint4 words[kMeanRounds];
#pragma unroll
  for (int i = 0; i < kMeanRounds; ++i) {
    const std::int64_t sample = 2 * (thread / key_threads + i * groups) + 1;
    words[i] = make_uint4(0, 0, 0, 0);
    if (thread < groups * key_threads && column < params.head_dim && part.mask.keys > 0) {
      const std::int64_t key = sample * part.mask.keys / (2 * samples);  // evenly spaced
      words[i] = *reinterpret_cast<const uint4*>(from + key * params.k_layout.seq);
    }
  }
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < kMeanRounds; ++i) {
    const std::uint32_t x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 pair = prim::unpack<kDType>(x[j / 2]);
      const float one = j % 2 == 0 ? pair.x : pair.y;
      sums[j] += fabsf(one) < core::kInfinity ? one : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    columns[thread * 8 + j] = sums[j];
  }
  __syncthreads();
  // Of normal numbers the middle half is 1.35 standard deviations wide; those of a group's sums are
  // sqrt(kMeanRounds) times those of the keys.
  constexpr float kWidth2 = 1.35f * 1.35f * kMeanRounds;
  float mean = 0.0f;
  float variance = 0.0f;
  if (thread < pass.key_mean_columns) {
    if (thread < key_threads * 8) {
      const MiddleHalf middle = middle_half(columns + thread, groups, key_threads * 8);
      mean = middle.mean * (1.0f / kMeanRounds);
      variance = middle.width * middle.width * (1.0f / kWidth2);
    }
    pass.key_means[number * pass.key_mean_columns + thread] = mean;
  }
  const float square_of_mean = block_sum(mean * mean, warps);
  const float total_variance = block_sum(variance, warps);
  if (thread == 0) {
    pass.large_means[number] = square_of_mean > kLargeMean * total_variance ? 1 : 0;
  }
}

}  // namespace pantile::common
