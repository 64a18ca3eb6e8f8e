// The texts of kernels with hooks, which NVRTC compiles, and the kernels that are in memory.
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "common/kernel_text.h"
#include "expression/print.h"
#include "hopper/backward/config.h"
#include "hopper/forward/config.h"
#include "hopper/mask.h"
#include "hopper/variant.h"
#include "jit/kernel.h"

namespace pantile::hopper {
namespace {

const char* text_of(bool value) {
  return value ? "true" : "false";
}

// The type of the hooks, in the order of the formulas. The names Shape and kDType are those of the
// text around.
std::string forward_type(const KernelInfo& row, const VariantHooks& hooks, bool bias_tile) {
  std::string type;
  const auto add = [&type](const std::string& hook) {
    type = type.empty() ? hook : "attn::Both<" + type + ", " + hook + ">";
  };
  if (hooks.softcap) {
    add(std::string("attn::Softcap<") + text_of(needs_exact_softcap(row.dtype)) + ">");
  }
  if (bias_tile) {
    add("attn::BiasTile<kDType, kTileK>");
  } else if (hooks.bias != BiasForm::none) {
    const bool is_f32 = hooks.bias == BiasForm::single32 || hooks.bias == BiasForm::pair32;
    const bool pairs = hooks.bias != BiasForm::single16 && hooks.bias != BiasForm::single32;
    add(std::string("attn::Bias<") + (is_f32 ? "DType::f32" : "kDType") + ", " + text_of(pairs) +
        ", kTileK>");
  }
  if (hooks.alibi) {
    // Causal rows see no key behind their position.
    add(std::string("attn::Alibi<") + text_of(row.mask != MaskKind::causal) + ", kTileK>");
  }
  if (hooks.score != Expression::none) {
    add("attn::UserScore");
  }
  if (hooks.mask != Expression::none) {
    add("attn::UserMask");
  }
  if (hooks.dropout) {
    add("attn::Dropout<kTileK>");
  }
  return type.empty() ? "attn::NoVariant" : type;
}

// The value of a KeySource.
std::string source_of(const VariantHooks& hooks) {
  return std::string("KeySource{") + text_of(hooks.keys == KeyPlace::ranges) + ", " +
         text_of(hooks.keys == KeyPlace::pages) + ", " + text_of(hooks.shift) + "}";
}

// The type of the walk: `listed` of the mask and of where keys lie, or `plain`.
std::string walk_type(const VariantHooks& hooks, const char* listed, const char* plain) {
  if (hooks.mask_forms == 0) {
    return plain;
  }
  return std::string(listed) + "<" +
         common::stored_mask_type(hooks.mask_forms, hooks.mask_clauses) +
         (hooks.has_source() ? ", " + source_of(hooks) : "") + ">";
}

// Without a mask the keys that are nearest to the rows come first under ALiBi.
const char* span_walk(const KernelInfo& row, const VariantHooks& hooks) {
  const bool near = hooks.alibi && row.mask == MaskKind::full && !hooks.has_source();
  return near ? "NearWalk<kTileK>" : "SpanWalk";
}

// The value of an attn::GradHooks.
std::string grad_hooks(const KernelInfo& row, const VariantHooks& hooks) {
  std::string text;
  const auto add = [&text](bool on, const char* field) {
    if (on) {
      text += (text.empty() ? "." : ", .") + std::string(field);
    }
  };
  const bool is_f32 = hooks.bias == BiasForm::single32 || hooks.bias == BiasForm::pair32;
  add(hooks.softcap, "softcap = true");
  add(hooks.softcap && needs_exact_softcap(row.dtype), "exact = true");
  add(hooks.alibi, "alibi = true");
  add(hooks.alibi && row.mask != MaskKind::causal, "behind = true");
  add(hooks.bias != BiasForm::none, "bias = true");
  add(hooks.bias != BiasForm::none, is_f32 ? "bias_dtype = DType::f32" : "bias_dtype = kDType");
  add(hooks.dropout, "dropout = true");
  add(hooks.grad_alibi, "grad_alibi = true");
  add(hooks.grad_bias, "grad_bias = true");
  add(hooks.bias_alone, "bias_alone = true");
  add(hooks.mask_forms != 0, "lists = true");
  add(hooks.has_expressions(), "user = 1");
  if (hooks.score != Expression::none) {
    const expression::Facts& facts = expression::programs_of(hooks.score).facts;
    add(true, "score = true");
    add(!facts.is_affine, "raw_score = true");
    add(facts.has_bounded_slope, "bounded_slopes = true");
  }
  add(hooks.mask != Expression::none, "mask = true");
  add(hooks.grad_captured != 0, "grad_captured = true");
  return text;
}

std::string expression_text(const KernelInfo& row, const VariantHooks& hooks, bool backward) {
  const bool exact = needs_exact_softcap(row.dtype);
  return backward
             ? common::backward_expressions(hooks.score, hooks.mask, exact, hooks.grad_captured)
             : common::forward_expressions(hooks.score, hooks.mask, exact);
}

constexpr const char* kVariantEntry = "pantile_variant";
constexpr const char* kOpening = "namespace pantile::hopper {\n";
constexpr const char* kClosing = "}  // namespace pantile::hopper\n";

// "softcap+dropout", for messages.
std::string variant_name(const VariantHooks& hooks) {
  const struct {
    bool on;
    const char* name;
  } parts[] = {{hooks.softcap, "softcap"},
               {hooks.bias != BiasForm::none, "bias"},
               {hooks.alibi, "alibi"},
               {hooks.dropout, "dropout"},
               {(hooks.mask_forms & kMaskBlocks) != 0, "blocks"},
               {(hooks.mask_forms & kMaskElements) != 0, "elements"},
               {(hooks.mask_forms & kMaskDocuments) != 0, "documents"},
               {(hooks.mask_forms & kMaskPrefix) != 0, "prefix"},
               {hooks.mask_clauses, "clauses"},
               {hooks.score != Expression::none, "score"},
               {hooks.mask != Expression::none, "mask"},
               {hooks.grad_alibi, "grad_alibi"},
               {hooks.grad_bias, "grad_bias"},
               {hooks.grad_captured != 0, "grad_captured"},
               {hooks.keys == KeyPlace::ranges, "k_begin"},
               {hooks.keys == KeyPlace::pages, "block_table"},
               {hooks.shift, "mask_shift"}};
  std::string name;
  for (const auto& part : parts) {
    if (part.on) {
      name += (name.empty() ? "" : "+") + std::string(part.name);
    }
  }
  return name;
}

// All but the text.
jit::Request request_of(const KernelInfo& row, const VariantHooks& hooks) {
  jit::Request request;
  request.name = std::string(row.name) + " " + variant_name(hooks);
  request.entry = std::string("pantile::hopper::") + kVariantEntry;
  request.arch = 90;
  return request;
}

}  // namespace

jit::Request variant_request(const ForwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const VariantHooks hooks = variant_hooks(plan.problem);
  const ForwardShapes shapes = forward_shapes(row.head_dim, row.head_dim_v, row.mask);
  const bool main = plan.tile_q == shapes.main.tile_q() && plan.tile_k == shapes.main.tile_k;
  const bool bias_tile = forward_config(plan).bias_tile;
  jit::Request request = request_of(row, hooks);
  request.source =
      std::string("#include \"hopper/forward/kernel.cuh\"\n") + expression_text(row, hooks, false) +
      kOpening + "using Shape = " + (bias_tile ? "WithBiasTile<" : "") + "ForwardVariant<" +
      std::to_string(row.head_dim) + ", " + std::to_string(row.head_dim_v) +
      ", MaskKind::" + mask_kind_name(row.mask) + ", " + text_of(!main) +
      (bias_tile ? ">>;\n" : ">;\n") + "constexpr DType kDType = DType::" + dtype_name(row.dtype) +
      ";\n" + "[[maybe_unused]] constexpr int kTileK = Shape::kConfig.tile_k;\n" +
      "using Variant = " + forward_type(row, hooks, bias_tile) + ";\n" +
      "extern \"C\" __global__ void __launch_bounds__(Shape::kConfig.threads(), 1)\n" +
      kVariantEntry + "(const __grid_constant__ ForwardMaps maps,\n" +
      "    const __grid_constant__ ForwardParams params,\n" +
      "    const __grid_constant__ attn::VariantParams variant) {\n" +
      "  forward_body<Shape, kDType, Variant, " +
      walk_type(hooks, "ListWalk", span_walk(row, hooks)) + ", " + source_of(hooks) +
      ">(maps, params, variant);\n" + "}\n" + kClosing;
  return request;
}

jit::Request variant_request(const BackwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const VariantHooks hooks = variant_hooks(plan.problem);
  const char* const sum = plan.problem.deterministic ? "integer" : "floating";
  const bool paired = plan.tile_k == 128;
  jit::Request request = request_of(row, hooks);
  request.name += std::string(" ") + sum;
  request.source =
      std::string("#include \"hopper/backward/kernel_") + (paired ? "paired" : "pipeline") +
      ".cuh\"\n" + expression_text(row, hooks, true) + kOpening +
      "constexpr DType kDType = DType::" + dtype_name(row.dtype) + ";\n" +
      "constexpr SumKind kSum = SumKind::" + sum + ";\n" +
      "using Config = BackwardConfig<kDType, " + std::to_string(row.head_dim) + ", " +
      std::to_string(row.head_dim_v) + ", kSum>;\n" + "constexpr attn::GradHooks kHooks{" +
      grad_hooks(row, hooks) + "};\n" +
      "extern \"C\" __global__ void __launch_bounds__(Config::kThreads, 1)\n" + kVariantEntry +
      "(const __grid_constant__ BackwardMaps maps,\n" +
      "    const __grid_constant__ BackwardParams params,\n" +
      "    const __grid_constant__ attn::VariantParams variant) {\n" + "  " +
      (paired ? "paired" : "pipeline") + "_body<Config, MaskKind::" + mask_kind_name(row.mask) +
      ", kSum, kHooks, " + walk_type(hooks, "ListRows", "SpanRows") +
      ">(maps, params, variant);\n" + "}\n" + kClosing;
  return request;
}

struct VariantKernels::Known {
  std::atomic<const jit::Kernel*> common[2 * kVariantKernels]{};
  std::mutex mutex;  // of the map
  // Those with a mask of tensors or expressions: few of many.
  std::map<std::array<std::int64_t, 5>, const jit::Kernel*> rare;

