// Marks what the library exports when it is built as a shared library.
#pragma once

#if defined(PANTILE_STATIC) || defined(_WIN32)
#define PANTILE_API
#else
#define PANTILE_API [[gnu::visibility("default")]]
#endif
