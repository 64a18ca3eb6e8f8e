// The kernel table: every compiled kernel, GPU and CPU, in the order in which they are tried.
#pragma once

#include <cstdint>

#include "pantile/dtype.h"
#include "pantile/export.h"

namespace pantile {

// `reference` is the textbook algorithm in double on the CPU; it is never chosen automatically.
enum class Backend : std::uint8_t { automatic = 0, hopper, ampere, cpu, reference };
// `quantize` turns Q, K and V into the operands of an FP8 forward.
enum class Pass : std::uint8_t { forward = 0, backward, quantize };
// `window` covers every mask that is neither full nor plain causal. `any`: decided at run time.
enum class MaskKind : std::uint8_t { full = 0, causal, window, any };

struct KernelInfo {
  const char* name;  // for example "hopper_forward_bf16_d128_causal"
  Backend backend;
  Pass pass;
  DType dtype;     // of Q, K and V as they come in
  int head_dim;    // largest head_dim of Q and K the row serves
  int head_dim_v;  // largest head_dim of V and O the row serves
  MaskKind mask;
  bool compiled;  // false: known to the table, left out of this build (no CUDA)
};

PANTILE_API int kernel_count();
PANTILE_API const KernelInfo& kernel_info(int index);  // 0 <= index < kernel_count()

PANTILE_API const char* backend_name(Backend backend);
PANTILE_API const char* pass_name(Pass pass);
PANTILE_API const char* mask_kind_name(MaskKind mask);

}  // namespace pantile
