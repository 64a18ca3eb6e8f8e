// What stands in for cuda/backend.cc in a build without CUDA: every question gets the reason.
#include "backend.h"
#include "build_info.h"

namespace pantile::cuda {
namespace {

Status no_cuda() {
  return Status::error(StatusCode::unavailable, "this build has no CUDA kernels: %s",
                       PANTILE_CUDA_REASON);
}

}  // namespace

Status query_device(int /*index*/, DeviceProps* /*props*/) {
  return no_cuda();
}

int device_count(Status* status) {
  *status = no_cuda();
  return 0;
}

}  // namespace pantile::cuda
