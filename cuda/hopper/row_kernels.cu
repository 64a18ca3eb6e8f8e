// The instances behind row_kernels.h.
#include "hopper/row_kernels.h"

namespace pantile::hopper {

template <DType kDType>
Status launch_bound_keys(const cuda::Launch& how, const common::KeyBoundsParams& params) {
  return cuda::launch("bound_keys", how, common::bound_keys<kDType>, params);
}

template <DType kDType, int kTileQ, int kRowThreads, bool kInteger>
Status launch_prepare_rows(const cuda::Launch& how, const common::PrepareParams& params) {
  return cuda::launch("prepare_rows", how,
                      common::prepare_rows<kDType, kTileQ, kRowThreads, kInteger>, params);
}

template <int kTileQ>
Status launch_settle_units(const cuda::Launch& how, const SettleParams<kTileQ>& params) {
  return cuda::launch("settle_units", how, common::settle_units<SettleParams<kTileQ>, kTileQ>,
                      params);
}

template <DType kDType, common::SumFormat kFormat>
Status launch_finish_rows(const cuda::Launch& how, const common::FinishParams& params) {
  return cuda::launch("finish_rows", how, common::finish_rows<kDType, kFormat>, params);
}

Status launch_sum_sinks(const cuda::Launch& how, const common::SinkParams& params) {
  return cuda::launch("sum_sinks", how, common::sum_sinks<>, params);
}

Status launch_sum_slopes(const cuda::Launch& how, const common::SlopeParams& params) {
  return cuda::launch("sum_slopes", how, common::sum_slopes<>, params);
}

Status launch_sum_bias(const cuda::Launch& how, const common::BiasParams& params) {
  return cuda::launch("sum_bias", how, common::sum_bias<>, params);
}

#define PANTILE_BOUND(dtype)                                           \
  template Status launch_bound_keys<DType::dtype>(const cuda::Launch&, \
                                                  const common::KeyBoundsParams&);
#define PANTILE_PREPARE(dtype, tile_q, row_threads)                              \
  template Status launch_prepare_rows<DType::dtype, tile_q, row_threads, false>( \
      const cuda::Launch&, const common::PrepareParams&);                        \
  template Status launch_prepare_rows<DType::dtype, tile_q, row_threads, true>(  \
      const cuda::Launch&, const common::PrepareParams&);
#define PANTILE_SETTLE(tile_q) \
  template Status launch_settle_units<tile_q>(const cuda::Launch&, const SettleParams<tile_q>&);
#define PANTILE_FINISH(dtype, format)                                          \
  template Status launch_finish_rows<DType::dtype, common::SumFormat::format>( \
      const cuda::Launch&, const common::FinishParams&);

PANTILE_SETTLE(64)
PANTILE_SETTLE(128)

#define PANTILE_ALL(dtype)       \
  PANTILE_BOUND(dtype)           \
  PANTILE_PREPARE(dtype, 128, 8) \
  PANTILE_PREPARE(dtype, 64, 16) \
  PANTILE_PREPARE(dtype, 64, 32) \
  PANTILE_FINISH(dtype, f32)     \
  PANTILE_FINISH(dtype, i32)     \
  PANTILE_FINISH(dtype, i32x2)

PANTILE_ALL(bf16)
PANTILE_ALL(f16)

}  // namespace pantile::hopper
