#include "pantile/device.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend.h"
#include "cpu/backend.h"
#include "pantile/attention.h"

namespace pantile {
namespace {

std::atomic<int> requested_threads{0};  // 0: as many as there are usable cores

// Cores this process may run on, which a container or taskset may have narrowed.
int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

// The processor's own name, for example "AMD EPYC 9B14".
void read_cpu_name(char* name, std::size_t capacity) {
  std::snprintf(name, capacity, "CPU");
#if defined(__x86_64__)
  unsigned brand[12];  // 48 characters, from three leaves of four registers
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned* words = brand + 4 * leaf;
    if (__get_cpuid(0x80000002u + leaf, words, words + 1, words + 2, words + 3) == 0) {
      return;
    }
  }
  char text[sizeof brand + 1] = {0};
  std::memcpy(text, brand, sizeof brand);
  std::size_t begin = std::strspn(text, " ");
  std::size_t end = std::strlen(text);
  while (end > begin && text[end - 1] == ' ') {
    --end;
  }
  std::snprintf(name, capacity, "%.*s", static_cast<int>(end - begin), text + begin);
#endif
}

DeviceProps cpu_properties() {
  DeviceProps props;
  props.device = Device{DeviceType::cpu, 0};
  props.isa = cpu::detect_isa();
  const int threads = requested_threads.load(std::memory_order_relaxed);
  props.threads = threads > 0 ? threads : usable_cores();
  static const struct Name {
    char text[sizeof DeviceProps::name];
    Name() { read_cpu_name(text, sizeof text); }
  } name;
  std::memcpy(props.name, name.text, sizeof props.name);
  return props;
}

}  // namespace

Status query_device(Device device, DeviceProps* props) {
  if (props == nullptr) {
    return Status::error(StatusCode::invalid_argument, "props is null");
  }
  if (device.index < 0) {
    return Status::error(StatusCode::invalid_argument, "device.index is %d; it must be 0 or more",
                         device.index);
  }
  switch (device.type) {
    case DeviceType::cpu:
      if (device.index != 0) {
        return Status::error(StatusCode::invalid_argument,
                             "device.index is %d; the CPU has only device 0", device.index);
      }
      *props = cpu_properties();
      return Status();
    case DeviceType::cuda: return cuda::query_device(device.index, props);
  }
  return Status::error(StatusCode::invalid_argument,
                       "device.type is %d; it must be cpu (0) or cuda (1)",
                       static_cast<int>(device.type));
}

int cuda_device_count(Status* status) {
  Status ignored;
  return cuda::device_count(status != nullptr ? status : &ignored);
}

void set_cpu_threads(int threads) {
  requested_threads.store(threads > 0 ? threads : 0, std::memory_order_relaxed);
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::baseline: return "baseline";
    case CpuIsa::avx2: return "avx2";
    case CpuIsa::avx512: return "avx512";
  }
  return "?";
}

}  // namespace pantile
