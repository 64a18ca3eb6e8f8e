// Machine code through the library API of the CUDA runtime (12.8 and later): a kernel handle serves
// every device and every context, and cudaLaunchKernelExC takes it as it takes a function.
#include <cuda_runtime_api.h>

#include "jit/load.h"

namespace pantile::jit {
namespace {

Status check(cudaError_t error, const char* what, const std::string& symbol) {
  if (error == cudaSuccess) {
    return Status();
  }
  static_cast<void>(cudaGetLastError());
  return Status::error(StatusCode::device_error, "%s of %s: %s: %s", what, symbol.c_str(),
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
            "cudaLibraryLoadData", symbol);
  if (!status.ok()) {
    return status;
  }
  cudaKernel_t kernel = nullptr;
  status =
      check(cudaLibraryGetKernel(&kernel, library, symbol.c_str()), "cudaLibraryGetKernel", symbol);
  if (!status.ok()) {
    static_cast<void>(cudaLibraryUnload(library));
    return status;
  }
  *handle = kernel;
  return Status();
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
