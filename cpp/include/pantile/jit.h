// Kernels compiled at run time. Plain attention never needs this: its kernels are in the library. A
// call with a variant may need a kernel that is not; it is then looked for in memory, in the cache
// folders, and at last compiled by NVRTC, NVIDIA's compiler as a library, which is loaded for that.
//
// Environment variables, read when a kernel is looked for:
//   PANTILE_JIT     on (default); cache: what is in the folders, nothing is compiled; off
//   PANTILE_CACHE   folders divided by colons, looked through in that order; compiled kernels go to
//                   the first that can be written to. Default: pantile/kernels in the user's cache
//                   folder ($XDG_CACHE_HOME or ~/.cache). Empty: no folder.
//   PANTILE_NVRTC   libnvrtc.so, or the folder that holds it; nothing else is tried then
#pragma once

#include "pantile/export.h"
#include "pantile/plan.h"
#include "pantile/status.h"

namespace pantile {

// Compiles or loads what the first run of the plan would compile or load, and launches nothing:
// before a CUDA graph is captured, or before a server takes requests. One call serves all plans
// with the same kernel, mask kind, tiles and variant, whatever their lengths and pointers.
PANTILE_API Status compile(const ForwardPlan& plan);
PANTILE_API Status compile(const BackwardPlan& plan);

}  // namespace pantile

namespace pantile::jit {

// Folders that may hold NVRTC, divided by colons; null or "": none. They are tried before an NVRTC
// that the process has loaded already, and before the loader's path. Python passes the folders of
// the pip packages.
PANTILE_API void set_nvrtc_folders(const char* folders);

// As PANTILE_CACHE, which it replaces; null: PANTILE_CACHE again.
PANTILE_API void set_cache_folders(const char* folders);

// The cache folders in use, divided by colons, first first; "" if there is none. An error if the
// text has no room for them.
PANTILE_API Status cache_folders(char* text, int capacity);

// Folders of kernels that came with the program, divided by colons, looked through before the cache
// folders and never written to; null or "": none.
PANTILE_API void set_shipped_folders(const char* folders);

// What the library says of kernels that it compiles or loads: `text` is one line or the compiler's
// log. Without a log, warnings go to stderr and the rest nowhere. May be called by any thread.
enum class LogLevel { debug = 0, info, warning };
using LogFunction = void (*)(LogLevel level, const char* text);
PANTILE_API void set_log(LogFunction log);

// The NVRTC that would compile, "13.0, /usr/.../libnvrtc.so.13", or why there is none. Loads it.
PANTILE_API Status find_nvrtc(char* text, int capacity);

struct KernelFacts {
  char name[128] = "";
  char file[512] = "";
  int registers = 0;         // of a thread
  int spill_bytes = 0;       // stored by a thread to local memory for want of registers
  int shared_bytes = 0;      // static shared memory of a block
  int bytes = 0;             // of the machine code
  char advisories[64] = "";  // "C7515": the compiler's remarks on slow code, divided by commas
  double seconds = 0.0;      // that the compiler took
};

// A kernel of a plan that is compiled at run time, as things stand: looking compiles, loads and
// launches nothing. What is unknown before it is compiled is 0.
struct KernelState {
  char name[128] = "";    // "hopper_forward_bf16_d128_causal softcap+dropout"
  char origin[600] = "";  // "compiled", "disk: <file>", "shipped: <file>", or "not compiled yet"
  bool in_memory = false;
  int registers = 0;
  int spill_bytes = 0;
  char advisories[64] = "";
};

// Sets `count` to the number of such kernels, 0 when the library has them all, and writes the
// states of the first `capacity`.
PANTILE_API Status describe(const ForwardPlan& plan, KernelState* states, int capacity, int* count);
PANTILE_API Status describe(const BackwardPlan& plan, KernelState* states, int capacity,
                            int* count);

// For machines without NVRTC: compiles the kernels of a plan, needing no GPU, into a folder where
// PANTILE_CACHE or set_shipped_folders() finds them. Sets `count` to the number of kernels, 0 when
// the library has them all, and writes the facts of the first `capacity`.
PANTILE_API Status compile_to_folder(const ForwardPlan& plan, const char* folder,
                                     KernelFacts* facts, int capacity, int* count);
PANTILE_API Status compile_to_folder(const BackwardPlan& plan, const char* folder,
                                     KernelFacts* facts, int capacity, int* count);

// The same for a kernel of one's own, against the headers of pantile's kernels. `entry` is the name
// of an extern "C" kernel of `source`, or an instance of a kernel template. `arch` is a compute
// capability, 90 or 80.
struct KernelSource {
  const char* name = nullptr;  // for messages
  const char* source = nullptr;
  const char* entry = nullptr;
  int arch = 0;
};
PANTILE_API Status compile_to_folder(const KernelSource& source, const char* folder,
                                     KernelFacts* facts);

}  // namespace pantile::jit
