// The CPU backend as the kernel table sees it: the tiled kernels and the double-precision textbook.
#pragma once

#include "core/forward_split.h"
#include "pantile/attention.h"
#include "pantile/kv.h"
#include "pantile/quantize.h"

namespace pantile::cpu {

// Best instruction set of this machine, lowered by PANTILE_CPU_ISA.
CpuIsa detect_isa();

// Tiled FlashAttention-2 forward and backward; any head dim up to kMaxHeadDim.
Status accept_forward(const KernelInfo& row, const ForwardProblem& problem,
                      const DeviceProps& device);
void configure_forward(ForwardPlan* plan);
Status run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                   void* stream);
// FP8: accepted like any forward.
void configure_forward_fp8(ForwardPlan* plan);
Status run_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                       void* stream);
Status accept_backward(const KernelInfo& row, const BackwardProblem& problem,
                       const DeviceProps& device);
void configure_backward(BackwardPlan* plan);
Status run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                    void* stream);
// FP8 operands; dO becomes FP8 in it. Accepted like any backward.
void configure_backward_fp8(BackwardPlan* plan);
Status run_backward_fp8(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                        void* stream);

// Textbook attention in double, one row at a time: the oracle of every test.
Status reference_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace,
                         void* stream);
// Exact arithmetic on FP8 operands: what is left of an FP8 kernel's error is its own.
Status reference_forward_fp8(const ForwardPlan& plan, const ForwardTensors& tensors,
                             void* workspace, void* stream);
Status reference_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace,
                          void* stream);
void configure_reference_forward(ForwardPlan* plan);
void configure_reference_backward(BackwardPlan* plan);

// Around the parts of a split forward: the arrays that describe them and copies of Q; the merge.
Status prepare_splits(const core::SplitJob& job, const DeviceProps& device, void* stream);
Status merge_splits(const core::SplitJob& job, DType output, const DeviceProps& device,
                    void* stream);

// The FP8 quantiser: the same bits as the GPU's.
Status accept_quantize(const KernelInfo& row, const QuantizeProblem& problem,
                       const DeviceProps& device);
void configure_quantize(QuantizePlan* plan);
Status run_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                    void* stream);

// Over a cache (kv.h). Sequences are cut into parts of keys, which threads compute apart and which
// are merged in ascending order; a schedule holds how many there are.
Status accept_decode(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device);
void configure_decode(DecodePlan* plan);
Status schedule_decode(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                       void* stream);
Status run_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace, void* stream);
// In double, one query at a time.
void configure_reference_decode(DecodePlan* plan);
Status reference_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace,
                        void* stream);
Status schedule_nothing(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                        void* stream);
Status accept_append(const KernelInfo& row, const KvProblem& problem, const DeviceProps& device);
void configure_append(AppendPlan* plan);
Status run_append(const AppendPlan& plan, const KvTensors& tensors, void* workspace, void* stream);

}  // namespace pantile::cpu
