// Machine code through the library API of the CUDA runtime (12.8 and later): a kernel handle serves
// every device and every context, and cudaLaunchKernelExC takes it as it takes a function.
#include <cuda_runtime_api.h>

#include "jit/load.h"

namespace pantile::jit {
namespace {

Status check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) {
    return Status();
  }
  static_cast<void>(cudaGetLastError());
  return Status::error(StatusCode::device_error, "%s: %s: %s", what.c_str(),
                       cudaGetErrorName(error), cudaGetErrorString(error));
}

// Loading may allocate, which a capture of another thread in global mode would forbid, and which
// would break it.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

Status load_code(const std::string& code, const std::string& symbol, const void** handle) {
  const RelaxedCapture relaxed;
  cudaLibrary_t library = nullptr;
  Status status =
      check(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
            "cudaLibraryLoadData of " + symbol);
  if (!status.ok()) {
    return status;
  }
  cudaKernel_t kernel = nullptr;
  status = check(cudaLibraryGetKernel(&kernel, library, symbol.c_str()),
                 "cudaLibraryGetKernel of " + symbol);
  if (status.ok()) {
    cudaFuncAttributes unused;
    status = check(cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(kernel)),
                   "cudaFuncGetAttributes of " + symbol);
  }
  if (!status.ok()) {
    static_cast<void>(cudaLibraryUnload(library));
    return status;
  }
  *handle = kernel;
  return Status();
}

Status on_device(int index, const std::function<Status()>& work) {
  int before = 0;
  Status status = check(cudaGetDevice(&before), "cudaGetDevice");
  if (status.ok() && before != index) {
    status = check(cudaSetDevice(index), "cudaSetDevice");
  }
  if (!status.ok()) {
    return status;
  }
  status = work();
  if (before != index) {
    static_cast<void>(cudaSetDevice(before));
  }
  return status;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    // The legacy default stream waits for a stream that is being captured.
    return error == cudaErrorStreamCaptureImplicit;
  }
  return capture != cudaStreamCaptureStatusNone;
}

int driver_version() {
  int version = 0;  // 1000 * major + 10 * minor
  if (cudaDriverGetVersion(&version) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return version / 1000 * 100 + version % 1000 / 10;
}

}  // namespace pantile::jit
