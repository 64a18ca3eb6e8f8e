// Host half of variants (pantile/variant.h) on Hopper: which kernels serve them. Softcap, ALiBi,
// bias and dropout are hooks of a kernel (attn/variant.cuh), which is compiled at run time with the
// hooks that a problem asks for; sinks are in every kernel. No CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/variant_params.h"
#include "common/bias.h"
#include "hopper/forward/config.h"
#include "jit/loaded_kernel.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::jit {
struct Request;
}

namespace pantile::hopper {

using common::BiasForm;
using common::kBiasForms;

// Rows of the sequences; ranges that begin anywhere; pages.
enum class KeyPlace { rows, ranges, pages };

// The hooks of a kernel: all that its text depends on beside the row of the kernel table.
struct VariantHooks {
  bool softcap = false;
  bool alibi = false;
  BiasForm bias = BiasForm::none;
  bool dropout = false;
  std::uint32_t mask_forms = 0;  // MaskForm: the walk is over lists of tiles
  bool mask_clauses = false;     // more than one
  bool grad_alibi = false;       // these two: backward
  bool grad_bias = false;
  bool bias_alone = false;  // backward: no two pairs share an element of the bias's gradient
  Expression score = Expression::none;
  Expression mask = Expression::none;
  std::uint32_t grad_captured = 0;
  KeyPlace keys = KeyPlace::rows;  // this and the next: forward
  bool shift = false;

  constexpr bool has_expressions() const {
    return score != Expression::none || mask != Expression::none;
  }
  // Where keys lie is part of the text as well (hopper/forward/key_source.cuh).
  constexpr bool has_source() const { return keys != KeyPlace::rows || shift; }
  constexpr bool any() const {
    return softcap || alibi || bias != BiasForm::none || dropout || mask_forms != 0 ||
           has_expressions() || has_source();
  }
  // Below kVariantKernels; another number for other hooks with the same mask and expressions.
  constexpr int index() const {
    return ((((static_cast<int>(bias) * 2 + (softcap ? 1 : 0)) * 2 + (alibi ? 1 : 0)) * 2 +
             (dropout ? 1 : 0)) *
                2 +
            (grad_alibi ? 1 : 0)) *
               2 +
           (grad_bias ? 1 : 0) +
           kBiasForms * 32 *
               ((static_cast<int>(keys) * 2 + (shift ? 1 : 0)) * 2 + (bias_alone ? 1 : 0));
  }
};
inline constexpr int kVariantKernels = kBiasForms * 32 * 12;

VariantHooks variant_hooks(const ForwardProblem& problem);
VariantHooks variant_hooks(const BackwardProblem& problem);

// f16 holds scores more exactly than the fast tanh gives them.
constexpr bool needs_exact_softcap(DType dtype) {
  return dtype == DType::f16;
}

// Whether a backward starts from scores without the row's LSE.
bool takes_raw_scores(const Variant& variant);

// Ok, or what of the variant the hooks do not serve.
Status variant_rule(const ForwardProblem& problem);
Status variant_rule(const BackwardProblem& problem);

// The shape of the kernel of a plan, with a place for a tile of its bias if it can have one.
ForwardConfig forward_config(const ForwardPlan& plan);

// The kernel with the hooks of a plan: a text for NVRTC. A plan without hooks has none.
jit::Request variant_request(const ForwardPlan& plan);
jit::Request variant_request(const BackwardPlan& plan);

// Whether a forward with these hooks takes the second shape of its row: with more registers a
// thread, which random bytes, a bias and a mask need.
bool needs_other_shape(const VariantHooks& hooks, int kernel_head_dim);

// The kernels with hooks of a row of the kernel table that have been launched, by what they differ
// in: a look-up is faster than the text that find_kernel() wants.
class VariantKernels {
 public:
  VariantKernels();
  VariantKernels(const VariantKernels&) = delete;
  VariantKernels& operator=(const VariantKernels&) = delete;

  // `form` 0 or 1: the shape of a forward, or how a backward sums dQ. `stream`: see
  // jit::find_kernel.
  Status find(const ForwardPlan& plan, int form, void* stream, const jit::LoadedKernel** kernel);
  Status find(const BackwardPlan& plan, int form, void* stream, const jit::LoadedKernel** kernel);

 private:
  struct Known;
  Known* const known_;  // never destroyed: calls may come while the process ends
};

// All but the gradients.
attn::VariantParams variant_params(const ForwardProblem& problem, const VariantTensors& tensors);

}  // namespace pantile::hopper
