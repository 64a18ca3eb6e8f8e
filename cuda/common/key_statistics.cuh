// The host half of what a deterministic backward knows of its keys before the main pass: the
// parameters of bound_keys, and the statistics of the caller (KeyStatistics of pantile/problem.h)
// into the workspace and out of it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/backward_key_bounds.cuh"
#include "common/backward_rows.cuh"
#include "core/integer_unit.h"
#include "driver.h"
#include "pantile/problem.h"

namespace pantile::common {

// `pass`: of the same call.
inline KeyBoundsParams key_bounds_params(const ForwardProblem& problem,
                                         const ForwardTensors& tensors, const RowPass& pass,
                                         const TileNumbers& key_tiles) {
  KeyBoundsParams params;
  params.queries = pass.queries;
  params.keys = pass.keys;
  params.key_tiles = key_tiles;
  params.heads_k = static_cast<int>(problem.heads_k);
  params.window_left = pass.window_left;
  params.window_right = pass.window_right;
  params.k = tensors.k;
  params.v = tensors.v;
  params.k_layout = problem.k;
  params.v_layout = problem.v;
  params.head_dim = static_cast<int>(problem.head_dim);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.bounds = pass.key_bounds;
  return params;
}

// Between the places of a RowPass, [batch][heads_k] each, and the array of the caller.
class KeyStatisticsCopy {
 public:
  KeyStatisticsCopy(const ForwardProblem& problem, const RowPass& pass, std::int32_t* statistics,
                    cudaStream_t stream)
      : heads_(static_cast<std::size_t>(problem.batch * problem.heads_k)),
        mean_bytes_(static_cast<std::size_t>(problem.head_dim) * sizeof(float)),
        pitch_(static_cast<std::size_t>(key_statistics_ints(problem)) * sizeof(std::int32_t)),
        mean_pitch_(static_cast<std::size_t>(pass.key_mean_columns) * sizeof(float)),
        pass_(pass),
        statistics_(statistics),
        stream_(stream) {}

  // What the kernels would have found. Whether a head is measured they find in prepare_rows.
  Status take() const {
    Status status = copy(pass_.key_bounds, sizeof(core::KeyBounds), statistics_, pitch_,
                         sizeof(core::KeyBounds));
    if (pass_.key_means == nullptr) {
      return status;
    }
    if (status.ok()) {
      status = clear(pass_.key_means, heads_ * mean_pitch_);
    }
    if (status.ok()) {
      status = copy(pass_.large_means, sizeof(int), statistics_ + kLargeMean, pitch_, sizeof(int));
    }
    return status.ok() ? copy(pass_.key_means, mean_pitch_, statistics_ + kKeyStatisticsBounds,
                              pitch_, mean_bytes_)
                       : status;
  }

  // What the kernels have found. Without means these are 0.
  Status give() const {
    Status status = clear(statistics_, heads_ * pitch_);
    if (status.ok()) {
      status = copy(statistics_, pitch_, pass_.key_bounds, sizeof(core::KeyBounds),
                    sizeof(core::KeyBounds));
    }
    if (status.ok() && pass_.key_means != nullptr) {
      status = copy(statistics_ + kLargeMean, pitch_, pass_.large_means, sizeof(int), sizeof(int));
    }
    return status.ok() && pass_.key_means != nullptr
               ? copy(statistics_ + kKeyStatisticsBounds, pitch_, pass_.key_means, mean_pitch_,
                      mean_bytes_)
               : status;
  }

 private:
  static constexpr int kLargeMean = kKeyStatisticsBounds - 1;
  static_assert(sizeof(core::KeyBounds) == kLargeMean * sizeof(std::int32_t));

  Status clear(void* to, std::size_t bytes) const {
    return cuda::check(cudaMemsetAsync(to, 0, bytes, stream_), "cudaMemsetAsync");
  }

  // `width` bytes of every head.
  Status copy(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
              std::size_t width) const {
    return cuda::check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, heads_,
                                         cudaMemcpyDeviceToDevice, stream_),
                       "cudaMemcpy2DAsync");
  }

  const std::size_t heads_, mean_bytes_, pitch_, mean_pitch_;
  const RowPass pass_;
  std::int32_t* const statistics_;
  const cudaStream_t stream_;
};

}  // namespace pantile::common
