// Messages of cpp/jit: to the log that pantile/jit.h takes.
#pragma once

#include <string>

#include "pantile/jit.h"

namespace pantile::jit {

void log(LogLevel level, const std::string& text);

// A warning that is given once a process for each text.
void warn_once(const std::string& text);

}  // namespace pantile::jit
