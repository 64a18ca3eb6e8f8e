// Kernels pass tensor maps on and never look into them: 128 bytes, opaque. See cstdint.
#pragma once

struct alignas(64) CUtensorMap {
  unsigned long opaque[16];
};
