// Who does what in a block of the Hopper forward. Warpgroup 0 gives up most of its registers and
// splits into helpers; warpgroups 1 and up are the math warpgroups.
#pragma once

namespace pantile::hopper {

enum class HelperWarp : int {
  load = 0,    // claims tiles, loads Q, K and V by TMA; one thread
  store = 1,   // stores finished tiles of O
  guard0 = 2,  // these two keep what is not attended out of V; see guard.cuh
  guard1 = 3,
};
inline constexpr int kGuardWarps = 2;

// Named barriers; 0 is __syncthreads.
template <int kMathWarpgroups>
struct MathBarriers {
  // Ping-pong: warpgroup w issues its products after its turn was passed on by the one before, so
  // that one warpgroup's softmax runs under another's products.
  static constexpr int turn(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kTurnThreads = 2 * 128;
  static constexpr int next(int warpgroup) { return (warpgroup + 1) % kMathWarpgroups; }
  // All warps of one warpgroup, all math warps.
  static constexpr int warpgroup(int warpgroup) { return 1 + kMathWarpgroups + warpgroup; }
  static constexpr int all_math() { return 1 + 2 * kMathWarpgroups; }
};

}  // namespace pantile::hopper
