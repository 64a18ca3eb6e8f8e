#include "host/softmax.h"

namespace pantile::host {

Status softmax_rule(const KernelInfo& row, const ForwardProblem& problem) {
  const SoftmaxOptions& softmax = problem.softmax;
  if (row.backend == Backend::ampere) {
    return Status();
  }
  if (softmax.unit == SoftmaxUnit::tensor) {
    return Status::error(StatusCode::unsupported,
                         "has no softmax on tensor cores, softmax is tensor");
  }
  if (problem.dtype == DType::e4m3 && softmax.unit == SoftmaxUnit::vector) {
    return Status::error(StatusCode::unsupported,
                         "takes row sums from the product with V, softmax is vector");
  }
  const SoftmaxOptions fixed;
  if (row.backend == Backend::hopper && (softmax.rescale_threshold != fixed.rescale_threshold ||
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
