#include "jit/store.h"

#include <chrono>
#include <cstdio>
#include <utility>

#include "jit/cache.h"
#include "jit/compile.h"
#include "jit/load.h"
#include "jit/log.h"
#include "jit/nvrtc.h"
#include "pantile/jit.h"

namespace pantile::jit {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string joined(const std::vector<std::string>& folders) {
  std::string text;
  for (const std::string& folder : folders) {
    text += (text.empty() ? "" : ":") + folder;
  }
  return text.empty() ? "no folder" : text;
}

// False: not in this folder, or not to be used; what is wrong with a file that is there is said.
bool read_from(const std::string& folder, const std::string& key, Image* image) {
  std::string why;
  switch (read_image(folder, key, image, &why)) {
    case Found::image: return true;
    case Found::nothing: return false;
    case Found::broken: log(LogLevel::info, why + ": it is ignored"); return false;
    case Found::refused: warn_once(why + ": no kernel is loaded from it"); return false;
  }
  return false;
}

// To the first folder that takes it.
void keep(const Settings& settings, const Image& image) {
  std::string reasons;
  for (const std::string& folder : settings.cache) {
    std::string path;
    const Status status = write_image(folder, image, &path);
    if (status.ok()) {
      log(LogLevel::info, "kernel " + image.name + " is kept in " + path);
      return;
    }
    reasons += (reasons.empty() ? "" : "; ") + std::string(status.message());
  }
  if (!settings.cache.empty()) {  // an empty PANTILE_CACHE asks for this
    warn_once("compiled kernels are not kept for the next process: " + reasons);
  }
}

}  // namespace

Status Store::compile(const Settings& settings, const Request& request, Image* image) const {
  if (settings.mode == Mode::cache) {
    return Status::error(
        StatusCode::unavailable,
        "this call needs the kernel %s, which is not in the library, and neither in %s, and "
        "PANTILE_JIT=cache compiles nothing",
        request.name.c_str(), joined(settings.cache).c_str());
  }
  const Status status = machine_.compile(settings, request, image);
  if (!status.ok()) {
    return Status::error(status.code(),
                         "this call needs the kernel %s, which is not in the "
                         "library: %s; or give a folder of compiled kernels in PANTILE_CACHE",
                         request.name.c_str(), status.message());
  }
  keep(settings, *image);
  return Status();
}

bool Store::read_from_disk(const Settings& settings, const Request& request, Image* image,
                           std::string* origin) const {
  const std::string key = image_key(request);
  for (const std::string& folder : settings.shipped) {
    if (read_from(folder, key, image)) {
      *origin = "shipped: " + image_path(folder, key);
      return true;
    }
  }
  for (const std::string& folder : settings.cache) {
    if (read_from(folder, key, image)) {
      *origin = "disk: " + image_path(folder, key);
      return true;
    }
  }
  return false;
}

Status Store::image_of(const Settings& settings, const Request& request, Image* image,
                       std::string* origin) const {
  if (read_from_disk(settings, request, image, origin)) {
    return Status();
  }
  *origin = "compiled";
  return compile(settings, request, image);
}

Status Store::make(const Request& request, std::unique_ptr<Kernel>* kernel) const {
  const auto begin = std::chrono::steady_clock::now();
  Status status = check_request(request);
  Settings settings;
  if (status.ok()) {
    status = machine_.settings(&settings);
  }
  if (status.ok() && settings.mode == Mode::off) {
    status = Status::error(StatusCode::unavailable,
                           "this call needs the kernel %s, which is not in the library, and "
                           "PANTILE_JIT=off loads and compiles nothing",
                           request.name.c_str());
  }
  Image image;
  auto made = std::make_unique<Kernel>();
  if (status.ok()) {
    status = image_of(settings, request, &image, &made->origin);
  }
  if (status.ok()) {
    status = machine_.load(image, &made->handle);
  }
  if (!status.ok()) {
    return status;
  }
  made->name = request.name;
  made->registers = image.registers;
  made->spill_bytes = image.spill_bytes;
  made->shared_bytes = image.shared_bytes;
  made->advisories = image.advisories;
  made->compiler = image.compiler;
  made->seconds = seconds_since(begin);
  log(LogLevel::info, "kernel " + made->name + ": " + made->origin + ", " +
                          std::to_string(made->seconds) + " s, " + std::to_string(made->registers) +
                          " registers");
  *kernel = std::move(made);
  return Status();
}

Store::Entry& Store::entry_of(const Request& request) {
  // Not the SHA-256: that takes 10 us.
  std::string key = std::to_string(request.arch);
  key.reserve(key.size() + request.entry.size() + request.source.size() + 2);
  key.append(1, '\n').append(request.entry).append(1, '\n').append(request.source);
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end()) {
      return *found->second;
    }
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  std::unique_ptr<Entry>& entry = entries_[key];
  if (entry == nullptr) {
    entry = std::make_unique<Entry>();
  }
  return *entry;
}

Status Store::find(const Request& request, void* stream, const Kernel** kernel) {
  Entry& entry = entry_of(request);
  if (const Kernel* const ready = entry.ready.load(std::memory_order_acquire)) {
    *kernel = ready;
    return Status();
  }
  if (machine_.is_capturing(stream)) {
    return Status::error(StatusCode::unavailable,
                         "the kernel %s is not loaded yet, and the stream is being captured into a "
                         "CUDA graph; make this call once before the capture, or compile its plan "
                         "(C++: pantile::compile(plan), Python: pantile.compile)",
                         request.name.c_str());
  }
  const DelayedLog delayed;
  const std::lock_guard<std::mutex> lock(entry.mutex);
  if (entry.kernel == nullptr) {
    const Status status = make(request, &entry.kernel);
    if (!status.ok()) {
      return status;
    }
    entry.ready.store(entry.kernel.get(), std::memory_order_release);
  }
  *kernel = entry.kernel.get();
  return Status();
}

Status Store::look_up(const Request& request, KernelState* state) {
  const auto fill = [state](const std::string& origin, int registers, int spill_bytes,
                            const std::string& advisories) {
    std::snprintf(state->origin, sizeof state->origin, "%s", origin.c_str());
    state->registers = registers;
    state->spill_bytes = spill_bytes;
    std::snprintf(state->advisories, sizeof state->advisories, "%s", advisories.c_str());
  };
  *state = KernelState{};
  std::snprintf(state->name, sizeof state->name, "%s", request.name.c_str());
  if (const Kernel* const ready = entry_of(request).ready.load(std::memory_order_acquire)) {
    state->in_memory = true;
    fill(ready->origin, ready->registers, ready->spill_bytes, ready->advisories);
    return Status();
  }
  Settings settings;
  const Status status = machine_.settings(&settings);
  if (!status.ok()) {
    return status;
  }
  Image image;
  std::string origin;
  if (settings.mode != Mode::off && read_from_disk(settings, request, &image, &origin)) {
    fill(origin, image.registers, image.spill_bytes, image.advisories);
  } else {
    fill("not compiled yet", 0, 0, "");
  }
  return Status();
}

Machine this_machine() {
  Machine machine;
  machine.settings = read_settings;
  machine.compile = [](const Settings& settings, const Request& request, Image* image) {
    const Nvrtc* nvrtc = nullptr;
    const Status status = shared_nvrtc(settings, driver_version(), &nvrtc);
    return status.ok() ? jit::compile(*nvrtc, request, image) : status;
  };
  machine.load = [](const Image& image, const void** handle) {
    return load_code(image.code, image.symbol, handle);
  };
  machine.is_capturing = is_capturing;
  return machine;
}

}  // namespace pantile::jit
