// What the host core and the launchers need of CUDA: device properties and the tensor-map encoder.
// Compiled by the C++ compiler. No call here runs before someone asks, so that importing the
// library never initialises the driver (which a later fork would not survive).
#include "backend.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "driver.h"

namespace pantile::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct CachedDevice {
  std::mutex mutex;
  bool known = false;
  DeviceProps props;
};

CachedDevice& cached_device(int index) {
  static CachedDevice devices[kMaxDevices];
  return devices[index];
}

// PANTILE_SHARED_MEMORY_KB makes a GPU look like one whose blocks may ask for less shared memory,
// so that tests run the tiles of smaller GPUs.
Status lower_shared_memory(DeviceProps* props) {
  const char* const text = std::getenv("PANTILE_SHARED_MEMORY_KB");
  if (text == nullptr) {
    return Status();
  }
  char* end = nullptr;
  const long kilobytes = std::strtol(text, &end, 10);
  const int most = props->smem_optin_bytes / 1024;
  if (end == text || *end != '\0' || kilobytes < 1 || kilobytes > most) {
    return Status::error(StatusCode::invalid_argument,
                         "environment variable PANTILE_SHARED_MEMORY_KB is '%s'; it must be a "
                         "number from 1 to %d",
                         text, most);
  }
  props->smem_optin_bytes = static_cast<int>(kilobytes) * 1024;
  return Status();
}

// Attributes one by one: cudaGetDeviceProperties reads everything and takes a hundred times longer.
Status read_device(int index, DeviceProps* props) {
  DeviceProps read;
  read.device = Device{DeviceType::cuda, index};
  int l2_bytes = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {
      {cudaDevAttrComputeCapabilityMajor, &read.compute_major},
      {cudaDevAttrComputeCapabilityMinor, &read.compute_minor},
      {cudaDevAttrMultiProcessorCount, &read.multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &read.smem_optin_bytes},
      {cudaDevAttrL2CacheSize, &l2_bytes},
  };
  for (const auto& item : wanted) {
    Status status =
        check(cudaDeviceGetAttribute(item.value, item.attribute, index), "cudaDeviceGetAttribute");
    if (!status.ok()) {
      return status;
    }
  }
  read.l2_bytes = l2_bytes;
  if (const Status status = lower_shared_memory(&read); !status.ok()) {
    return status;
  }
  cudaDeviceProp names;
  Status status = check(cudaGetDeviceProperties(&names, index), "cudaGetDeviceProperties");
  if (!status.ok()) {
    return status;
  }
  std::snprintf(read.name, sizeof read.name, "%.*s", static_cast<int>(sizeof read.name) - 1,
                names.name);
  *props = read;
  return Status();
}

// Lets `kernel` have `bytes` of dynamic shared memory on the current device, `device`. `prepared`
// belongs to the kernel; setting it twice is harmless.
Status allow_shared_memory(const void* kernel, int bytes, int device, PreparedDevices& prepared) {
  const std::uint64_t bit = std::uint64_t{1} << (device & 63);
  if ((__atomic_load_n(&prepared.bits, __ATOMIC_RELAXED) & bit) != 0) {
    return Status();
  }
  const Status status =
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "cudaFuncSetAttribute");
  if (status.ok()) {
    __atomic_fetch_or(&prepared.bits, bit, __ATOMIC_RELAXED);
  }
  return status;
}

}  // namespace

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return Status();
  }
  static_cast<void>(cudaGetLastError());
  const bool no_device = error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice;
  return Status::error(no_device ? StatusCode::unavailable : StatusCode::device_error, "%s: %s: %s",
                       what, cudaGetErrorName(error), cudaGetErrorString(error));
}

int device_count(Status* status) {
  int count = 0;
  *status = check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status->ok()) {
    return 0;
  }
  if (count == 0) {
    *status = Status::error(StatusCode::unavailable, "the driver reports no CUDA device");
  }
  return count;
}

Status query_device(int index, DeviceProps* props) {
  Status status;
  const int count = device_count(&status);
  if (!status.ok()) {
    return status;
  }
  if (index < 0 || index >= count || index >= kMaxDevices) {
    return Status::error(StatusCode::invalid_argument,
                         "device index is %d; this machine has CUDA devices 0 to %d", index,
                         count - 1);
  }
  CachedDevice& cached = cached_device(index);
  const std::lock_guard<std::mutex> lock(cached.mutex);
  if (!cached.known) {
    status = read_device(index, &cached.props);
    cached.known = status.ok();
  }
  if (cached.known) {
    *props = cached.props;
  }
  return status;
}

Status launch(const char* name, const Launch& how, const void* kernel, void** params) {
  if (how.prepared != nullptr) {
    const Status status = allow_shared_memory(kernel, how.shared_bytes, how.device, *how.prepared);
    if (!status.ok()) {
      return status;
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(how.shared_bytes);
  config.stream = how.stream;
  config.attrs = &attribute;
  config.numAttrs = how.early ? 1 : 0;
  return check(cudaLaunchKernelExC(&config, kernel, params), name);
}

TensorMapEncoder tensor_map_encoder(Status* status) {
  static std::atomic<TensorMapEncoder> cached{nullptr};
  if (const TensorMapEncoder known = cached.load(std::memory_order_acquire)) {
    return known;
  }
  constexpr unsigned kSinceVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
  *status = check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSinceVersion,
                                                   cudaEnableDefault, &answer),
                  "looking up cuTensorMapEncodeTiled");
  if (!status->ok()) {
    return nullptr;
  }
  if (answer != cudaDriverEntryPointSuccess || found == nullptr) {
    *status = Status::error(StatusCode::unavailable, "the driver has no cuTensorMapEncodeTiled");
    return nullptr;
  }
  const auto encoder = reinterpret_cast<TensorMapEncoder>(found);
  cached.store(encoder, std::memory_order_release);
  return encoder;
}

}  // namespace pantile::cuda
