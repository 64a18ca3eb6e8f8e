#include "ampere/variant.h"

#include <array>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <map>
#include <mutex>
#include <string>

#include "ampere/forward/softmax_choice.h"
#include "ampere/order.h"
#include "common/expressions.h"
#include "common/kernel_text.h"
#include "common/stored_mask.h"
#include "core/dropout.h"
#include "core/softmax_state.h"
#include "expression/print.h"
#include "jit/kernel.h"

namespace pantile::ampere {
namespace {

// Cells of the dropout mask (core/dropout.h) have 16 rows and 16 keys.
constexpr std::int64_t kCell = 16;

const char* text_of(bool value) {
  return value ? "true" : "false";
}

const char* text_of(SharedClass shared) {
  return shared == SharedClass::large    ? "SharedClass::large"
         : shared == SharedClass::medium ? "SharedClass::medium"
                                         : "SharedClass::small";
}

// f16 holds scores more exactly than the fast tanh gives them.
bool needs_exact_softcap(DType dtype) {
  return dtype == DType::f16;
}

// 80 runs on every 8.x. No other architecture is compiled for: variant_rule().
int architecture(const DeviceProps& device) {
  return device.compute_major == 9 ? 90 : 80;
}

std::string hook_names(const VariantHooks& hooks) {
  std::string names;
  const auto add = [&names](bool on, const char* name) {
    if (on) {
      names += (names.empty() ? "" : "+") + std::string(name);
    }
  };
  add(hooks.softcap, "softcap");
  add(hooks.alibi, "ALiBi");
  add(hooks.has_bias(), "bias");
  add(hooks.dropout, "dropout");
  add(hooks.ranges, "k_begin");
  add(hooks.pages, "block_table");
  add(hooks.shift, "mask_shift");
  add(hooks.score != Expression::none, "score");
  add(hooks.mask != Expression::none, "mask");
  add((hooks.mask_forms & kMaskBlocks) != 0, "blocks");
  add((hooks.mask_forms & kMaskElements) != 0, "elements");
  add((hooks.mask_forms & kMaskDocuments) != 0, "documents");
  add((hooks.mask_forms & kMaskPrefix) != 0, "prefix");
  add(hooks.mask_clauses, "clauses");
  add(hooks.grad_bias, "grad_bias");
  return names;
}

// The last argument of ForwardVariant, where keys lie otherwise than in rows of the sequences.
std::string source_of(const VariantHooks& hooks) {
  if (!hooks.ranges && !hooks.pages && !hooks.shift) {
    return "";
  }
  return std::string(", KeySource{") + text_of(hooks.ranges) + ", " + text_of(hooks.pages) + ", " +
         text_of(hooks.shift) + "}";
}

// The dtype of a bias.
std::string bias_dtype(const KernelInfo& row, const VariantHooks& hooks) {
  const bool is_f32 =
      hooks.bias == common::BiasForm::single32 || hooks.bias == common::BiasForm::pair32;
  return std::string("DType::") + dtype_name(is_f32 ? DType::f32 : row.dtype);
}

// The type of the scoring hooks, in the order of the formulas. `copied`: the bias is.
std::string scoring_type(const KernelInfo& row, const VariantHooks& hooks, bool copied) {
  const std::string softcap =
      std::string("attn::Softcap<") + text_of(needs_exact_softcap(row.dtype)) + ">";
  // Causal rows see no key behind their position.
  const std::string alibi =
      std::string("attn::Alibi<") + text_of(row.mask != MaskKind::causal) + ", Config::kTileK>";
  std::string type;
  const auto add = [&type](bool on, const std::string& hook) {
    if (on) {
      type = type.empty() ? hook : "attn::Both<" + type + ", " + hook + ">";
    }
  };
  add(hooks.softcap, softcap);
  add(hooks.alibi, alibi);
  add(hooks.has_bias() && copied, "CopiedBias<" + bias_dtype(row, hooks) + ", Config::kTileK>");
  add(hooks.has_bias() && !copied, "attn::Bias<" + bias_dtype(row, hooks) + ", " +
                                       text_of(!common::is_single(hooks.bias)) +
                                       ", Config::kTileK>");
  add(hooks.score != Expression::none, "attn::UserScore");
  add(hooks.mask != Expression::none, "attn::UserMask");
  add(hooks.mask_forms != 0,
      "attn::MaskedPairs<" + common::stored_mask_type(hooks.mask_forms, hooks.mask_clauses) + ">");
  return type.empty() ? "attn::NoVariant" : type;
}

// The instance of kernel template `kernel` for the types and constants that `text` defines.
jit::Request request_of(const KernelInfo& row, const VariantHooks& hooks, const char* kernel,
                        const std::string& text, const char* last, const DeviceProps& device) {
  const std::string space = "pantile::ampere::";
  jit::Request request;
  request.name = std::string(row.name) + " " + hook_names(hooks);
  request.source = text;
  // A mask of pairs is one that cuts tiles, as a window may.
  const MaskKind mask =
      hooks.mask_forms != 0 && row.mask == MaskKind::full ? MaskKind::window : row.mask;
  request.entry = space + kernel + "<" + space +
                  "Config, pantile::DType::" + dtype_name(row.dtype) +
                  ", pantile::MaskKind::" + mask_kind_name(mask) + ", " + space + last + ">";
  request.arch = architecture(device);
  return request;
}

// Of attn::GradHooks, the fields of expressions.
std::string expression_hooks(const VariantHooks& hooks, bool gradients) {
  if (!hooks.has_expressions()) {
    return std::string();
  }
  std::string text = "  hooks.user = 1;\n";
  if (hooks.score != Expression::none) {
    const expression::Facts& facts = expression::programs_of(hooks.score).facts;
    text += std::string("  hooks.score = true;\n  hooks.raw_score = ") + text_of(!facts.is_affine) +
            ";\n  hooks.bounded_slopes = " + text_of(facts.has_bounded_slope) +
            ";\n  hooks.grad_captured = " + text_of(gradients) + ";\n";
  }
  return text + "  hooks.mask = " + text_of(hooks.mask != Expression::none) + ";\n";
}

// The fields of a bias.
std::string bias_hooks(const KernelInfo& row, const VariantHooks& hooks, bool copied) {
  if (!hooks.has_bias()) {
    return std::string();
  }
  return "  hooks.bias = true;\n  hooks.bias_dtype = " + bias_dtype(row, hooks) +
         ";\n  hooks.bias_tile = " + text_of(copied) +
         ";\n  hooks.grad_bias = " + text_of(hooks.grad_bias) +
         ";\n  hooks.bias_alone = " + text_of(hooks.bias_alone) + ";\n";
}

std::string dims_of(const KernelInfo& row) {
  return std::to_string(row.head_dim) + ", " + std::to_string(row.head_dim_v);
}

bool sums_on_tensor(const ForwardPlan& plan) {
  return plan.softmax.unit == SoftmaxUnit::tensor;
}

bool has_long_rows(const ForwardPlan& plan) {
  return plan.problem.seqlen_k > kLongRowKeys && !sums_on_tensor(plan);
}

attn::VariantParams params_of(const ForwardProblem& problem, const VariantTensors& tensors,
                              float scale) {
  const Variant& variant = problem.variant;
  attn::VariantParams params{};
  params.unit = logit_scale(problem.scale);
  if (variant.softcap > 0.0f) {
    const float inner = scale / variant.softcap;
    params.cap_inner = needs_exact_softcap(problem.dtype) ? 2.0f * core::kLog2E * inner : inner;
    params.cap_log2 = variant.softcap * core::kLog2E;
    params.unit = params.cap_log2;
  }
  params.alibi_slopes = tensors.alibi_slopes;
  params.alibi_batch = variant.alibi_by_batch ? problem.heads_q : 0;
  params.dropout_seed = tensors.dropout_seed;
  params.dropout_add = static_cast<std::uint32_t>(256 - variant.dropout) * 0x01010101u;
  params.keep_scale = keep_scale(problem);
  params.batch_offset = static_cast<std::uint32_t>(variant.batch_offset);
  params.head_offset = static_cast<std::uint32_t>(variant.head_offset);
  params.row_offset = static_cast<std::uint32_t>(variant.query_offset);
  params.key_offset = static_cast<std::uint32_t>(variant.key_offset);
  if (variant.score != Expression::none || variant.mask_expression != Expression::none) {
    common::add_expressions(variant, scale, tensors, &params);
  }
  if (variant.has_bias) {
    common::add_bias(variant, tensors, &params);
  }
  params.mask = common::mask_params(problem, tensors);
  return params;
}

// Of the mask of tensors in a text.
std::int64_t mask_number(const VariantHooks& hooks) {
  return hooks.mask_forms * 2 + (hooks.mask_clauses ? 1 : 0);
}

// Of the bias.
std::int64_t bias_number(const VariantHooks& hooks) {
  return static_cast<std::int64_t>(hooks.bias) * 4 + (hooks.grad_bias ? 2 : 0) +
         (hooks.bias_alone ? 1 : 0);
}

constexpr int kTexts = 64 * 3 * 8;  // hooks, tiles, and three choices

// A number below kTexts. `first`, `second`: what else the texts of a row differ in.
int index_of(const VariantHooks& hooks, SharedClass shared, bool first, bool second,
             const DeviceProps& device) {
  const int flags = (hooks.softcap ? 1 : 0) + (hooks.alibi ? 2 : 0) + (hooks.dropout ? 4 : 0) +
                    (hooks.ranges ? 8 : 0) + (hooks.pages ? 16 : 0) + (hooks.shift ? 32 : 0);
  const int more = (first ? 1 : 0) + (second ? 2 : 0) + (architecture(device) == 90 ? 4 : 0);
  return (flags * 3 + static_cast<int>(shared)) * 8 + more;
}

}  // namespace

VariantHooks variant_hooks(const ForwardProblem& problem) {
  const Variant& variant = problem.variant;
  VariantHooks hooks;
  hooks.softcap = variant.softcap > 0.0f;
  hooks.alibi = variant.has_alibi;
  hooks.bias = common::bias_form(problem);
  hooks.dropout = variant.dropout > 0;
  hooks.ranges = problem.has_k_begin;
  hooks.pages = problem.page_size > 0;
  hooks.shift = problem.has_mask_shift;
  hooks.score = variant.score;
  hooks.mask = variant.mask_expression;
  hooks.mask_forms = mask_forms(variant);
  hooks.mask_clauses = common::has_clauses(variant);
  return hooks;
}

VariantHooks variant_hooks(const BackwardProblem& problem) {
  VariantHooks hooks = variant_hooks(problem.forward);
  hooks.grad_bias = problem.wants_grad_bias;
  hooks.bias_alone = common::is_bias_alone(problem);
  return hooks;
}

Status variant_rule(const ForwardProblem& problem, const DeviceProps& device) {
  const VariantHooks hooks = variant_hooks(problem);
  if (!hooks.any()) {
    return Status();
  }
  if (device.compute_major != 8 && device.compute_major != 9) {
    return Status::error(StatusCode::unsupported,
                         "compiles kernels with %s for compute capability 8.x and 9.x; device %d "
                         "has %d.%d",
                         hook_names(hooks).c_str(), device.device.index, device.compute_major,
                         device.compute_minor);
  }
  const Variant& variant = problem.variant;
  if (hooks.dropout && (variant.query_offset % kCell != 0 || variant.key_offset % kCell != 0)) {
    return Status::error(StatusCode::unsupported,
                         "variant.query_offset is %" PRId64 " and variant.key_offset %" PRId64
                         "; with dropout this kernel needs multiples of 16",
                         variant.query_offset, variant.key_offset);
  }
  return common::score_rule(variant);
}

Status variant_rule(const BackwardProblem& problem, const DeviceProps& device) {
  const Variant& variant = problem.forward.variant;
  // Sums in integers rest on a bound of dS: a weight times dP - delta, and no slope above 1.
  if (problem.deterministic && common::has_raw_score(variant)) {
    return Status::error(StatusCode::unsupported,
                         "deterministic is true; with a score this kernel needs one that is s plus "
                         "something without s for it");
  }
  if (problem.deterministic && problem.wants_grad_captured != 0) {
    return Status::error(StatusCode::unsupported,
                         "deterministic is true; this kernel adds gradients of captured tensors in "
                         "any order");
  }
  const Status status = common::bias_gradient_rule(problem);
  return status.ok() ? variant_rule(problem.forward, device) : status;
}

float keep_scale(const ForwardProblem& problem) {
  return core::dropout_scale(problem.variant.dropout);
}

attn::VariantParams forward_variant_params(const ForwardProblem& problem,
                                           const VariantTensors& tensors) {
  // With a scale of 0 Q is zeros, see logit_scale().
  const float scale = problem.scale == 0.0f ? 1.0f : std::fabs(problem.scale);
  return params_of(problem, tensors, scale);
}

attn::VariantParams backward_variant_params(const ForwardProblem& problem,
                                            const VariantTensors& tensors) {
  return params_of(problem, tensors, problem.scale);
}

jit::Request forward_request(const ForwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const VariantHooks hooks = variant_hooks(plan.problem);
  const SharedClass device = shared_class(plan.device.smem_optin_bytes);
  const SharedClass shared = variant_tile_class(hooks, device);
  const bool copied =
      copies_bias(hooks, forward_tile(row.head_dim, row.head_dim_v, row.mask, shared), row.head_dim,
                  row.head_dim_v, device);
  const std::string mask = std::string("MaskKind::") + mask_kind_name(row.mask);
  const std::string text =
      std::string("#include \"ampere/forward/kernel.cuh\"\n") +
      common::forward_expressions(hooks.score, hooks.mask, needs_exact_softcap(row.dtype)) +
      "namespace pantile::ampere {\n"
      "using Config = ForwardConfig<" +
      dims_of(row) + ", forward_tile(" + dims_of(row) + ", " + mask + ", " + text_of(shared) +
      "),\n    softmax_kind(ForwardSoftmax::" + (sums_on_tensor(plan) ? "tensor" : "vector") +
      "), " + text_of(has_long_rows(plan)) + ">;\nusing Variant = ForwardVariant<" +
      scoring_type(row, hooks, copied) + ", " +
      (hooks.dropout ? "attn::Dropout<kDropKeys>" : "attn::NoVariant") + source_of(hooks) +
      ">;\n}\n";
  return request_of(row, hooks, "variant_forward_kernel", text, "Variant", plan.device);
}

jit::Request backward_request(const BackwardPlan& plan) {
  const KernelInfo& row = *plan.kernel;
  const VariantHooks hooks = variant_hooks(plan.problem);
  // The kernels around it are compiled ones.
  const SharedClass shared = compiled_class(plan.device.smem_optin_bytes);
  const BackwardTile tile =
      with_bias_tile(backward_tile(row.head_dim, shared), row.head_dim, row.head_dim_v, shared);
  const bool copied = copies_bias(hooks, tile, row.head_dim, row.head_dim_v, shared);
  const std::string tile_text =
      "backward_tile(" + std::to_string(row.head_dim) + ", " + text_of(shared) + ")";
  const bool gradient = plan.problem.wants_grad_alibi;
  const bool behind = hooks.alibi && mask_kind(plan.problem.forward) != MaskKind::causal;
  const std::string text =
      std::string("#include \"ampere/backward/kernel.cuh\"\n") +
      common::backward_expressions(hooks.score, hooks.mask, needs_exact_softcap(row.dtype),
                                   plan.problem.wants_grad_captured) +
      "namespace pantile::ampere {\n"
      "using Config = BackwardConfig<" +
      dims_of(row) + ", " +
      (copied ? "with_bias_tile(" + tile_text + ", " + dims_of(row) + ", " + text_of(shared) + ")"
              : tile_text) +
      ">;\nconstexpr attn::GradHooks hooks() {\n  attn::GradHooks hooks;\n  hooks.softcap = " +
      text_of(hooks.softcap) +
      ";\n  hooks.exact = " + text_of(hooks.softcap && needs_exact_softcap(row.dtype)) +
      ";\n  hooks.alibi = " + text_of(hooks.alibi) + ";\n  hooks.behind = " + text_of(behind) +
      ";\n  hooks.dropout = " + text_of(hooks.dropout) +
      ";\n  hooks.grad_alibi = " + text_of(gradient) + ";\n" +
      expression_hooks(hooks, plan.problem.wants_grad_captured != 0) +
      bias_hooks(row, hooks, copied) +
      "  hooks.stored_forms = " + std::to_string(hooks.mask_forms) +
      ";\n  hooks.stored_clauses = " + text_of(hooks.mask_clauses) + ";\n  return hooks;\n}\n}\n";
  jit::Request request =
      request_of(row, hooks, "variant_backward_kernel", text, "hooks()", plan.device);
  request.name += plan.problem.wants_grad_captured != 0 ? "+grad_captured" : "";
  return request;
}

// `place`: a number below kTexts; the expressions; the mask of tensors; the gradients that are
// wanted; the bias.
struct VariantKernels::Known {
  using Place = std::array<std::int64_t, 6>;

