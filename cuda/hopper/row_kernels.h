// Launches of the kernels around the main backward kernel. They work on rows or tiles and know no
// mask, so that one instance serves many rows of the kernel table: row_kernels.cu has them all. A
// combination that it lacks fails to link.
#pragma once

#include <cstdint>

#include "common/backward_finish.cuh"
#include "common/backward_prepare.cuh"
#include "common/backward_settle.cuh"
#include "common/backward_variant.cuh"
#include "driver.h"
#include "pantile/dtype.h"
#include "pantile/status.h"

namespace pantile::hopper {

// For common::settle_units.
template <int kTileQ>
struct SettleParams {
  common::RowPass pass;
  int tile_k;
  int* claimed;

  PANTILE_DEVICE float& scale_of(std::int64_t index, int row) const {
    return *reinterpret_cast<float*>(&pass.lse_terms[index * kTileQ + row].z);
  }
};

// Threads that read a row of dO and O together, 16 bytes each.
constexpr int threads_per_row(int head_dim_v) {
  return head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32;
}

template <DType kDType>
Status launch_bound_keys(const cuda::Launch& how, const common::KeyBoundsParams& params);

template <DType kDType, int kTileQ, int kRowThreads, bool kInteger>
Status launch_prepare_rows(const cuda::Launch& how, const common::PrepareParams& params);

template <int kTileQ>
Status launch_settle_units(const cuda::Launch& how, const SettleParams<kTileQ>& params);

template <DType kDType, common::SumFormat kFormat>
Status launch_finish_rows(const cuda::Launch& how, const common::FinishParams& params);

Status launch_sum_sinks(const cuda::Launch& how, const common::SinkParams& params);
Status launch_sum_slopes(const cuda::Launch& how, const common::SlopeParams& params);
Status launch_sum_bias(const cuda::Launch& how, const common::BiasParams& params);

}  // namespace pantile::hopper
