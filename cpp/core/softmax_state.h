// The online softmax of one row, in base 2: scores are S * scale * log2(e). `exp2` is a parameter
// so that the CPU's vector code, the GPU's MUFU and the tests can each pass their own.
// Source: FlashAttention-2 (Dao 2023), section 3.1; Milakov and Gimelshein 2018, algorithm 3.
#pragma once

#include <limits>

#include "core/host_device.h"

namespace pantile::core {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row that has seen nothing has max = -inf and sum = 0.
struct SoftmaxState {
  float max;  // largest scaled score so far (base 2)
  float sum;  // of exp2(score - max)
};

PANTILE_HD constexpr SoftmaxState empty_softmax_state() {
  return SoftmaxState{-kInfinity, 0.0f};
}

// What is subtracted from scores: the maximum, or 0 for a row of -inf (so that exp2 gives 0, not
// NaN).
PANTILE_HD constexpr float softmax_shift(float max) {
  return max == -kInfinity ? 0.0f : max;
}

// 1 / sum, or 0 for a row that attends to nothing, so that its output is exactly zero.
PANTILE_HD constexpr float normaliser(const SoftmaxState& state) {
  return state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
}

// Natural-log LSE; -inf for a row that attends to nothing.
PANTILE_HD_ANY_CALLABLE
template <class Log2>
PANTILE_HD constexpr float log_sum_exp(const SoftmaxState& state, Log2 log2) {
  return state.sum == 0.0f ? -kInfinity : (state.max + log2(state.sum)) * kLn2;
}

}  // namespace pantile::core
