// The instances behind row_kernels.h.
#include "ampere/row_kernels.h"

namespace pantile::ampere {

template <DType kDType>
Status launch_bound_keys(const cuda::Launch& how, const common::KeyBoundsParams& params) {
  return cuda::launch("bound_keys", how, common::bound_keys<kDType>, params);
}

template <int kTileQ>
Status launch_settle_units(const cuda::Launch& how, const SettleParams<kTileQ>& params) {
  return cuda::launch("settle_units", how, common::settle_units<SettleParams<kTileQ>, kTileQ>,
                      params);
}

Status launch_sum_slopes(const cuda::Launch& how, const common::SlopeParams& params) {
  return cuda::launch("sum_slopes", how, common::sum_slopes<>, params);
}

Status launch_sum_bias(const cuda::Launch& how, const common::BiasParams& params) {
  return cuda::launch("sum_bias", how, common::sum_bias<>, params);
}

template <int kTileQ>
Status launch_sum_sink_gradients(const cuda::Launch& how, const SinkParams& params) {
  return cuda::launch("sum_sink_gradients", how, sum_sink_gradients<kTileQ>, params);
}

template Status launch_bound_keys<DType::bf16>(const cuda::Launch&, const common::KeyBoundsParams&);
template Status launch_bound_keys<DType::f16>(const cuda::Launch&, const common::KeyBoundsParams&);
template Status launch_settle_units<32>(const cuda::Launch&, const SettleParams<32>&);
template Status launch_settle_units<64>(const cuda::Launch&, const SettleParams<64>&);
template Status launch_sum_sink_gradients<32>(const cuda::Launch&, const SinkParams&);
template Status launch_sum_sink_gradients<64>(const cuda::Launch&, const SinkParams&);

}  // namespace pantile::ampere
