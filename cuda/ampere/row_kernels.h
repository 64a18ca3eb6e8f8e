// Launches of kernels around the main backward kernel that not every call has. They know no head
// dim and no tile of keys, so that one instance serves many rows of the kernel table:
// row_kernels.cu has them all. A combination that it lacks fails to link.
#pragma once

#include <cstdint>

#include "ampere/backward/sinks.cuh"
#include "ampere/config.h"
#include "common/backward_key_bounds.cuh"
#include "common/backward_settle.cuh"
#include "common/backward_variant.cuh"
#include "driver.h"
#include "pantile/dtype.h"
#include "pantile/status.h"

namespace pantile::ampere {

// For common::settle_units.
template <int kTileQ>
struct SettleParams {
  common::RowPass pass;
  int tile_k;
  int* claimed;
  float* row_terms;  // [heads_q][row tiles][kRowTerms][kTileQ]

  PANTILE_DEVICE float& scale_of(std::int64_t index, int row) const {
    return row_terms[(index * kRowTerms + 2) * kTileQ + row];
  }
};

template <DType kDType>
Status launch_bound_keys(const cuda::Launch& how, const common::KeyBoundsParams& params);

template <int kTileQ>
Status launch_settle_units(const cuda::Launch& how, const SettleParams<kTileQ>& params);

Status launch_sum_slopes(const cuda::Launch& how, const common::SlopeParams& params);

Status launch_sum_bias(const cuda::Launch& how, const common::BiasParams& params);

template <int kTileQ>
Status launch_sum_sink_gradients(const cuda::Launch& how, const SinkParams& params);

}  // namespace pantile::ampere