  std::atomic<const jit::Kernel*> common[kTexts]{};
  std::mutex mutex;  // of the map
  std::map<Place, const jit::Kernel*> rare;

  template <class Plan>
  Status find(const Place& place, const Plan& plan, jit::Request (*request)(const Plan&),
              void* stream, const jit::LoadedKernel** kernel) {
    const bool is_rare = place[1] != 0 || place[2] != 0 || place[3] != 0 || place[5] != 0;
    std::atomic<const jit::Kernel*>& known = common[place[0]];
    const jit::Kernel* found = nullptr;
    if (is_rare) {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto at = rare.find(place);
      found = at == rare.end() ? nullptr : at->second;
    } else {
      found = known.load(std::memory_order_acquire);
    }
    if (found == nullptr) {
      const Status status = jit::find_kernel(request(plan), stream, &found);
      if (!status.ok()) {
        return status;
      }
      if (is_rare) {
        const std::lock_guard<std::mutex> lock(mutex);
        rare[place] = found;
      } else {
        known.store(found, std::memory_order_release);
      }
    }
    *kernel = found;
    return Status();
  }
};

VariantKernels::VariantKernels() : known_(new Known) {}

Status VariantKernels::find(const ForwardPlan& plan, void* stream,
                            const jit::LoadedKernel** kernel) {
  const VariantHooks hooks = variant_hooks(plan.problem);
  const int index = index_of(hooks, shared_class(plan.device.smem_optin_bytes),
                             sums_on_tensor(plan), has_long_rows(plan), plan.device);
  const Known::Place place{index,
                           static_cast<std::int64_t>(hooks.score),
                           static_cast<std::int64_t>(hooks.mask),
                           mask_number(hooks),
                           0,
                           bias_number(hooks)};
  return known_->find(place, plan, forward_request, stream, kernel);
}

// Texts with ALiBi differ between a causal mask and another one.
Status VariantKernels::find(const BackwardPlan& plan, void* stream,
                            const jit::LoadedKernel** kernel) {
  const VariantHooks hooks = variant_hooks(plan.problem);
  const int index = index_of(hooks, compiled_class(plan.device.smem_optin_bytes),
                             mask_kind(plan.problem.forward) == MaskKind::causal,
                             plan.problem.wants_grad_alibi, plan.device);
  const Known::Place place{index,
                           static_cast<std::int64_t>(hooks.score),
                           static_cast<std::int64_t>(hooks.mask),
                           mask_number(hooks),
                           static_cast<std::int64_t>(plan.problem.wants_grad_captured),
                           bias_number(hooks)};
  return known_->find(place, plan, backward_request, stream, kernel);
}

}  // namespace pantile::ampere
