#include "jit/kernel.h"

#include <chrono>
#include <cstdio>

#include "jit/cache.h"
#include "jit/compile.h"
#include "jit/load.h"
#include "jit/nvrtc.h"
#include "jit/store.h"
#include "pantile/jit.h"

namespace pantile::jit {

namespace {

// Never destroyed: kernels stay as long as the process.
Store& store() {
  static auto& only = *new Store(this_machine());
  return only;
}

}  // namespace

Status find_kernel(const Request& request, void* stream, const Kernel** kernel) {
  return store().find(request, stream, kernel);
}

Status look_up(const Request& request, KernelState* state) {
  return store().look_up(request, state);
}

Status find_nvrtc(char* text, int capacity) {
  Settings settings;
  Status status = read_settings(&settings);
  const Nvrtc* nvrtc = nullptr;
  if (status.ok()) {
    status = shared_nvrtc(settings, driver_version(), &nvrtc);
  }
  if (status.ok()) {
    std::snprintf(text, static_cast<std::size_t>(capacity), "%s, %s", nvrtc->version_text().c_str(),
                  nvrtc->path.c_str());
  }
  return status;
}

Status compile_to_folder(const Request& request, const std::string& folder, KernelFacts* facts) {
  Settings settings;
  Status status = read_settings(&settings);
  const Nvrtc* nvrtc = nullptr;
  if (status.ok()) {
    status = shared_nvrtc(settings, 0, &nvrtc);  // for another machine: its driver is not this one
  }
  const auto begin = std::chrono::steady_clock::now();
  Image image;
  if (status.ok()) {
    status = compile(*nvrtc, request, &image);
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  std::string path;
  if (status.ok()) {
    status = write_image(folder, image, &path);
  }
  if (!status.ok()) {
    return status;
  }
  std::snprintf(facts->name, sizeof facts->name, "%s", image.name.c_str());
  facts->registers = image.registers;
  facts->spill_bytes = image.spill_bytes;
  facts->shared_bytes = image.shared_bytes;
  facts->bytes = static_cast<int>(image.code.size());
  facts->seconds = taken.count();
  std::snprintf(facts->advisories, sizeof facts->advisories, "%s", image.advisories.c_str());
  std::snprintf(facts->file, sizeof facts->file, "%s", path.c_str());
  return Status();
}

Status compile_to_folder(const KernelSource& source, const char* folder, KernelFacts* facts) {
  for (const auto& [what, value] :
       {std::pair{"source.name", source.name}, std::pair{"source.source", source.source},
        std::pair{"source.entry", source.entry}, std::pair{"folder", folder}}) {
    if (value == nullptr || *value == '\0') {
      return Status::error(StatusCode::invalid_argument, "%s is %s; it must be a text", what,
                           value == nullptr ? "null" : "empty");
    }
  }
  if (facts == nullptr) {
    return Status::error(StatusCode::invalid_argument, "facts is null; it must not be");
  }
  return compile_to_folder(Request{source.name, source.source, source.entry, source.arch}, folder,
                           facts);
}

}  // namespace pantile::jit
