#include "hopper/variant.h"

#include <cinttypes>

#include "core/dropout.h"
#include "core/softmax_state.h"

namespace pantile::hopper {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

// Cells of the dropout mask (core/dropout.h) have 16 rows and 16 keys; so have tiles, whose first
// row and key are multiples of 16.
constexpr std::int64_t kCell = 16;

int element_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : 2;
}

// Whether the elements 2 k and 2 k + 1 of every row of the bias can be read at once.
bool has_pairs(const ForwardProblem& problem) {
  const BiasLayout& bias = problem.variant.bias;
  return bias.base_align_bytes >= 2 * element_bytes(problem.variant.bias_dtype) &&
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
  return type;
}

}  // namespace

VariantHooks variant_hooks(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  VariantHooks hooks;
  hooks.softcap = variant.softcap > 0.0f;
  hooks.alibi = variant.has_alibi;
  hooks.bias = bias_form(problem);
  hooks.dropout = variant.dropout > 0;
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
               {hooks.grad_bias, "grad_bias"}};
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
                         "variant.query_offset is %" PRId64 " and variant.key_offset %" PRId64
                         "; with dropout this kernel needs multiples of 16",
                         variant.query_offset, variant.key_offset);
  }
  if (variant.has_bias) {
    const int bytes = element_bytes(variant.bias_dtype);
    if (variant.bias.base_align_bytes < bytes) {
      return Status::error(kUnsupported,
                           "variant.bias is aligned to %d bytes; its elements have %d",
                           variant.bias.base_align_bytes, bytes);
    }
  }
  return Status();
}

std::string forward_variant_source(const KernelInfo& row, bool other_shape,
                                   const VariantHooks& hooks) {
  const std::string shape = "ForwardVariant<" + std::to_string(row.head_dim) + ", " +
                            std::to_string(row.head_dim_v) +
                            ", MaskKind::" + mask_kind_name(row.mask) + ", " +
                            text_of(other_shape) + ">";
  return std::string("#include \"hopper/forward/kernel.cuh\"\n") +
         "namespace pantile::hopper {\n" +
         "using Shape = " + shape + ";\n" +
         "constexpr DType kDType = DType::" + dtype_name(row.dtype) + ";\n" +
         "constexpr int kTileK = Shape::kConfig.tile_k;\n" +
         "using Variant = " + forward_type(row, hooks) + ";\n" +
         "extern \"C\" __global__ void __launch_bounds__(Shape::kConfig.threads(), 1)\n" +
         kVariantEntry + "(const __grid_constant__ ForwardMaps maps,\n" +
         "    const __grid_constant__ ForwardParams params,\n" +
         "    const __grid_constant__ attn::VariantParams variant) {\n" +
         "  forward<Shape, kDType, Variant>(maps, params, variant);\n" +
         "}\n}\n";
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
