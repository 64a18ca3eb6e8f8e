// The kernel table behind plan_*, run_* and explain_*: one row a kernel, with the three functions
// every kernel family provides. `accept` is both the answer to "can you?" and the check before a
// run, so the two can never disagree.
#pragma once

#include "core/forward_split.h"
#include "pantile/attention.h"
#include "pantile/kv.h"
#include "pantile/quantize.h"

namespace pantile::host {

template <class Problem, class Plan, class Tensors>
struct KernelRow {
  KernelInfo info;
  // Ok, or the reason why this row cannot serve the problem on this device.
  Status (*accept)(const KernelInfo& info, const Problem& problem, const DeviceProps& device);
  // Fills tile_q, tile_k, blocks and workspace of a plan whose problem, device and kernel are set.
  void (*configure)(Plan* plan);
  // Launches; null when the row is not compiled into this build.
  Status (*run)(const Plan& plan, const Tensors& tensors, void* workspace, void* stream);
};

// A forward row has the two kernels around the parts of a split call, too; null when not compiled.
struct ForwardRow {
  KernelInfo info;
  Status (*accept)(const KernelInfo& info, const ForwardProblem& problem,
                   const DeviceProps& device);
  void (*configure)(ForwardPlan* plan);
  Status (*run)(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                void* stream);
  // Writes the arrays that describe the parts, and copies Q for them.
  Status (*prepare_splits)(const core::SplitJob& job, const DeviceProps& device, void* stream);
  // Merges their results into O, which has the dtype `output`, LSE and what else is wanted.
  Status (*merge_splits)(const core::SplitJob& job, DType output, const DeviceProps& device,
                         void* stream);
};
using BackwardRow = KernelRow<BackwardProblem, BackwardPlan, BackwardTensors>;
using QuantizeRow = KernelRow<QuantizeProblem, QuantizePlan, QuantizeTensors>;

// A decode row also cuts the work of a step, for run_schedule; null when not compiled.
struct DecodeRow {
  KernelInfo info;
  Status (*accept)(const KernelInfo& info, const KvProblem& problem, const DeviceProps& device);
  // Fills tile_q, tile_k, blocks, schedule_ints and workspace.
  void (*configure)(DecodePlan* plan);
  Status (*run)(const DecodePlan& plan, const KvTensors& tensors, void* workspace, void* stream);
  Status (*schedule)(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                     void* stream);
};
using AppendRow = KernelRow<KvProblem, AppendPlan, KvTensors>;  // run: without workspace

template <class Row>
struct RowList {
  const Row* rows;
  int count;
};

// GPU rows in the order of cuda/kernels.def, then CPU rows, then the reference.
RowList<ForwardRow> forward_rows();
RowList<BackwardRow> backward_rows();
RowList<QuantizeRow> quantize_rows();
RowList<DecodeRow> decode_rows();
RowList<AppendRow> append_rows();

}  // namespace pantile::host
