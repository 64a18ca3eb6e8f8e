// What the hardware gives a block on sm_90. Plain C++ without CUDA.
#pragma once

namespace pantile::hopper {

inline constexpr int kSharedMemoryBytes = 232448;  // that a block may ask for: 227 KiB
inline constexpr int kWarpgroupThreads = 128;

}  // namespace pantile::hopper
