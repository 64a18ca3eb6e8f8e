// What was decided: which kernel, tiles, grid and workspace. A plan is a plain value; it stays
// valid for every call with the same problem on the same kind of device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pantile/device.h"
#include "pantile/export.h"
#include "pantile/problem.h"
#include "pantile/registry.h"

namespace pantile {

// How a plan is chosen. The default takes the first row of the kernel table that accepts.
struct PlanOptions {
  Backend backend = Backend::automatic;
};

// Device memory that the caller lends to run_*. It must be aligned to 256 bytes. Its first
// `zeroed_bytes` must be zero before the first call that uses the block; every run leaves them zero
// again, so a block that is kept per stream is cleared once. Two runs that may overlap in time must
// not share a block.
struct Workspace {
  std::size_t bytes = 0;
  std::size_t zeroed_bytes = 0;
};

struct ForwardPlan {
  ForwardProblem problem;
  DeviceProps device;
  const KernelInfo* kernel = nullptr;  // a row of the table, alive for the whole process
  int tile_q = 0;                      // query rows per tile
  int tile_k = 0;                      // keys per tile
  int blocks = 0;                      // thread blocks launched; CPU: work items
  SoftmaxOptions softmax;              // the problem's, with nothing left automatic
  const char* softmax_source = "";  // who chose its unit, where the problem and the kernel left a
                                    // choice: text that lives as long as the process
  // Into how many parts the keys are cut; 1: not. With more, what is above describes the launch
  // over the parts. Under a causal mask that is the last part, which holds the diagonal, and the
  // parts before it, whose keys every query sees, are a launch of `prefix_kernel`.
  int num_splits = 1;
  int split_tile = 0;             // keys; parts end at its multiples
  bool automatic_splits = false;  // the plan decided
  const KernelInfo* prefix_kernel = nullptr;
  int prefix_blocks = 0;
  Workspace workspace;
};

struct BackwardPlan {
  BackwardProblem problem;
  DeviceProps device;
  const KernelInfo* kernel = nullptr;
  int tile_q = 0;
  int tile_k = 0;
  int blocks = 0;
  Workspace workspace;
};

PANTILE_API const char* softmax_unit_name(SoftmaxUnit unit);
PANTILE_API const char* softmax_mode_name(SoftmaxMode mode);

}  // namespace pantile
