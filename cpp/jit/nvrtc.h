// NVRTC, NVIDIA's compiler as a library, found and opened at run time.
#pragma once

#include <string>

#include "jit/settings.h"
#include "pantile/status.h"

namespace pantile::jit {

// 12.8 serialises the products of the Hopper kernels (advisory C7515).
inline constexpr int kOldestNvrtc = 1209;  // major * 100 + minor

// The functions used, with the types of nvrtc.h; 0 is success.
struct Nvrtc {
  using Program = void*;

  std::string path;
  int version = 0;  // major * 100 + minor
  const char* (*error_string)(int code) = nullptr;
  int (*get_version)(int* major, int* minor) = nullptr;
  int (*create)(Program* program, const char* source, const char* name, int headers,
                const char* const* texts, const char* const* names) = nullptr;
  int (*destroy)(Program* program) = nullptr;
  int (*compile)(Program program, int count, const char* const* options) = nullptr;
  int (*add_name)(Program program, const char* expression) = nullptr;
  int (*lowered_name)(Program program, const char* expression, const char** name) = nullptr;
  int (*cubin_bytes)(Program program, std::size_t* bytes) = nullptr;
  int (*cubin)(Program program, char* to) = nullptr;
  int (*log_bytes)(Program program, std::size_t* bytes) = nullptr;
  int (*log)(Program program, char* to) = nullptr;

  std::string version_text() const;  // "13.0"
};

// Looks in: settings.nvrtc alone if it is set; else settings.nvrtc_folders, next to an NVRTC that
// the process has loaded, the loader's path. Takes the first that is new enough and whose major
// version the driver knows. `driver` is major * 100 + minor, 0 when there is no driver.
Status open_nvrtc(const Settings& settings, int driver, Nvrtc* nvrtc);

// The same, opened once a process and kept. After a failure the next call tries again.
Status shared_nvrtc(const Settings& settings, int driver, const Nvrtc** nvrtc);

}  // namespace pantile::jit
