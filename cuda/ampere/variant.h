// Host half of variants (pantile/variant.h) on this family. Softcap, ALiBi, bias, dropout and
// expressions are hooks of a kernel (attn/variant.cuh), which is compiled at run time with the
// hooks that a problem asks for; sinks are in every kernel. No CUDA headers.
#pragma once

#include <cstdint>

#include "ampere/config.h"
#include "attn/variant_params.h"
#include "common/bias.h"
#include "jit/loaded_kernel.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::jit {
struct Request;
}

namespace pantile::ampere {

// All that the text of a kernel depends on beside the row of the kernel table and the tile.
struct VariantHooks {
  bool softcap = false;
  bool alibi = false;
  common::BiasForm bias = common::BiasForm::none;
  bool dropout = false;
  // Where keys lie is part of the text as well (ampere/forward/keys.cuh). Forward.
  bool ranges = false;
  bool pages = false;
  bool shift = false;
  Expression score = Expression::none;
  Expression mask = Expression::none;
  std::uint32_t mask_forms = 0;  // MaskForm: asked in every step, no lists
  bool mask_clauses = false;     // more than one
  // Backward: the gradient of the bias, and whether no two pairs share an element of it.
  bool grad_bias = false;
  bool bias_alone = false;

  constexpr bool has_bias() const { return bias != common::BiasForm::none; }
  constexpr bool has_expressions() const {
    return score != Expression::none || mask != Expression::none;
  }
  constexpr bool has_source() const { return ranges || pages || shift; }
  constexpr bool any() const { return any_score() || has_source(); }
  // Other scores or weights, for which there is one kind of softmax.
  constexpr bool any_score() const {
    return softcap || alibi || has_bias() || dropout || has_expressions() || mask_forms != 0;
  }
};

VariantHooks variant_hooks(const ForwardProblem& problem);
VariantHooks variant_hooks(const BackwardProblem& problem);

// The tile of a forward with hooks, which is compiled at run time for the GPU that is there.
// Dropout holds random bits of 32 keys: beside the scores of 64 keys at head dim 128 they spill 100
// bytes. A bias spills 8 there, and finds more room in shared memory beside tiles of 32.
constexpr SharedClass variant_tile_class(const VariantHooks& hooks, SharedClass shared) {
  return (hooks.dropout || hooks.has_bias()) && shared == SharedClass::large ? SharedClass::medium
                                                                             : shared;
}

// Whether a kernel copies its bias in tiles to shared memory. `shared`: of the GPU.
template <class Tile>
constexpr bool copies_bias(const VariantHooks& hooks, const Tile& tile, int head_dim,
                           int head_dim_v, SharedClass shared) {
  return hooks.bias == common::BiasForm::tile16 &&
         has_bias_tile(tile, head_dim, head_dim_v, shared);
}

// Ok, or what of the variant this family does not serve.
Status variant_rule(const ForwardProblem& problem, const DeviceProps& device);
Status variant_rule(const BackwardProblem& problem, const DeviceProps& device);

// What the kernels are told; the forward's Q has the sign of the scale, the backward's has not.
attn::VariantParams forward_variant_params(const ForwardProblem& problem,
                                           const VariantTensors& tensors);
attn::VariantParams backward_variant_params(const ForwardProblem& problem,
                                            const VariantTensors& tensors);

// What weights that dropout keeps are multiplied by.
float keep_scale(const ForwardProblem& problem);

// For a plan with hooks.
jit::Request forward_request(const ForwardPlan& plan);
jit::Request backward_request(const BackwardPlan& plan);

// The kernels of one row that are in memory, so that a call need not write their text.
class VariantKernels {
 public:
  VariantKernels();
  VariantKernels(const VariantKernels&) = delete;
  VariantKernels& operator=(const VariantKernels&) = delete;

  // `stream`: see jit::find_kernel.
  Status find(const ForwardPlan& plan, void* stream, const jit::LoadedKernel** kernel);
  Status find(const BackwardPlan& plan, void* stream, const jit::LoadedKernel** kernel);

 private:
  struct Known;
  Known* const known_;  // never destroyed: calls may come while the process ends
};

}  // namespace pantile::ampere
