#include "host/softmax.h"

#include <initializer_list>

namespace pantile::host {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

Status softmax_kind_rule(const SoftmaxOptions& softmax) {
  if (softmax.unit > SoftmaxUnit::tensor) {
    return Status::error(kInvalid,
                         "softmax.unit is %d; it must be automatic (0), vector (1) or tensor (2)",
                         static_cast<int>(softmax.unit));
  }
  if (softmax.mode > SoftmaxMode::fast_scale) {
    return Status::error(
        kInvalid, "softmax.mode is %d; it must be exact (0), surrogate (1) or fast_scale (2)",
        static_cast<int>(softmax.mode));
  }
  if (softmax.mode != SoftmaxMode::exact && softmax.unit != SoftmaxUnit::tensor) {
    return Status::error(kInvalid, "softmax_mode is %s; it needs softmax = tensor, which is %s",
                         softmax_mode_name(softmax.mode), softmax_unit_name(softmax.unit));
  }
  return Status();
}

Status tensor_share_rule(const SoftmaxOptions& softmax) {
  const int quarters = softmax.tensor_quarters;
  if (quarters < kAutomaticShare || quarters == 3 || quarters > 4) {
    return Status::error(
        kInvalid, "tensor_quarters is %d; it must be 0, 1, 2 or 4, or -1 for automatic", quarters);
  }
  if (quarters > 0 && softmax.unit != SoftmaxUnit::tensor) {
    return Status::error(kInvalid, "tensor_share is %g; it needs softmax = tensor, which is %s",
                         quarters / 4.0, softmax_unit_name(softmax.unit));
  }
  const bool surrogate = softmax.mode == SoftmaxMode::surrogate;
  if (quarters != kAutomaticShare && softmax.mode != SoftmaxMode::exact &&
      quarters != (surrogate ? 1 : 0)) {
    return Status::error(kInvalid, "tensor_share is %g; with softmax_mode = %s it must be %s",
                         quarters / 4.0, softmax_mode_name(softmax.mode), surrogate ? "0.25" : "0");
  }
  if (softmax.split_rows && quarters != 2) {
    return Status::error(kInvalid, "tensor_split is rows; it needs tensor_share = 0.5");
  }
  return Status();
}

Status reference_rule(const SoftmaxOptions& softmax) {
  constexpr float kMostAboveReference = 15.0f;  // f16 ends at 2^16
  constexpr float kSmallestExponent = -126.0f;  // of normal fp32 and bf16
  constexpr float kSurrogateThreshold = 8.0f;   // its rescale cuts O to 11 bits, and then by this
  const auto within = [](float x, float low, float high) { return x >= low && x <= high; };
  const float threshold = softmax.rescale_threshold;
  if (!within(threshold, 0.0f, kMostAboveReference)) {
    return Status::error(kInvalid, "rescale_threshold is %g; it must be from 0 to %g",
                         static_cast<double>(threshold), static_cast<double>(kMostAboveReference));
  }
  if (!within(softmax.p_max_offset, 0.0f, kMostAboveReference - threshold)) {
    return Status::error(kInvalid,
                         "p_max_offset is %g; with rescale_threshold %g it must be from 0 to %g",
                         static_cast<double>(softmax.p_max_offset), static_cast<double>(threshold),
                         static_cast<double>(kMostAboveReference - threshold));
  }
  if (!within(softmax.min_exponent_log2, kSmallestExponent, 0.0f)) {
    return Status::error(kInvalid, "min_exponent_log2 is %g; it must be from %g to 0",
                         static_cast<double>(softmax.min_exponent_log2),
                         static_cast<double>(kSmallestExponent));
  }
  if (softmax.mode == SoftmaxMode::surrogate && threshold < kSurrogateThreshold) {
    return Status::error(kInvalid,
                         "rescale_threshold is %g; with softmax_mode = surrogate it must be at "
                         "least %g",
                         static_cast<double>(threshold), static_cast<double>(kSurrogateThreshold));
  }
  return Status();
}

}  // namespace

Status softmax_options_rule(const ForwardProblem& problem) {
  for (const auto rule : {softmax_kind_rule, tensor_share_rule, reference_rule}) {
    const Status status = rule(problem.softmax);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status softmax_rule(const KernelInfo& row, const ForwardProblem& problem) {
  const SoftmaxOptions& softmax = problem.softmax;
  const bool quantized = problem.dtype == DType::e4m3;
  if (row.backend == Backend::ampere && !quantized) {
    return Status();
  }
  if (softmax.unit == SoftmaxUnit::tensor) {
    return Status::error(StatusCode::unsupported,
                         "has no softmax on tensor cores, softmax is tensor");
  }
  if (quantized && softmax.unit == SoftmaxUnit::vector) {
    return Status::error(StatusCode::unsupported,
                         "takes row sums from the product with V, softmax is vector");
  }
  const SoftmaxOptions fixed;
  const bool on_gpu = row.backend == Backend::hopper || row.backend == Backend::ampere;
  if (on_gpu && (softmax.rescale_threshold != fixed.rescale_threshold ||
                 softmax.p_max_offset != fixed.p_max_offset)) {
    return Status::error(
        StatusCode::unsupported, "has rescale_threshold %g and p_max_offset %g, they are %g and %g",
        static_cast<double>(fixed.rescale_threshold), static_cast<double>(fixed.p_max_offset),
        static_cast<double>(softmax.rescale_threshold), static_cast<double>(softmax.p_max_offset));
  }
  return Status();
}

SoftmaxOptions only_softmax(const ForwardProblem& problem) {
  SoftmaxOptions softmax = problem.softmax;
  softmax.unit = problem.dtype == DType::e4m3 ? SoftmaxUnit::tensor : SoftmaxUnit::vector;
  softmax.tensor_quarters = 0;
  return softmax;
}

}  // namespace pantile::host

namespace pantile {

const char* softmax_unit_name(SoftmaxUnit unit) {
  switch (unit) {
    case SoftmaxUnit::automatic: return "auto";
    case SoftmaxUnit::vector: return "vector";
    case SoftmaxUnit::tensor: return "tensor";
  }
  return "?";
}

const char* softmax_mode_name(SoftmaxMode mode) {
  switch (mode) {
    case SoftmaxMode::exact: return "exact";
    case SoftmaxMode::surrogate: return "surrogate";
    case SoftmaxMode::fast_scale: return "fast_scale";
  }
  return "?";
}

}  // namespace pantile
