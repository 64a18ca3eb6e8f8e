#include "build_info.h"
#include "jit/load.h"

namespace pantile::jit {

Status load_code(const std::string&, const std::string&, const void**) {
  return Status::error(StatusCode::unavailable, "this build has no CUDA: %s", PANTILE_CUDA_REASON);
}

Status on_device(int, const std::function<Status()>& work) {
  return work();
}

bool is_capturing(void*) {
  return false;
}

int driver_version() {
  return 0;
}

}  // namespace pantile::jit
