#include "pantile/status.h"

#include <cstdarg>
#include <cstdio>

namespace pantile {

Status Status::error(StatusCode code, const char* format, ...) {
  Status status;
  status.code_ = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message_, sizeof status.message_, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace pantile
