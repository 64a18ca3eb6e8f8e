// What device code uses of <math.h> beside functions, which are built into NVRTC; see cstdint.
#pragma once

#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)
