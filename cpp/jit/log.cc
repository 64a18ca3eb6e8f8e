#include "jit/log.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>

namespace pantile::jit {
namespace {

std::atomic<LogFunction> current{nullptr};
thread_local DelayedLog* delayed = nullptr;

}  // namespace

DelayedLog::DelayedLog() : before_(std::exchange(delayed, this)) {}

DelayedLog::~DelayedLog() {
  delayed = before_;
  for (const auto& [level, text] : kept_) {
    log(level, text);
  }
}

void set_log(LogFunction log) {
  current.store(log);
}

void log(LogLevel level, const std::string& text) {
  if (delayed != nullptr) {
    delayed->add(level, text);
  } else if (const LogFunction function = current.load()) {
    function(level, text.c_str());
  } else if (level == LogLevel::warning) {
    std::fprintf(stderr, "pantile: %s\n", text.c_str());
  }
}

void warn_once(const std::string& text) {
  // Never destroyed: threads may still look for kernels when statics are.
  static auto& mutex = *new std::mutex;
  static auto& given = *new std::set<std::string>;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!given.insert(text).second) {
      return;
    }
  }
  log(LogLevel::warning, text);
}

}  // namespace pantile::jit
