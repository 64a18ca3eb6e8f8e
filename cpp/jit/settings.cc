#include "jit/settings.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>

#include "pantile/jit.h"

namespace pantile::jit {
namespace {

struct Given {
  std::mutex mutex;
  std::string nvrtc_folders, shipped;
  std::optional<std::string> cache;
};

Given& given() {
  static auto& instance = *new Given;  // never destroyed: see warn_once
  return instance;
}

std::string text_of(const char* text) {
  return text == nullptr ? "" : text;
}

std::string default_cache() {
  const std::string xdg = text_of(std::getenv("XDG_CACHE_HOME"));
  if (!xdg.empty() && xdg[0] == '/') {  // a relative path is to be ignored: XDG base directories
    return xdg + "/pantile/kernels";
  }
  std::string home = text_of(std::getenv("HOME"));
  if (home.empty()) {
    const passwd* const user = getpwuid(getuid());
    home = user == nullptr ? "" : text_of(user->pw_dir);
  }
  return home.empty() ? "" : home + "/.cache/pantile/kernels";
}

// Divided by colons. The caller holds the lock.
std::string cache_text(const Given& from) {
  if (from.cache) {
    return *from.cache;
  }
  const char* const folders = std::getenv("PANTILE_CACHE");
  return folders != nullptr ? std::string(folders) : default_cache();
}

}  // namespace

std::vector<std::string> split_folders(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    std::size_t end = text.find(':', begin);
    end = end == std::string::npos ? text.size() : end;
    if (end > begin) {
      parts.push_back(text.substr(begin, end - begin));
    }
    begin = end + 1;
  }
  return parts;
}

Status read_settings(Settings* settings) {
  const std::string mode = text_of(std::getenv("PANTILE_JIT"));
  if (mode.empty() || mode == "on") {
    settings->mode = Mode::on;
  } else if (mode == "cache") {
    settings->mode = Mode::cache;
  } else if (mode == "off") {
    settings->mode = Mode::off;
  } else {
    return Status::error(StatusCode::invalid_argument,
                         "environment variable PANTILE_JIT is '%s'; it must be on, cache or off",
                         mode.c_str());
  }
  settings->nvrtc = text_of(std::getenv("PANTILE_NVRTC"));
  Given& from = given();
  const std::lock_guard<std::mutex> lock(from.mutex);
  settings->nvrtc_folders = split_folders(from.nvrtc_folders);
  settings->shipped = split_folders(from.shipped);
  settings->cache = split_folders(cache_text(from));
  return Status();
}

void set_nvrtc_folders(const char* folders) {
  const std::lock_guard<std::mutex> lock(given().mutex);
  given().nvrtc_folders = text_of(folders);
}

void set_cache_folders(const char* folders) {
  const std::lock_guard<std::mutex> lock(given().mutex);
  given().cache = folders == nullptr ? std::nullopt : std::optional<std::string>(folders);
}

Status cache_folders(char* text, int capacity) {
  std::string folders;
  {
    const std::lock_guard<std::mutex> lock(given().mutex);
    folders = cache_text(given());
  }
  if (text == nullptr || capacity <= 0 || folders.size() >= static_cast<std::size_t>(capacity)) {
    return Status::error(StatusCode::invalid_argument,
                         "capacity is %d; the cache folders need %zu characters", capacity,
                         folders.size() + 1);
  }
  std::memcpy(text, folders.c_str(), folders.size() + 1);
  return Status();
}

void set_shipped_folders(const char* folders) {
  const std::lock_guard<std::mutex> lock(given().mutex);
  given().shipped = text_of(folders);
}

}  // namespace pantile::jit
