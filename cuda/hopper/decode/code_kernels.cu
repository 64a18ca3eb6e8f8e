// The instances behind code_kernels.h.
#include "hopper/decode/code_kernels.h"

#include "decode/launch.cuh"

namespace pantile::hopper {
namespace {

template <int kHeadDim>
Status launch_formats(const DecodePlan& plan, const decode::DecodeParams& params,
                      cudaStream_t stream) {
  if (plan.problem.format == CacheFormat::e4m3) {
    constexpr decode::Shape kShape{kHeadDim, kHeadDim, CacheFormat::e4m3, false};
    return decode::launch_shape<kShape, DType::f16, decode::SharedClass::large>(plan, params,
                                                                                stream);
  }
  constexpr decode::Shape kShape{kHeadDim, kHeadDim, CacheFormat::int8, false};
  return decode::launch_shape<kShape, DType::f16, decode::SharedClass::large>(plan, params, stream);
}

}  // namespace

Status launch_decode_codes(const DecodePlan& plan, const decode::DecodeParams& params, int head_dim,
                           cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch_formats<64>(plan, params, stream);
    case 128: return launch_formats<128>(plan, params, stream);
    case 256: return launch_formats<256>(plan, params, stream);
    default:
      return Status::error(StatusCode::unsupported, "%s has no 8-bit caches", plan.kernel->name);
  }
}

}  // namespace pantile::hopper
