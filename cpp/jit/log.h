// Messages of cpp/jit: to the log that pantile/jit.h takes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pantile/jit.h"

namespace pantile::jit {

void log(LogLevel level, const std::string& text);

// A warning that is given once a process for each text.
void warn_once(const std::string& text);

// Keeps what its thread says back until it is destroyed. Stands before a lock: a log that waits for
// Python's lock must not be called by a thread that holds one of ours.
class DelayedLog {
 public:
  DelayedLog();
  ~DelayedLog();
  DelayedLog(const DelayedLog&) = delete;
  DelayedLog& operator=(const DelayedLog&) = delete;

  void add(LogLevel level, const std::string& text) { kept_.emplace_back(level, text); }

 private:
  DelayedLog* before_;
  std::vector<std::pair<LogLevel, std::string>> kept_;
};

}  // namespace pantile::jit
