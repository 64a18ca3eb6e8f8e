// Host half of variants (pantile/variant.h) on Hopper: which kernels serve them. Softcap, ALiBi,
// bias and dropout are hooks of a kernel (attn/variant.cuh), which is compiled at run time with the
// hooks that a problem asks for; sinks are in every kernel. No CUDA headers.
#pragma once

#include <string>

#include "attn/variant_params.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::hopper {

// How the kernels read a bias: elements one by one, or pairs of neighbouring keys.
enum class BiasForm { none, single16, pair16, single32, pair32 };
inline constexpr int kBiasForms = 5;

// The hooks of a kernel: all that its text depends on beside the row of the kernel table.
struct VariantHooks {
  bool softcap = false;
  bool alibi = false;
  BiasForm bias = BiasForm::none;
  bool dropout = false;
  bool grad_alibi = false;  // these two: backward
  bool grad_bias = false;

  constexpr bool any() const { return softcap || alibi || bias != BiasForm::none || dropout; }
  // Below kVariantKernels; another number for other hooks.
  constexpr int index() const {
    return ((((static_cast<int>(bias) * 2 + (softcap ? 1 : 0)) * 2 + (alibi ? 1 : 0)) * 2 +
             (dropout ? 1 : 0)) *
                2 +
            (grad_alibi ? 1 : 0)) *
               2 +
           (grad_bias ? 1 : 0);
  }
};
inline constexpr int kVariantKernels = kBiasForms * 32;

VariantHooks variant_hooks(const ForwardProblem& problem);
VariantHooks variant_hooks(const BackwardProblem& problem);

// "softcap+dropout", for messages.
std::string variant_name(const VariantHooks& hooks);

// Ok, or what of the variant the hooks do not serve.
Status variant_rule(const ForwardProblem& problem);

// The text of a forward kernel for NVRTC, whose entry is kVariantEntry. `other_shape`: the second
// shape of the row.
inline constexpr const char* kVariantEntry = "pantile_variant";
std::string forward_variant_source(const KernelInfo& row, bool other_shape,
                                   const VariantHooks& hooks);

// All but the gradients.
attn::VariantParams variant_params(const ForwardProblem& problem, const VariantTensors& tensors);

}  // namespace pantile::hopper
