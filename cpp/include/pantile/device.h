// Devices and their properties. Properties are plain values: tests and users may invent them, so
// that plans for a GPU can be made and examined on a machine that has none.
#pragma once

#include <cstdint>

#include "pantile/export.h"
#include "pantile/status.h"

namespace pantile {

enum class DeviceType : std::uint8_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;  // CUDA ordinal; 0 for the CPU
};

// Instruction sets of the CPU backend, each a superset of the one before.
enum class CpuIsa : std::uint8_t { baseline = 0, avx2 = 1, avx512 = 2 };

struct DeviceProps {
  Device device;
  int compute_major = 0;          // CUDA compute capability
  int compute_minor = 0;          //
  int multiprocessors = 0;        // SMs
  int smem_optin_bytes = 0;       // shared memory one block may ask for
  std::int64_t l2_bytes = 0;      //
  CpuIsa isa = CpuIsa::baseline;  // CPU only: the highest set the kernels will use
  int threads = 1;                // CPU only: threads a call may use
  char name[96] = {0};
};

// Fills `props` for a device of this machine. CUDA properties are read once and cached. The CPU's
// instruction set is the best one found, or a lower one named by the environment variable
// PANTILE_CPU_ISA (baseline, avx2, avx512), which exists for tests; so does
// PANTILE_SHARED_MEMORY_KB, which lowers smem_optin_bytes of every GPU.
PANTILE_API Status query_device(Device device, DeviceProps* props);

// Number of CUDA devices; 0 with a reason in `status` when there is no driver or no device.
PANTILE_API int cuda_device_count(Status* status);

PANTILE_API const char* cpu_isa_name(CpuIsa isa);

}  // namespace pantile
