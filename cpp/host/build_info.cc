#include "build_info.h"

#include "pantile/attention.h"

namespace pantile {

const char* build_info() {
  return PANTILE_BUILD_INFO;
}

}  // namespace pantile
