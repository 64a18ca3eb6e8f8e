// The one place for the version: CMake and pyproject.toml read these three lines.
#pragma once

#define PANTILE_VERSION_MAJOR 0
#define PANTILE_VERSION_MINOR 1
#define PANTILE_VERSION_PATCH 0
