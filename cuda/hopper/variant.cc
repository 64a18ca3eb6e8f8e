#include "hopper/variant.h"

#include <cinttypes>

#include "core/dropout.h"
#include "core/softmax_state.h"
#include "hopper/backward/config.h"
#include "hopper/forward/config.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

// Cells of the dropout mask (core/dropout.h) have 16 rows and 16 keys; so have tiles, whose first
// row and key are multiples of 16.
constexpr std::int64_t kCell = 16;

// Whether the elements 2 k and 2 k + 1 of every row of the bias can be read at once.
bool has_pairs(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return bias.base_align_bytes >= 2 * dtype_bytes(problem.variant.bias_dtype) &&
         bias.batch % 2 == 0 && bias.head % 2 == 0 && bias.query % 2 == 0 &&
         problem.seqlen_k % 2 == 0;
}

BiasForm bias_form(const ForwardProblem& problem) {
  if (!problem.variant.has_bias) {
    return BiasForm::none;
  }
  const bool pairs = has_pairs(problem);
  if (problem.variant.bias_dtype == DType::f32) {
    return pairs ? BiasForm::pair32 : BiasForm::single32;
  }
  return pairs ? BiasForm::pair16 : BiasForm::single16;
}

// f16 holds scores more exactly than the fast tanh gives them.
bool needs_exact_softcap(DType dtype) {
  return dtype == DType::f16;
}

// Whether more than one pair of a row and a key has the same element of the bias.
bool is_shared(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return (bias.batch == 0 && problem.batch > 1) || (bias.head == 0 && problem.heads_q > 1) ||
         (bias.query == 0 && problem.seqlen_q > 1);
}

const char* text_of(bool value) {
  return value ? "true" : "false";
}

// The type of the hooks, in the order of the formulas. The names Shape and kDType are those of the
// text around.
std::string forward_type(const KernelInfo& row, const VariantHooks& hooks) {
  std::string type;
  const auto add = [&type](const std::string& hook) {
    type = type.empty() ? hook : "attn::Both<" + type + ", " + hook + ">";
  };
  if (hooks.softcap) {
    add(std::string("attn::Softcap<") + text_of(needs_exact_softcap(row.dtype)) + ">");
  }
  if (hooks.bias != BiasForm::none) {
    const bool is_f32 = hooks.bias == BiasForm::single32 || hooks.bias == BiasForm::pair32;
    const bool pairs = hooks.bias == BiasForm::pair16 || hooks.bias == BiasForm::pair32;
    add(std::string("attn::Bias<") + (is_f32 ? "DType::f32" : "kDType") + ", " + text_of(pairs) +
        ", kTileK>");
  }
  if (hooks.alibi) {
    // Causal rows see no key behind their position.
    add(std::string("attn::Alibi<") + text_of(row.mask != MaskKind::causal) + ", kTileK>");
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
  return text;
}

constexpr const char* kVariantEntry = "pantile_variant";
constexpr const char* kOpening = "namespace pantile::hopper {\n";
constexpr const char* kClosing = "}  // namespace pantile::hopper\n";

// All but the text.
jit::Request request_of(const KernelInfo& row, const VariantHooks& hooks) {
  jit::Request request;
  request.name = std::string(row.name) + " " + variant_name(hooks);
  request.entry = std::string("pantile::hopper::") + kVariantEntry;
  request.arch = 90;
  return request;
}

}  // namespace

VariantHooks variant_hooks(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  VariantHooks hooks;
  hooks.softcap = variant.softcap > 0.0f;
  hooks.alibi = variant.has_alibi;
  hooks.bias = bias_form(problem);
  hooks.dropout = variant.dropout > 0;
  hooks.keys = problem.page_size > 0 ? KeyPlace::pages
               : problem.has_k_begin ? KeyPlace::ranges
                                     : KeyPlace::rows;
  hooks.shift = problem.has_mask_shift;
  return hooks;
}

VariantHooks variant_hooks(const BackwardProblem& problem) {
  VariantHooks hooks = variant_hooks(problem.forward);
  hooks.grad_alibi = problem.wants_grad_alibi;
  hooks.grad_bias = problem.wants_grad_bias;
  return hooks;
}

