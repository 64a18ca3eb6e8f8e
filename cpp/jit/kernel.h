// Kernels compiled at run time, for the launchers in cuda/<family>: what is asked for, what there
// is then, and find_kernel between them. Nothing here includes a CUDA header.
//
//   find_kernel -> memory -> shipped folders -> cache folders -> NVRTC      (store.h)
//   Image: machine code with its facts, as in a file (image.h, cache.h)    NVRTC: nvrtc.h,
//   compile.h
#pragma once

#include <cstdint>
#include <string>

#include "jit/loaded_kernel.h"
#include "pantile/status.h"

namespace pantile::jit {

struct Request {
  std::string name;    // for messages: "hopper_forward_bf16_d128_causal softcap+dropout"
  std::string source;  // text of a .cu: includes of pantile's device headers, and the kernel
  // An extern "C" kernel of the source, or an instance of a kernel template, as C++ would name it:
  // "pantile::hopper::forward_kernel<..., pantile::DType::bf16>".
  std::string entry;
  int arch = 0;  // 90: sm_90a, 80: sm_80
};

struct Kernel : LoadedKernel {
  std::string name;        // of the first request that asked for it
  int registers = 0;       // of a thread
  int spill_bytes = 0;     // stored by a thread to local memory for want of registers
  int shared_bytes = 0;    // static shared memory of a block
  std::string advisories;  // the compiler's remarks on slow code: "C7515", or ""
  std::string compiler;    // "nvrtc 13.0"
  std::string origin;      // "shipped: path", "disk: path" or "compiled"
  double seconds = 0.0;    // to find it: read and load, or compile and load
};

// The kernel, compiled or loaded if it is not yet in memory. It lives as long as the process. Each
// is compiled once a process; several threads may ask at a time. `stream`, a cudaStream_t, is the
// one that the kernel is to be launched on: while it is captured into a CUDA graph, a kernel that
// is not in memory is an error, because loading it may break the capture. About 0.3 us for a kernel
// in memory: hashing and comparing the source.
Status find_kernel(const Request& request, void* stream, const Kernel** kernel);

// Where find_kernel() would take the kernel from, and what is known of it; see pantile/jit.h.
struct KernelState;
Status look_up(const Request& request, KernelState* state);

// Compiles, needing no GPU, and writes the file to a folder; see pantile/jit.h.
struct KernelFacts;
Status compile_to_folder(const Request& request, const std::string& folder, KernelFacts* facts);

}  // namespace pantile::jit
