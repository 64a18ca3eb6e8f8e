#include "jit/nvrtc.h"

#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace pantile::jit {
namespace {

constexpr int kOldestMajor = kOldestNvrtc / 100;
constexpr int kNewestMajor = 19;  // of a library's name, when no driver says how new it may be

bool exists(const std::string& path) {
  struct stat there;
  return stat(path.c_str(), &there) == 0;
}

bool is_folder(const std::string& path) {
  struct stat there;
  return stat(path.c_str(), &there) == 0 && S_ISDIR(there.st_mode);
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string library_name(int major) {
  return "libnvrtc.so." + std::to_string(major);
}

// The newest libnvrtc.so of a folder that the driver can know; empty if there is none.
std::string library_in(const std::string& folder, int newest) {
  for (int major = newest; major >= kOldestMajor; --major) {
    const std::string path = folder + "/" + library_name(major);
    if (exists(path)) {
      return path;
    }
  }
  // Older ones too, so that the message can name what is too old.
  for (const char* name : {"libnvrtc.so.11.2", "libnvrtc.so"}) {
    const std::string path = folder + "/" + name;
    if (exists(path)) {
      return path;
    }
  }
  return "";
}

int note_loaded(dl_phdr_info* info, std::size_t, void* paths) {
  const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  if (path.find("/libnvrtc.so") != std::string::npos) {
    static_cast<std::vector<std::string>*>(paths)->push_back(path);
  }
  return 0;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(note_loaded, &paths);
  return paths;
}

// NVRTC 13.0 opens its builtins by name alone and does not find them beside itself: opened first,
// they are found. Newer ones look beside themselves; then this does nothing new.
void open_builtins(const std::string& library, int major) {
  const std::string folder = folder_of(library);
  DIR* const listing = opendir(folder.c_str());
  if (listing == nullptr) {
    return;
  }
  const std::string begin = "libnvrtc-builtins.so." + std::to_string(major);
  while (const dirent* const entry = readdir(listing)) {
    if (std::strncmp(entry->d_name, begin.c_str(), begin.size()) == 0) {
      static_cast<void>(dlopen((folder + "/" + entry->d_name).c_str(), RTLD_NOW | RTLD_GLOBAL));
    }
  }
  closedir(listing);
}

template <class Function>
bool load_symbol(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool load_symbols(void* library, Nvrtc* n) {
  return load_symbol(library, "nvrtcGetErrorString", &n->error_string) &&
         load_symbol(library, "nvrtcVersion", &n->get_version) &&
         load_symbol(library, "nvrtcCreateProgram", &n->create) &&
         load_symbol(library, "nvrtcDestroyProgram", &n->destroy) &&
         load_symbol(library, "nvrtcCompileProgram", &n->compile) &&
         load_symbol(library, "nvrtcAddNameExpression", &n->add_name) &&
         load_symbol(library, "nvrtcGetLoweredName", &n->lowered_name) &&
         load_symbol(library, "nvrtcGetCUBINSize", &n->cubin_bytes) &&
         load_symbol(library, "nvrtcGetCUBIN", &n->cubin) &&
         load_symbol(library, "nvrtcGetProgramLogSize", &n->log_bytes) &&
         load_symbol(library, "nvrtcGetProgramLog", &n->log);
}

// Empty, or why the library at `path` (a path, or a name for the loader) does not serve. The
// library stays open: closing one that another part of the process uses gains nothing.
std::string try_library(const std::string& path, int driver, Nvrtc* nvrtc) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return error == nullptr ? "cannot be opened" : error;
  }
  Nvrtc found;
  int major = 0;
  int minor = 0;
  if (!load_symbols(library, &found) || found.get_version(&major, &minor) != 0) {
    return "it lacks functions of NVRTC";
  }
  found.version = 100 * major + minor;
  const std::string version = "NVRTC " + found.version_text();
  if (found.version < kOldestNvrtc) {
    return version + " is older than 12.9";
  }
  if (driver != 0 && major > driver / 100) {
    return version + " is newer than the driver, which knows CUDA " + std::to_string(driver / 100) +
           "." + std::to_string(driver % 100);
  }
  Dl_info where;
  const bool known = dladdr(reinterpret_cast<void*>(found.get_version), &where) != 0;
  found.path = known && where.dli_fname != nullptr ? where.dli_fname : path;
  open_builtins(found.path, major);
  *nvrtc = found;
  return "";
}

// Paths and names in the order in which they are tried; what was looked through goes to `places`.
std::vector<std::string> candidates(const Settings& settings, int driver, std::string* places) {
  const int newest = driver == 0 ? kNewestMajor : driver / 100;
  if (!settings.nvrtc.empty()) {
    *places = "PANTILE_NVRTC=" + settings.nvrtc;
    return {is_folder(settings.nvrtc) ? library_in(settings.nvrtc, newest) : settings.nvrtc};
  }
  std::vector<std::string> paths;
  for (const std::string& folder : settings.nvrtc_folders) {
    *places += folder + ", ";
    paths.push_back(library_in(folder, newest));
  }
  for (const std::string& path : loaded_libraries()) {
    paths.push_back(path);
  }
  for (int major = newest; major >= kOldestMajor; --major) {
    paths.push_back(library_name(major));
  }
  *places += "loaded libraries, the loader's path";
  return paths;
}

}  // namespace

std::string Nvrtc::version_text() const {
  return std::to_string(version / 100) + "." + std::to_string(version % 100);
}

Status open_nvrtc(const Settings& settings, int driver, Nvrtc* nvrtc) {
  std::string places;
  std::string reasons;
  for (const std::string& path : candidates(settings, driver, &places)) {
    if (path.empty()) {
      continue;
    }
    const std::string reason = try_library(path, driver, nvrtc);
    if (reason.empty()) {
      return Status();
    }
    // Names that the loader does not know are the usual case and no news.
    const bool named = path.find('/') != std::string::npos || !settings.nvrtc.empty();
    if (named || reason.find("NVRTC") == 0) {
      reasons += "; " + path + ": " + reason;
    }
  }
  const int major = driver == 0 || driver / 100 > 12 ? 13 : 12;
  return Status::error(StatusCode::unavailable,
                       "no NVRTC >= 12.9%s found (looked in %s%s): pip install %s",
                       driver == 0 ? "" : " for this driver", places.c_str(), reasons.c_str(),
                       major == 12 ? "'nvidia-cuda-nvrtc-cu12>=12.9'" : "'nvidia-cuda-nvrtc<14'");
}

Status shared_nvrtc(const Settings& settings, int driver, const Nvrtc** nvrtc) {
  static auto& mutex = *new std::mutex;
  static const Nvrtc* opened = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  // Kept for another machine's sake (driver 0), it may be newer than this driver.
  if (opened == nullptr || (driver != 0 && opened->version / 100 > driver / 100)) {
    Nvrtc found;
    const Status status = open_nvrtc(settings, driver, &found);
    if (!status.ok()) {
      return status;
    }
    opened = new Nvrtc(found);
  }
  *nvrtc = opened;
  return Status();
}

}  // namespace pantile::jit
