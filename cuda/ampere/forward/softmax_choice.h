// Which kind of softmax a forward runs with: what the caller asked for, completed by the table of
// what is fastest. Plain C++17 without CUDA.
#pragma once

#include "ampere/config.h"
#include "pantile/device.h"
#include "pantile/problem.h"

namespace pantile::ampere {

// What `automatic` stands for on the GPUs of one generation, where a kernel has both units.
struct GenerationChoice {
  int capability;    // 10 * major + minor; the row also serves later ones, up to the next row
  SoftmaxUnit unit;  // head dims 64 and 128, full and causal masks
  const char* source;
};

// Measured: on an H200 with both kinds of kernel (benchmarks/results/h200_flashattention_t.jsonl).
// Model: the clocks of benchmarks/softmax_cycles.py (a test compares); none of these GPUs was run.
// Eight products take the place of 64 FADD a lane. They pay on sm_80, where a scheduler starts an
// FADD every other clock, and on sm_90, with the widest mma.sync; not at the 512 or 256 products of
// 16 bits a clock and multiprocessor of RTX cards, and on sm_87 hardly. What sm_100 does with
// mma.sync is not published: its row is that of sm_90.
inline constexpr GenerationChoice kGenerationChoices[] = {
    {80, SoftmaxUnit::tensor, "model of sm_80"},
    {86, SoftmaxUnit::vector, "model of sm_86"},
    {87, SoftmaxUnit::vector, "model of sm_87"},
    {89, SoftmaxUnit::vector, "model of sm_89"},
    {90, SoftmaxUnit::tensor, "measured on sm_90"},
    {100, SoftmaxUnit::tensor, "model of sm_100, taken as sm_90"},
    {120, SoftmaxUnit::vector, "model of sm_120"},
};

constexpr const GenerationChoice& generation_choice(const DeviceProps& device) {
  const int capability = 10 * device.compute_major + device.compute_minor;
  const GenerationChoice* found = &kGenerationChoices[0];
  for (const GenerationChoice& choice : kGenerationChoices) {
    if (choice.capability <= capability) {
      found = &choice;
    }
  }
  return *found;
}

// Whether the table above decides: an LSE that leaves the library is that of the fp32 weights, for
// the sum of the rounded ones is off by up to half a unit in their last place, and long rows have
// no other kernel.
constexpr bool has_choice(const KernelInfo& row, const ForwardProblem& problem) {
  const bool exact_lse = problem.wants_lse && problem.softmax.exact_lse;
  return has_softmax(row.dtype, row.head_dim, row.head_dim_v, row.mask, ForwardSoftmax::tensor) &&
         !exact_lse && problem.seqlen_k <= kLongRowKeys;
}

// Who chose the unit that the caller left automatic; empty where the caller chose it.
constexpr const char* choice_source(const KernelInfo& row, const ForwardProblem& problem,
                                    const DeviceProps& device) {
  if (problem.softmax.unit != SoftmaxUnit::automatic) {
    return "";
  }
  return has_choice(row, problem) ? generation_choice(device).source : "no other serves the call";
}

// Of a complete choice.
constexpr ForwardSoftmax forward_softmax(const SoftmaxOptions& softmax) {
  if (softmax.unit != SoftmaxUnit::tensor) {
    return ForwardSoftmax::vector;
  }
  switch (softmax.mode) {
    case SoftmaxMode::surrogate: return ForwardSoftmax::surrogate;
    case SoftmaxMode::fast_scale: return ForwardSoftmax::fast_scale;
    case SoftmaxMode::exact: break;
  }
  switch (softmax.tensor_quarters) {
    case 1: return ForwardSoftmax::quarter_share;
    case 2: return softmax.split_rows ? ForwardSoftmax::row_share : ForwardSoftmax::half_share;
    case 4: return ForwardSoftmax::full_share;
    default: return ForwardSoftmax::tensor;
  }
}

// An f16 weight below 2^-25 is 0: beside a weight of 1, n of them lose up to n * 2^-25 of O, which
// f16 resolves from n = 2^14 on. Rows with more keys than that have a largest weight of 2^7, all
// that a threshold of 8 leaves of f16's range, unless the caller chose an offset.
inline constexpr std::int64_t kManyF16Keys = 16384;

constexpr float many_keys_offset(const SoftmaxOptions& softmax) {
  constexpr float kMostAboveReference = 15.0f;  // f16 ends at 2^16
  constexpr float kOffset = 7.0f;
  const float room = kMostAboveReference - softmax.rescale_threshold;
  return room < kOffset ? room : kOffset;
}

// The options of a problem that the row serves, with nothing left automatic.
constexpr SoftmaxOptions complete_softmax(const KernelInfo& row, const ForwardProblem& problem,
                                          const DeviceProps& device) {
  SoftmaxOptions softmax = problem.softmax;
  if (softmax.unit == SoftmaxUnit::automatic) {
    softmax.unit = has_choice(row, problem) ? generation_choice(device).unit : SoftmaxUnit::vector;
  }
  if (softmax.tensor_quarters == kAutomaticShare) {
    softmax.tensor_quarters = softmax.mode == SoftmaxMode::surrogate ? 1 : 0;
  }
  if (problem.wants_max_logit) {
    softmax.rescale_threshold = 0.0f;  // then a row's reference is its maximum
  }
  if (row.dtype == DType::f16 && problem.seqlen_k > kManyF16Keys &&
      softmax.mode == SoftmaxMode::exact && softmax.p_max_offset == 0.0f) {
    softmax.p_max_offset = many_keys_offset(softmax);
  }
  return softmax;
}

// How far below a shared reference a row's maximum may lie. An f16 P has 24 more binary places at
// 1; with 14 of them left for the weights below the row's largest, their error stays a few times
// the usual one.
constexpr float shared_reach(const SoftmaxOptions& softmax, DType dtype) {
  constexpr float kHalfPrecisionReach = 10.0f;
  const float reach = -softmax.min_exponent_log2;
  const float most = kHalfPrecisionReach + softmax.p_max_offset;
  return dtype == DType::f16 && reach > most ? most : reach;
}

}  // namespace pantile::ampere