std::string variant_name(const VariantHooks& hooks) {
  const struct {
    bool on;
    const char* name;
  } parts[] = {{hooks.softcap, "softcap"},
               {hooks.bias != BiasForm::none, "bias"},
               {hooks.alibi, "alibi"},
               {hooks.dropout, "dropout"},
               {hooks.grad_alibi, "grad_alibi"},
               {hooks.grad_bias, "grad_bias"},
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

Status variant_rule(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  if (variant.dropout > 0 &&
      (variant.query_offset % kCell != 0 || variant.key_offset % kCell != 0)) {
    return Status::error(kUnsupported,
                         "dropout's query_offset is %" PRId64 " and its key_offset %" PRId64
                         "; this kernel needs multiples of 16",
                         variant.query_offset, variant.key_offset);
  }
  return Status();
}

Status variant_rule(const BackwardProblem& problem) {
  const Variant& variant = problem.forward.variant;
  const char* const gradient = problem.wants_grad_alibi  ? "ALiBi slopes"
                               : problem.wants_grad_bias ? "bias"
                                                         : nullptr;
  if (gradient != nullptr && variant.softcap > 0.0f) {
    return Status::error(kUnsupported,
                         "softcap is %g; this kernel has the gradient of the %s without it only",
                         static_cast<double>(variant.softcap), gradient);
  }
  if (problem.wants_grad_bias && problem.deterministic && is_shared(problem.forward)) {
    return Status::error(kUnsupported,
                         "deterministic is true, and the bias is shared by queries, heads or "
                         "sequences: this kernel adds its gradient in any order");
  }
  return Status();
}

BiasLayout grad_bias_layout(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  BiasLayout layout;
  std::int64_t elements = problem.seqlen_k;
  const auto axis = [&elements](std::int64_t stride, std::int64_t size, std::int64_t* to) {
    *to = stride == 0 ? 0 : elements;
    elements *= stride == 0 ? 1 : size;
  };
  axis(bias.query, problem.seqlen_q, &layout.query);
  axis(bias.head, problem.heads_q, &layout.head);
  axis(bias.batch, problem.batch, &layout.batch);
  return layout;
}

std::size_t grad_bias_bytes(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return static_cast<std::size_t>((bias.batch == 0 ? 1 : problem.batch) *
                                  (bias.head == 0 ? 1 : problem.heads_q) *
                                  (bias.query == 0 ? 1 : problem.seqlen_q) * problem.seqlen_k) *
         sizeof(float);
}

jit::Request variant_request(const ForwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const VariantHooks hooks = variant_hooks(plan.problem);
  const ForwardShapes shapes = forward_shapes(row.head_dim, row.head_dim_v, row.mask);
  const bool main = plan.tile_q == shapes.main.tile_q() && plan.tile_k == shapes.main.tile_k;
  jit::Request request = request_of(row, hooks);
  request.source = std::string("#include \"hopper/forward/kernel.cuh\"\n") + kOpening +
                   "using Shape = ForwardVariant<" + std::to_string(row.head_dim) + ", " +
                   std::to_string(row.head_dim_v) + ", MaskKind::" + mask_kind_name(row.mask) +
                   ", " + text_of(!main) + ">;\n" +
                   "constexpr DType kDType = DType::" + dtype_name(row.dtype) + ";\n" +
                   "[[maybe_unused]] constexpr int kTileK = Shape::kConfig.tile_k;\n" +
                   "using Variant = " + forward_type(row, hooks) + ";\n" +
                   "extern \"C\" __global__ void __launch_bounds__(Shape::kConfig.threads(), 1)\n" +
                   kVariantEntry + "(const __grid_constant__ ForwardMaps maps,\n" +
                   "    const __grid_constant__ ForwardParams params,\n" +
                   "    const __grid_constant__ attn::VariantParams variant) {\n" +
                   "  forward_body<Shape, kDType, Variant, " + source_of(hooks) +
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
      ".cuh\"\n" + kOpening + "constexpr DType kDType = DType::" + dtype_name(row.dtype) + ";\n" +
      "constexpr SumKind kSum = SumKind::" + sum + ";\n" +
      "using Config = BackwardConfig<kDType, " + std::to_string(row.head_dim) + ", " +
      std::to_string(row.head_dim_v) + ", kSum>;\n" + "constexpr attn::GradHooks kHooks{" +
      grad_hooks(row, hooks) + "};\n" +
      "extern \"C\" __global__ void __launch_bounds__(Config::kThreads, 1)\n" + kVariantEntry +
      "(const __grid_constant__ BackwardMaps maps,\n" +
      "    const __grid_constant__ BackwardParams params,\n" +
      "    const __grid_constant__ attn::VariantParams variant) {\n" + "  " +
      (paired ? "paired" : "pipeline") + "_body<Config, MaskKind::" + mask_kind_name(row.mask) +
      ", kSum, kHooks>(maps, params, variant);\n" + "}\n" + kClosing;
  return request;
}

attn::VariantParams variant_params(const ForwardProblem& problem, const VariantTensors& tensors) {
  const Variant& variant = problem.variant;
  attn::VariantParams params{};
  params.unit = problem.scale * core::kLog2E;
  params.logit_scale = variant.has_alibi ? core::kLn2 : problem.scale;
  if (variant.softcap > 0.0f) {
    const float inner = problem.scale / variant.softcap;
    params.cap_inner = needs_exact_softcap(problem.dtype) ? 2.0f * core::kLog2E * inner : inner;
    params.cap_log2 = variant.softcap * core::kLog2E;
    params.unit = params.cap_log2;
    params.logit_scale = variant.has_alibi ? core::kLn2 : variant.softcap;
  }
  params.alibi_slopes = tensors.alibi_slopes;
  params.alibi_batch = variant.alibi_by_batch ? problem.heads_q : 0;
  params.bias = tensors.bias;
  params.bias_batch = variant.bias.batch;
  params.bias_head = variant.bias.head;
  params.bias_query = variant.bias.query;
  params.bias_factor = core::kLog2E / params.unit;
  params.dropout_seed = tensors.dropout_seed;
  params.dropout_add = static_cast<std::uint32_t>(256 - variant.dropout) * 0x01010101u;
  params.keep_scale = core::dropout_scale(variant.dropout);
  params.batch_offset = static_cast<std::uint32_t>(variant.batch_offset);
  params.head_offset = static_cast<std::uint32_t>(variant.head_offset);
  params.row_offset = static_cast<std::uint32_t>(variant.query_offset);
  params.key_offset = static_cast<std::uint32_t>(variant.key_offset);
  return params;
}

}  // namespace pantile::hopper
