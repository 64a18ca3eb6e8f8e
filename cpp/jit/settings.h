// PANTILE_JIT, PANTILE_CACHE, PANTILE_NVRTC and what the program said instead (pantile/jit.h).
#pragma once

#include <string>
#include <vector>

#include "pantile/status.h"

namespace pantile::jit {

enum class Mode { on, cache, off };

struct Settings {
  Mode mode = Mode::on;
  std::vector<std::string> shipped;        // folders that are never written to
  std::vector<std::string> cache;          // folders
  std::string nvrtc;                       // PANTILE_NVRTC; empty: look for it
  std::vector<std::string> nvrtc_folders;  // where to look first
};

// Reads the environment; refuses values that it does not know.
Status read_settings(Settings* settings);

// "a:b" -> {"a", "b"}; empty parts are dropped.
std::vector<std::string> split_folders(const std::string& text);

}  // namespace pantile::jit
