#include "hopper/variant.h"

#include <cinttypes>

#include "core/dropout.h"
#include "core/softmax_state.h"
#include "expression/print.h"
#include "hopper/backward/config.h"
#include "hopper/forward/config.h"
#include "hopper/mask.h"

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

// The type of the walk: `listed` of the mask, or `plain`.
std::string walk_type(const VariantHooks& hooks, const char* listed, const char* plain) {
  return hooks.mask_forms == 0
             ? plain
             : std::string(listed) + "<attn::StoredMask<" + std::to_string(hooks.mask_forms) +
                   ", " + text_of(hooks.mask_clauses) + ">>";
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

  // The structs of the expressions, in attn.
  std::string expression_text(const KernelInfo& row, const VariantHooks& hooks, bool backward) {
    if (!hooks.has_expressions()) {
      return std::string();
    }
    const bool exact = needs_exact_softcap(row.dtype);
    std::string text = "namespace pantile::attn {\n";
    std::string names;
    if (hooks.score != Expression::none) {
      const expression::Function& score = expression::function_of(hooks.score);
      text += backward ? expression::print_backward_score(score, exact, hooks.grad_captured)
                       : expression::print_forward_score(score, exact);
    }
    if (hooks.mask != Expression::none) {
      const expression::Function& mask = expression::function_of(hooks.mask);
      const int first = captured_count(hooks.score);
      text += backward ? expression::print_backward_mask(mask, first)
                       : expression::print_forward_mask(mask, first);
    }
    if (backward) {
      text += std::string("template <>\nstruct UserHooks<1> {\n") + "  using Score = " +
              (hooks.score != Expression::none ? "UserScore" : "UserHooks<0>::Score") +
              ";\n  using Mask = " +
              (hooks.mask != Expression::none ? "UserMask" : "UserHooks<0>::Mask") + ";\n};\n";
    }
    return text + "}  // namespace pantile::attn\n";
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
  hooks.mask_forms = mask_forms(variant);
  hooks.mask_clauses = has_clauses(variant);
  hooks.score = variant.score;
  hooks.mask = variant.mask_expression;
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
  hooks.grad_captured = problem.wants_grad_captured;
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

namespace {

// What of the scores before an expression the hooks do not compute.
Status score_rule(const Variant& variant) {
  if (variant.score == Expression::none) {
    return Status();
  }
  const bool natural = !expression::programs_of(variant.score).facts.is_affine;
  const char* const other = variant.softcap > 0.0f        ? "softcap"
                            : variant.has_alibi           ? "alibi"
                            : variant.has_bias && natural ? "bias"
                                                          : nullptr;
  if (other != nullptr) {
    return Status::error(
        kUnsupported,
        "%s and score are given; this kernel computes one of them: write the %s in "
        "the expression",
        other, other);
  }
  return Status();
}

Status captured_rule(const BackwardProblem& problem) {
  if (problem.deterministic) {
    return Status::error(kUnsupported,
                         "deterministic is true; this kernel adds gradients of captured tensors in "
                         "any order");
  }
  if (!expression::programs_of(problem.forward.variant.score).facts.is_affine) {
    return Status::error(kUnsupported,
                         "this kernel has gradients of captured tensors where the score is s plus "
                         "something without s");
  }
  return Status();
}

}  // namespace

Status variant_rule(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  if (variant.dropout > 0 &&
      (variant.query_offset % kCell != 0 || variant.key_offset % kCell != 0)) {
    return Status::error(kUnsupported,
                         "dropout's query_offset is %" PRId64 " and its key_offset %" PRId64
                         "; this kernel needs multiples of 16",
                         variant.query_offset, variant.key_offset);
  }
  const VariantHooks hooks = variant_hooks(problem);
  if (hooks.has_source() && (hooks.mask_forms != 0 || hooks.has_expressions())) {
    return Status::error(kUnsupported,
                         "%s is given beside a mask or a score; this kernel has k_begin, "
                         "block_table and mask_shift without them only",
                         hooks.keys == KeyPlace::ranges  ? "k_begin"
                         : hooks.keys == KeyPlace::pages ? "block_table"
                                                         : "mask_shift");
  }
  return score_rule(variant);
}

bool needs_other_shape(const VariantHooks& hooks, int kernel_head_dim) {
  const bool large =
      hooks.mask != Expression::none || hooks.mask_forms != 0 ||
      (hooks.score != Expression::none && expression::programs_of(hooks.score).facts.is_large);
  return kernel_head_dim <= 64 && (hooks.dropout || hooks.bias != BiasForm::none || large);
}

bool takes_raw_scores(const Variant& variant) {
  return variant.softcap > 0.0f || (variant.score != Expression::none &&
                                    !expression::programs_of(variant.score).facts.is_affine);
}

Status variant_rule(const BackwardProblem& problem) {
  const Variant& variant = problem.forward.variant;
  const Status forward = score_rule(variant);
  if (!forward.ok()) {
    return forward;
  }
  const char* const gradient = problem.wants_grad_alibi  ? "ALiBi slopes"
                               : problem.wants_grad_bias ? "bias"
                                                         : nullptr;
  if (gradient != nullptr && variant.softcap > 0.0f) {
    return Status::error(kUnsupported,
                         "softcap is %g; this kernel has the gradient of the %s without it only",
                         static_cast<double>(variant.softcap), gradient);
  }
  if (problem.deterministic && mask_forms(variant) != 0) {
    return Status::error(kUnsupported,
                         "deterministic is true; this kernel has that without a mask only");
  }
  // Sums in integers rest on a bound of dS: a weight times dP - delta, and no slope above 1.
  if (problem.deterministic && variant.score != Expression::none &&
      !expression::programs_of(variant.score).facts.is_affine) {
    return Status::error(kUnsupported,
                         "deterministic is true; with a score this kernel needs one that is s plus "
                         "something without s for it");
  }
  if (problem.wants_grad_captured != 0) {
    const Status status = captured_rule(problem);
    if (!status.ok()) {
      return status;
    }
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
  request.source =
      std::string("#include \"hopper/forward/kernel.cuh\"\n") + expression_text(row, hooks, false) +
      kOpening + "using Shape = ForwardVariant<" + std::to_string(row.head_dim) + ", " +
      std::to_string(row.head_dim_v) + ", MaskKind::" + mask_kind_name(row.mask) + ", " +
      text_of(!main) + ">;\n" + "constexpr DType kDType = DType::" + dtype_name(row.dtype) + ";\n" +
      "[[maybe_unused]] constexpr int kTileK = Shape::kConfig.tile_k;\n" +
      "using Variant = " + forward_type(row, hooks) + ";\n" +
      "extern \"C\" __global__ void __launch_bounds__(Shape::kConfig.threads(), 1)\n" +
      kVariantEntry + "(const __grid_constant__ ForwardMaps maps,\n" +
      "    const __grid_constant__ ForwardParams params,\n" +
      "    const __grid_constant__ attn::VariantParams variant) {\n" +
      "  forward_body<Shape, kDType, Variant, " + walk_type(hooks, "ListWalk", "SpanWalk") + ", " +
      source_of(hooks) + ">(maps, params, variant);\n" + "}\n" + kClosing;
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

namespace {

// What an expression makes of the units of scores, and what it captures.
void add_expressions(const Variant& variant, float scale, const VariantTensors& tensors,
                     attn::VariantParams* params) {
  params->score_unit = scale;
  if (variant.score != Expression::none) {
    const expression::Facts& facts = expression::programs_of(variant.score).facts;
    const float unit = facts.form == expression::ScoreForm::natural ? 1.0f : scale;
    params->unit = facts.factor * unit * core::kLog2E;
    params->logit_scale =
        facts.form == expression::ScoreForm::sloped ? core::kLn2 : facts.factor * unit;
    params->cap_log2 = facts.grad_factor * core::kLog2E;
  }
  int place = 0;
  const auto take = [&](const CapturedTensor* from, int count) {
    for (int i = 0; i < count; ++i, ++place) {
      attn::CapturedParams& to = params->captured[place];
      to.data = from[i].data;
      for (int axis = 0; axis < kMaxCapturedAxes; ++axis) {
        to.stride[axis] = from[i].stride[axis];
        to.last[axis] = static_cast<int>(from[i].size[axis] - 1);
      }
    }
  };
  take(tensors.score_captured, captured_count(variant.score));
  take(tensors.mask_captured, captured_count(variant.mask_expression));
}

}  // namespace

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
  params.mask = mask_params(problem, tensors);
  if (variant.score != Expression::none || variant.mask_expression != Expression::none) {
    add_expressions(variant, problem.scale, tensors, &params);
  }
  return params;
}

}  // namespace pantile::hopper
