// Reasons for which the ampere kernels, forward and backward, refuse a problem. No CUDA headers.
#pragma once

#include <cinttypes>
#include <cstdint>

#include "ampere/config.h"
#include "ampere/order.h"
#include "build_options.h"
#include "pantile/device.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::ampere {

inline Status device_rule(const DeviceProps& device) {
  constexpr int kSmallest = shared_class_bytes(SharedClass::small);
  if (device.device.type != DeviceType::cuda) {
    return Status::error(StatusCode::unsupported, "needs a CUDA device");
  }
  if (device.compute_major < 8) {
    return Status::error(StatusCode::unsupported,
                         "needs compute capability 8.0 or later, device %d has %d.%d",
                         device.device.index, device.compute_major, device.compute_minor);
  }
  if (device.smem_optin_bytes < kSmallest) {
    return Status::error(StatusCode::unsupported,
                         "needs %d bytes of shared memory a block, device %d has %d", kSmallest,
                         device.device.index, device.smem_optin_bytes);
  }
  return Status();
}

// Machine code for sm_80 does not run on sm_90, and that of the 16-bit and 8-bit rows for sm_90 is
// only built to be tested there: hopper rows are faster, after a copy where they want one.
// Compiling the PTX for later GPUs at the first call would take the driver up to half a minute a
// row. Asked last, of problems that a row would serve. `at_run_time`: the kernel is compiled there,
// for any GPU.
inline Status build_rule(const KernelInfo& row, const DeviceProps& device,
                         bool at_run_time = false) {
  const bool built = kAmpereOnHopper || (row.dtype == DType::f32 && row.pass != Pass::quantize);
  if (device.compute_major == 9 && !at_run_time && !built) {
    return Status::error(StatusCode::unsupported,
                         "kernel not built for compute capability %d.%d of device %d; configure "
                         "with PANTILE_AMPERE_ON_HOPPER=ON",
                         device.compute_major, device.compute_minor, device.device.index);
  }
  return Status();
}

// Copies are 16 bytes wide.
inline Status dim_rule(const KernelInfo& row, const ForwardProblem& p) {
  const std::int64_t dims[] = {p.head_dim, p.head_dim_v};
  const char* const names[] = {"head_dim", "head_dim_v"};
  const int elements = 16 / dtype_bytes(row.dtype);
  for (int i = 0; i < 2; ++i) {
    if (dims[i] % elements != 0) {
      return Status::error(StatusCode::unsupported,
                           "needs %s to be a multiple of %d, it is %" PRId64, names[i], elements,
                           dims[i]);
    }
  }
  return Status();
}

// A few rows' strides together must fit 63 bits, in bytes. Axes of
// one element have the strides of a contiguous tensor (host::canonical).
inline Status layout_rule(const char* name, const Layout& layout, DType dtype) {
  const int elements = 16 / dtype_bytes(dtype);
  if (layout.base_align_bytes < 16) {
    return Status::error(StatusCode::unsupported, "needs %s aligned to 16 bytes, it is to %d", name,
                         layout.base_align_bytes);
  }
  const char* const axes[] = {"batch", "seq", "head"};
  const std::int64_t strides[] = {layout.batch, layout.seq, layout.head};
  for (int i = 0; i < 3; ++i) {
    if (strides[i] % elements != 0 || strides[i] >= std::int64_t{1} << 39) {
      return Status::error(StatusCode::unsupported,
                           "needs the stride of %s along %s to be a multiple of %d below 2^39, it "
                           "is %" PRId64,
                           name, axes[i], elements, strides[i]);
    }
  }
  return Status();
}

}  // namespace pantile::ampere