  template <class Plan>
  Status find(const Plan& plan, int form, void* stream, const jit::LoadedKernel** kernel) {
    const VariantHooks hooks = variant_hooks(plan.problem);
    const int number = form * kVariantKernels + hooks.index();
    if (hooks.has_expressions() || hooks.mask_forms != 0) {
      return find_rare(plan, hooks, number, stream, kernel);
    }
    std::atomic<const jit::Kernel*>& known = common[number];
    const jit::Kernel* found = known.load(std::memory_order_acquire);
    if (found == nullptr) {
      const Status status = jit::find_kernel(variant_request(plan), stream, &found);
      if (!status.ok()) {
        return status;
      }
      known.store(found, std::memory_order_release);
    }
    *kernel = found;
    return Status();
  }

  template <class Plan>
  Status find_rare(const Plan& plan, const VariantHooks& hooks, int number, void* stream,
                   const jit::LoadedKernel** kernel) {
    const std::array<std::int64_t, 5> key{
        number, hooks.mask_forms * 2 + (hooks.mask_clauses ? 1 : 0),
        static_cast<std::int64_t>(hooks.score), static_cast<std::int64_t>(hooks.mask),
        hooks.grad_captured};
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto known = rare.find(key);
      if (known != rare.end()) {
        *kernel = known->second;
        return Status();
      }
    }
    const jit::Kernel* found = nullptr;
    const Status status = jit::find_kernel(variant_request(plan), stream, &found);
    if (status.ok()) {
      const std::lock_guard<std::mutex> lock(mutex);
      rare[key] = found;
      *kernel = found;
    }
    return status;
  }
};

VariantKernels::VariantKernels() : known_(new Known) {}

Status VariantKernels::find(const ForwardPlan& plan, int form, void* stream,
                            const jit::LoadedKernel** kernel) {
  return known_->find(plan, form, stream, kernel);
}

Status VariantKernels::find(const BackwardPlan& plan, int form, void* stream,
                            const jit::LoadedKernel** kernel) {
  return known_->find(plan, form, stream, kernel);
}

}  // namespace pantile::hopper
