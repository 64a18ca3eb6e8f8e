// Which kind of softmax a forward runs with: what the caller asked for, completed by the table of
// what is fastest. Plain C++17 without CUDA.
#pragma once

#include "ampere/config.h"
#include "pantile/problem.h"

namespace pantile::ampere {

// What `automatic` stands for, measured on an H200
// (benchmarks/results/h200_flashattention_t.jsonl). An LSE that leaves the library is that of the
// fp32 weights: the sum of the rounded ones is off by up to half a unit in their last place. Long
// rows have no other kernel.
constexpr SoftmaxUnit fastest_unit(const KernelInfo& row, bool exact_lse, bool long_rows) {
  const bool tensor =
      has_softmax(row.dtype, row.head_dim, row.head_dim_v, row.mask, ForwardSoftmax::tensor) &&
      !exact_lse && !long_rows;
  return tensor ? SoftmaxUnit::tensor : SoftmaxUnit::vector;
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
constexpr SoftmaxOptions complete_softmax(const KernelInfo& row, const ForwardProblem& problem) {
  SoftmaxOptions softmax = problem.softmax;
  if (softmax.unit == SoftmaxUnit::automatic) {
    softmax.unit =
        fastest_unit(row, problem.wants_lse && softmax.exact_lse, problem.seqlen_k > kLongRowKeys);
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
