// Host half of variants (pantile/variant.h) on Hopper: which kernels serve them. Softcap, ALiBi,
// bias and dropout are hooks of a kernel (attn/variant.cuh), which is compiled at run time with the
// hooks that a problem asks for; sinks are in every kernel. No CUDA headers.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "attn/variant_params.h"
#include "jit/kernel.h"
#include "pantile/plan.h"
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
  std::uint32_t mask_forms = 0;  // MaskForm: the walk is over lists of tiles
  bool mask_clauses = false;     // more than one
  bool grad_alibi = false;       // these two: backward
  bool grad_bias = false;

  constexpr bool any() const {
    return softcap || alibi || bias != BiasForm::none || dropout || mask_forms != 0;
  }
  // Below kVariantKernels; another number for other hooks with the same mask.
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
Status variant_rule(const BackwardProblem& problem);

// The kernel with the hooks of a plan: a text for NVRTC. A plan without hooks has none.
jit::Request variant_request(const ForwardPlan& plan);
jit::Request variant_request(const BackwardPlan& plan);

// Whether a forward with these hooks takes the second shape of its row: with more registers a
// thread, which random bytes, a bias and a mask need.
constexpr bool needs_other_shape(const VariantHooks& hooks, int kernel_head_dim) {
  return kernel_head_dim <= 64 &&
         (hooks.dropout || hooks.bias != BiasForm::none || hooks.mask_forms != 0);
}

// The kernels with hooks of a row of the kernel table that have been launched, by what they differ
// in: a look-up is faster than the text that find_kernel() wants.
class VariantKernels {
 public:
  // `form` 0 or 1: the shape of a forward, or how a backward sums dQ.
  template <class Plan>
  Status find(const Plan& plan, int form, void* stream, const jit::Kernel** kernel) {
    const VariantHooks hooks = variant_hooks(plan.problem);
    std::atomic<const jit::Kernel*>& known =
        slot(hooks.mask_forms * 2 + (hooks.mask_clauses ? 1 : 0),
             form * kVariantKernels + hooks.index());
    *kernel = known.load(std::memory_order_acquire);
    if (*kernel != nullptr) {
      return Status();
    }
    const Status status = jit::find_kernel(variant_request(plan), stream, kernel);
    if (status.ok()) {
      known.store(*kernel, std::memory_order_release);
    }
    return status;
  }

 private:
  using Slots = std::array<std::atomic<const jit::Kernel*>, std::size_t{2} * kVariantKernels>;

  // Those with a mask are few of many: their slots are made when they are first asked for.
  std::atomic<const jit::Kernel*>& slot(std::uint32_t mask, int index) {
    if (mask == 0) {
      return kernels_[static_cast<std::size_t>(index)];
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return masked_[mask][index];
  }

  Slots kernels_ = {};
  std::mutex mutex_;
  std::map<std::uint32_t, std::map<int, std::atomic<const jit::Kernel*>>> masked_;
};

// Of the gradient of the bias, which is contiguous in the bias's shape: distances, 0 along an axis
// that the bias shares, and how many bytes it has.
BiasLayout grad_bias_layout(const ForwardProblem& problem);
std::size_t grad_bias_bytes(const ForwardProblem& problem);

// All but the gradients.
attn::VariantParams variant_params(const ForwardProblem& problem, const VariantTensors& tensors);

}  // namespace pantile::hopper
