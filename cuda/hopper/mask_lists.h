// Makes the lists of tiles of a mask (common/tile_lists.cuh) in the workspace of a plan, on the
// stream of the kernel that walks them.
#pragma once

#include <cuda_runtime.h>

#include "core/tile_order.h"
#include "hopper/mask.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::hopper {

// The work of the kernel that walks the lists. A backward of packed keys: `order` is empty, and
// work item w is tile number w / heads_k, head w % heads_k.
struct ListedWork {
  core::TileOrder order;
  bool packed_keys = false;
};

// `backward`: lists of tiles of rows, one for each tile of keys.
Status make_lists(bool backward, const ForwardProblem& problem, const ForwardTensors& tensors,
                  const ListLayout& layout, int tile_q, int tile_k, const ListedWork& work,
                  void* workspace, cudaStream_t stream);

}  // namespace pantile::hopper
