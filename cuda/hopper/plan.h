// Host half of the hopper backend, compiled by the C++ compiler and without CUDA headers, so that
// plans can be made and explained on any machine.
#pragma once

#include <vector>

#include "core/forward_split.h"
#include "jit/kernel.h"
#include "pantile/kv.h"
#include "pantile/plan.h"
#include "pantile/quantize.h"
#include "pantile/status.h"

namespace pantile::hopper {

Status accept_forward(const KernelInfo& row, const ForwardProblem& problem,
                      const DeviceProps& device);
void configure_forward(ForwardPlan* plan);

// Around the parts of a split forward (common/split.cuh).
Status prepare_splits(const core::SplitJob& job, const DeviceProps& device, void* stream);
Status merge_splits(const core::SplitJob& job, DType output, const DeviceProps& device,
                    void* stream);

// Their rows of dtype e4m3; the two above pass them on.
Status accept_forward_fp8(const KernelInfo& row, const ForwardProblem& problem,
                          const DeviceProps& device);
void configure_forward_fp8(ForwardPlan* plan);

Status accept_quantize(const KernelInfo& row, const QuantizeProblem& problem,
                       const DeviceProps& device);
void configure_quantize(QuantizePlan* plan);

Status accept_backward(const KernelInfo& row, const BackwardProblem& problem,
                       const DeviceProps& device);
void configure_backward(BackwardPlan* plan);

// Their rows of dtype e4m3, which those two pass on.
Status accept_backward_fp8(const KernelInfo& row, const BackwardProblem& problem,
                           const DeviceProps& device);
void configure_backward_fp8(BackwardPlan* plan);

Status accept_decode(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device);
void configure_decode(DecodePlan* plan);
Status schedule_decode(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                       void* stream);

Status accept_append(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device);
void configure_append(AppendPlan* plan);

// The kernels of a plan that are compiled at run time; none for plain attention.
Status list_kernels(const ForwardPlan& plan, std::vector<jit::Request>* requests);
Status list_kernels(const BackwardPlan& plan, std::vector<jit::Request>* requests);

}  // namespace pantile::hopper
