// What the text of an expression (cpp/expression/print.h) is made of: loads of captured tensors,
// functions, additions to gradients. Indices are moved into the tensor, so that no pair reads
// outside of it, hidden ones and those past the end of a sequence included.
#pragma once

#include <cstdint>

#include "attn/variant_params.h"
#include "core/integer.h"
#include "core/softmax_state.h"
#include "pantile/dtype.h"
#include "prim/global_add.cuh"
#include "prim/math.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::attn {

// The structs of an expression of a backward, by a number that is a template argument. A kernel's
// text specialises 1.
template <int>
struct UserHooks {
  struct Score {};
  struct Mask {};
};

// Those of a thread; nothing at all without expressions.
template <int kUser>
struct UserState {
  typename UserHooks<kUser>::Score user_score;
  typename UserHooks<kUser>::Mask user_mask;
};
template <>
struct UserState<0> {};

// ---- captured tensors

PANTILE_DEVICE int bounded_index(const CapturedParams& tensor, int axis, int index) {
  return core::min_of(core::max_of(index, 0), tensor.last[axis]);
}

template <class... Indices>
PANTILE_DEVICE std::int64_t captured_offset(const CapturedParams& tensor, Indices... indices) {
  std::int64_t offset = 0;
  int axis = 0;
  ((offset += bounded_index(tensor, axis, indices) * tensor.stride[axis], ++axis), ...);
  return offset;
}

// Of the gradient, which is contiguous.
template <class... Indices>
PANTILE_DEVICE std::int64_t gradient_offset(const CapturedParams& tensor, Indices... indices) {
  std::int64_t offset = 0;
  int axis = 0;
  ((offset = offset * (std::int64_t{tensor.last[axis]} + 1) + bounded_index(tensor, axis, indices),
    ++axis),
   ...);
  return offset;
}

template <class Element, class... Indices>
PANTILE_DEVICE Element load_element(const CapturedParams& tensor, Indices... indices) {
  return __ldg(static_cast<const Element*>(tensor.data) + captured_offset(tensor, indices...));
}

template <class... Indices>
PANTILE_DEVICE float load_f32(const CapturedParams& tensor, Indices... indices) {
  return load_element<float>(tensor, indices...);
}
template <class... Indices>
PANTILE_DEVICE float load_f16(const CapturedParams& tensor, Indices... indices) {
  return prim::unpack<DType::f16>(load_element<std::uint16_t>(tensor, indices...)).x;
}
template <class... Indices>
PANTILE_DEVICE float load_bf16(const CapturedParams& tensor, Indices... indices) {
  return prim::unpack<DType::bf16>(load_element<std::uint16_t>(tensor, indices...)).x;
}
template <class... Indices>
PANTILE_DEVICE int load_i32(const CapturedParams& tensor, Indices... indices) {
  return load_element<int>(tensor, indices...);
}
template <class... Indices>
PANTILE_DEVICE bool load_bool(const CapturedParams& tensor, Indices... indices) {
  return load_element<unsigned char>(tensor, indices...) != 0;
}

// ---- functions

PANTILE_DEVICE int floor_div(int a, int b) {
  if (b == 0 || b == -1) {
    return b == 0 ? 0 : static_cast<int>(0u - static_cast<unsigned>(a));
  }
  const int quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

PANTILE_DEVICE int floor_mod(int a, int b) {
  return b == 0 || b == -1 ? 0 : a - b * floor_div(a, b);
}

// Relative error 2^-11.
PANTILE_DEVICE float fast_tanh(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Absolute error 2^-22.
PANTILE_DEVICE float exact_tanh(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(result)
      : "f"(1.0f + prim::exp2_approx(x * (2.0f * core::kLog2E))));
  return fmaf(result, -2.0f, 1.0f);
}

PANTILE_DEVICE float fast_sqrt(float x) {
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// NaN of either comes through.
PANTILE_DEVICE float min_of_reals(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
PANTILE_DEVICE float max_of_reals(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ---- gradients

// Adds the sum over the warp.
PANTILE_DEVICE void add_warp_sum(float* to, float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(prim::kAllLanes, x, step);
  }
  if (prim::lane_index() == 0) {
    prim::global_add(to, x);
  }
}

// Hidden pairs have nothing to add.
PANTILE_DEVICE void add_nonzero(float* to, float x) {
  if (x != 0.0f) {
    prim::global_add(to, x);
  }
}

}  // namespace pantile::attn
