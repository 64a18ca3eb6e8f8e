// Status: what every function of the C++ API returns. It owns its text, allocates nothing and
// throws nothing, so it may cross any language boundary.
#pragma once

#include "pantile/export.h"

namespace pantile {

enum class StatusCode {
  ok = 0,
  invalid_argument,  // the caller passed something wrong; the message names it, its value, the rule
  unsupported,       // a valid request that no compiled kernel serves; the message says why
  unavailable,       // the device, driver or build lacks what is needed
  device_error,      // CUDA reported an error
};

class [[nodiscard]] PANTILE_API Status {
 public:
  static constexpr int kMessageCapacity = 480;  // bytes, terminator included; longer texts are cut

  Status() { message_[0] = '\0'; }

  // printf-style; `code` must not be `ok`.
  static Status error(StatusCode code, const char* format, ...)
#if defined(__GNUC__)
      __attribute__((format(printf, 2, 3)))
#endif
      ;

  bool ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  const char* message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  char message_[kMessageCapacity];
};

}  // namespace pantile
