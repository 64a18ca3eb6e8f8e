// What the tests of cpp/jit share: a folder of their own, the log, environment variables.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "jit/image.h"
#include "jit/kernel.h"
#include "pantile/jit.h"

namespace pantile::jit {

// Warnings and notes since the last clear().
struct Messages {
  static Messages& get() {
    static Messages instance;
    return instance;
  }
  static void take(LogLevel level, const char* text) {
    Messages& all = get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    (level == LogLevel::warning ? all.warnings : all.notes).push_back(text);
  }
  void clear() {
    warnings.clear();
    notes.clear();
  }
  std::mutex mutex;
  std::vector<std::string> warnings, notes;
};

class JitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "pantile-jit-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder = pattern;
    for (const char* name : {"PANTILE_JIT", "PANTILE_CACHE", "PANTILE_NVRTC"}) {
      unsetenv(name);
    }
    Messages::get().clear();
    set_log(Messages::take);
  }
  void TearDown() override {
    set_log(nullptr);
    set_cache_folders(nullptr);
    set_nvrtc_folders(nullptr);
    set_shipped_folders(nullptr);
    std::filesystem::remove_all(folder);
  }
  std::string in_folder(const std::string& name) const { return folder + "/" + name; }

  std::string folder;
};

inline Request request_of(const std::string& source) {
  return Request{"kernel of " + source, source, "entry", 90};
}

inline Image image_of(const std::string& source) {
  const Request request = request_of(source);
  Image image;
  image.key = image_key(request);
  image.name = request.name;
  image.compiler = "nvrtc 13.0";
  image.symbol = "entry";
  image.registers = 168;
  image.spill_bytes = 4;
  image.shared_bytes = 48;
  image.advisories = "C7515";
  image.code = std::string(
                   "\x7f"
                   "ELF\0 ",
                   6) +
               source;  // machine code holds zero bytes
  return image;
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pantile::jit
