// The rules a problem, a device and the tensors of a call must keep. Each rule is one small
// function in validate.cc; its message names the argument, its value and what is allowed.
#pragma once

#include "pantile/device.h"
#include "pantile/kv.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/status.h"

namespace pantile::host {

Status validate(const ForwardProblem& problem);
Status validate(const BackwardProblem& problem);
Status validate(const QuantizeProblem& problem);
// In validate_kv.cc.
Status validate_decode(const KvProblem& problem);
Status validate_append(const KvProblem& problem);
Status validate_decode_tensors(const KvProblem& problem, const KvTensors& tensors);
Status validate_append_tensors(const KvProblem& problem, const KvTensors& tensors);
Status validate(const DeviceProps& device);
Status validate(const PlanOptions& options);

// What messages call the length of a sequence: of packed tensors it is the longest sequence's,
// which Python takes as max_seqlen.
const char* seqlen_q_name(const ForwardProblem& problem);
const char* seqlen_k_name(const ForwardProblem& problem);

// That `batch` sequences of at most `length` rows can hold `total`. Kernels visit no row beyond
// `length`: those would stay as allocated.
Status packed_length_rule(const char* name, std::int64_t length, std::int64_t batch,
                          const char* total_name, std::int64_t total);

// Pointers that are missing, superfluous or less aligned than the problem says. A tensor without
// elements may be null.
Status validate_tensors(const ForwardProblem& problem, const ForwardTensors& tensors);
Status validate_tensors(const BackwardProblem& problem, const BackwardTensors& tensors);
Status validate_tensors(const QuantizeProblem& problem, const QuantizeTensors& tensors);
Status validate_workspace(const Workspace& needed, const void* workspace);

}  // namespace pantile::host
