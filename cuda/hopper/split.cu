// The kernels around the parts of a split forward, for this family's targets.
#include "common/split.cuh"
#include "hopper/plan.h"

namespace pantile::hopper {

Status prepare_splits(const core::SplitJob& job, const DeviceProps& device, void* stream) {
  return common::launch_prepare_parts(job, device, stream);
}

Status merge_splits(const core::SplitJob& job, DType output, const DeviceProps& device,
                    void* stream) {
  return common::launch_merge_parts(job, output, device, stream);
}

}  // namespace pantile::hopper
