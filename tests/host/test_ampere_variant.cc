// Host half of variants on the Ampere family: which kernels a plan has compiled, and refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "ampere/plan.h"
#include "ampere/variant.h"
#include "core/softmax_state.h"
#include "pantile/expression.h"
#include "problems.h"

namespace pantile::testing {
namespace {

const KernelInfo& row_named(const char* name) {
  for (int i = 0; i < kernel_count(); ++i) {
    if (std::strcmp(kernel_info(i).name, name) == 0) {
      return kernel_info(i);
    }
  }
  ADD_FAILURE() << "no row " << name;
  return kernel_info(0);
}

// A build for other GPUs than this one makes the same plan.
void expect_accepted(const Status& status) {
  EXPECT_TRUE(status.ok() ||
              std::string(status.message()).find("PANTILE_AMPERE_ON_HOPPER") != std::string::npos)
      << status.message();
}

// As plan_forward() would make it, on a machine without CUDA, too.
ForwardPlan forward_plan(const ForwardProblem& problem, const char* row,
                         const DeviceProps& device = a100()) {
  ForwardPlan plan;
  plan.problem = problem;
  plan.device = device;
  plan.kernel = &row_named(row);
  const Status status = ampere::accept_forward(*plan.kernel, problem, device);
  expect_accepted(status);
  ampere::configure_forward(&plan);
  return plan;
}

BackwardPlan backward_plan(const BackwardProblem& problem, const char* row,
                           const DeviceProps& device = a100()) {
  BackwardPlan plan;
  plan.problem = problem;
  plan.device = device;
  plan.kernel = &row_named(row);
  const Status status = ampere::accept_backward(*plan.kernel, problem, device);
  expect_accepted(status);
  ampere::configure_backward(&plan);
  return plan;
}

ForwardProblem causal_problem() {
  ForwardProblem problem = forward_problem();
  problem.window_right = 0;
  return problem;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Expression parsed(ExpressionKind kind, const char* text) {
  static constexpr CapturedType kTensors[] = {{"w", CapturedDType::f32, 1}};
  Expression expression = Expression::none;
  const Status status = parse_expression(kind, text, kTensors, 1, &expression);
  EXPECT_TRUE(status.ok()) << status.message();
  return expression;
}

void add_bias(ForwardProblem* problem, DType dtype = DType::bf16) {
  problem->variant.has_bias = true;
  problem->variant.bias_dtype = dtype;
  problem->variant.bias =  // shared by all sequences
      BiasLayout{0, problem->seqlen_q * problem->seqlen_k, problem->seqlen_k, 16};
}

TEST(AmpereVariant, PlansWithoutHooksHaveNothingCompiled) {
  ForwardProblem problem = causal_problem();
  std::vector<jit::Request> requests;
  ASSERT_TRUE(
      ampere::list_kernels(forward_plan(problem, "ampere_forward_bf16_d128_causal"), &requests)
          .ok());
  ASSERT_TRUE(
      ampere::list_kernels(
          backward_plan(backward_problem(problem), "ampere_backward_bf16_d128_any"), &requests)
          .ok());
  EXPECT_TRUE(requests.empty());
}

TEST(AmpereVariant, TheTextNamesTileTypesAndMask) {
  ForwardProblem problem = causal_problem();
  problem.variant.softcap = 50.0f;
  problem.variant.dropout = 26;
  const jit::Request request =
      ampere::forward_request(forward_plan(problem, "ampere_forward_bf16_d128_causal"));
  EXPECT_EQ(request.name, "ampere_forward_bf16_d128_causal softcap+dropout");
  EXPECT_EQ(request.arch, 80);
  EXPECT_TRUE(contains(request.source,
                       "forward_tile(128, 128, MaskKind::causal, "
                       "SharedClass::medium)"))
      << request.source;
  EXPECT_TRUE(
      contains(request.source, "ForwardVariant<attn::Softcap<false>, attn::Dropout<kDropKeys>>"))
      << request.source;
  EXPECT_EQ(request.entry,
            "pantile::ampere::variant_forward_kernel<pantile::ampere::Config, "
            "pantile::DType::bf16, pantile::MaskKind::causal, pantile::ampere::Variant>");

  problem.dtype = DType::f16;  // holds scores better than the fast tanh
  problem.variant.dropout = 0;
  problem.variant.has_alibi = true;
  problem.window_right = kUnbounded;
  const jit::Request other =
      ampere::forward_request(forward_plan(problem, "ampere_forward_f16_d128_full", h100()));
  EXPECT_EQ(other.arch, 90);
  EXPECT_TRUE(contains(other.source, "SharedClass::large")) << other.source;
  EXPECT_TRUE(contains(other.source,
                       "attn::Both<attn::Softcap<true>, "
                       "attn::Alibi<true, Config::kTileK>>"))
      << other.source;
}

// The place of a kernel in memory, and its text: equal or different together.
TEST(AmpereVariant, EveryChoiceHasATextOfItsOwn) {
  std::set<std::string> forwards, backwards;
  int count = 0;
  for (int hooks = 1; hooks < 16; ++hooks) {
    for (const DeviceProps& device :
         {a100(), h100(), gpu_device("A10", 8, 6, 72, 101376, 6 << 20)}) {
      ForwardProblem problem = causal_problem();
      problem.variant.softcap = (hooks & 1) != 0 ? 30.0f : 0.0f;
      problem.variant.has_alibi = (hooks & 2) != 0;
      problem.variant.dropout = (hooks & 4) != 0 ? 128 : 0;
      if ((hooks & 8) != 0) {
        add_bias(&problem);
      }
      const jit::Request forward =
          ampere::forward_request(forward_plan(problem, "ampere_forward_bf16_d128_causal", device));
      forwards.insert(forward.source + std::to_string(forward.arch));
      const jit::Request backward = ampere::backward_request(
          backward_plan(backward_problem(problem), "ampere_backward_bf16_d128_any", device));
      backwards.insert(backward.source + std::to_string(backward.arch));
      ++count;
    }
  }
  EXPECT_EQ(static_cast<int>(forwards.size()), count);
  EXPECT_EQ(static_cast<int>(backwards.size()), count);
}

TEST(AmpereVariant, ABiasIsCopiedInTilesWhereTheyHaveAPlace) {
  const DeviceProps a10 = gpu_device("A10", 8, 6, 72, 101376, 6 << 20);
  const char* const row = "ampere_forward_bf16_d128_causal";
  ForwardProblem problem = causal_problem();
  add_bias(&problem);
  const auto text = [&](const DeviceProps& device) {
    return ampere::forward_request(forward_plan(problem, row, device)).source;
  };
  const std::string copied = "ForwardVariant<CopiedBias<DType::bf16, Config::kTileK>";
  EXPECT_TRUE(contains(text(a100()), copied)) << text(a100());
  EXPECT_TRUE(contains(text(h100()), copied)) << text(h100());
  EXPECT_TRUE(contains(text(h100()), "SharedClass::medium")) << text(h100());
  // Two blocks of 48 KB fill the multiprocessor.
  EXPECT_TRUE(contains(text(a10), "attn::Bias<DType::bf16, true, Config::kTileK>")) << text(a10);
  EXPECT_EQ(ampere::forward_request(forward_plan(problem, row)).name, std::string(row) + " bias");

  ForwardProblem other = problem;
  problem.variant.bias.query += 4;
  EXPECT_TRUE(contains(text(a100()), "attn::Bias<DType::bf16, true, Config::kTileK>"));
  problem.variant.bias.query += 1;
  EXPECT_TRUE(contains(text(a100()), "attn::Bias<DType::bf16, false, Config::kTileK>"));
  problem = other;
  problem.variant.bias_dtype = DType::f32;
  EXPECT_TRUE(contains(text(a100()), "attn::Bias<DType::f32, true, Config::kTileK>"));

  // In the order of the formulas.
  problem = other;
  problem.variant.softcap = 20.0f;
  problem.variant.has_alibi = true;
  problem.variant.mask_expression = parsed(ExpressionKind::mask, "i - j < 30");
  const std::string all =
      ampere::forward_request(forward_plan(problem, "ampere_forward_bf16_d128_window")).source;
  EXPECT_TRUE(contains(all,
                       "attn::Alibi<true, Config::kTileK>>, CopiedBias<DType::bf16, "
                       "Config::kTileK>>, attn::UserMask>"))
      << all;
}

TEST(AmpereVariant, CopiedTilesOfABiasFitWithoutFewerBlocks) {
  using ampere::SharedClass;
  constexpr MaskKind kCausal = MaskKind::causal;
  const auto forward = [](int head_dim, SharedClass tile, SharedClass gpu) {
    return ampere::has_bias_tile(ampere::forward_tile(head_dim, head_dim, kCausal, tile), head_dim,
                                 head_dim, gpu);
  };
  EXPECT_TRUE(forward(64, SharedClass::medium, SharedClass::medium));
  EXPECT_TRUE(forward(128, SharedClass::medium, SharedClass::medium));
  EXPECT_TRUE(forward(128, SharedClass::medium, SharedClass::large));
  EXPECT_FALSE(forward(64, SharedClass::small, SharedClass::small));
  EXPECT_FALSE(forward(128, SharedClass::small, SharedClass::small));
  for (const SharedClass shared : {SharedClass::small, SharedClass::medium, SharedClass::large}) {
    const auto backward = [shared](int head_dim) {
      const ampere::BackwardTile tile = ampere::with_bias_tile(
          ampere::backward_tile(head_dim, shared), head_dim, head_dim, shared);
      return ampere::has_bias_tile(tile, head_dim, head_dim, shared);
    };
    EXPECT_TRUE(backward(128));
    EXPECT_FALSE(backward(64));
    const ampere::BackwardTile plain = ampere::backward_tile(128, shared);
    const ampere::BackwardTile tile = ampere::with_bias_tile(plain, 128, 128, shared);
    EXPECT_EQ(tile.stages, shared == SharedClass::medium ? 1 : plain.stages);
    const int bytes = ampere::backward_shared_bytes(tile, 128, 128) +
                      ampere::bias_tile_bytes(tile.tile_q, tile.tile_k);
    EXPECT_LE(tile.blocks_per_sm * (bytes + 1024), ampere::shared_class_bytes(shared) + 1024);
  }
}

TEST(AmpereVariant, GradientOfABias) {
  ForwardProblem problem = causal_problem();
  add_bias(&problem);
  BackwardProblem backward = backward_problem(problem);
  const char* const row = "ampere_backward_bf16_d128_any";
  const auto request = [&] { return ampere::backward_request(backward_plan(backward, row)); };
  EXPECT_TRUE(contains(request().source, "hooks.bias_tile = true")) << request().source;
  EXPECT_TRUE(contains(request().source,
                       "with_bias_tile(backward_tile(128, SharedClass::medium), 128, 128, "
                       "SharedClass::medium)>;"))
      << request().source;
  EXPECT_TRUE(contains(request().source, "hooks.grad_bias = false")) << request().source;
  const std::size_t plain = backward_plan(backward, row).workspace.bytes;

  backward.wants_grad_bias = true;
  EXPECT_EQ(request().name, std::string(row) + " bias+grad_bias");
  EXPECT_TRUE(contains(request().source, "hooks.bias_alone = false")) << request().source;
  EXPECT_EQ(backward_plan(backward, row).workspace.bytes, plain);
  backward.deterministic = true;  // each head of each sequence has its own at first
  EXPECT_TRUE(contains(request().source, "hooks.bias_alone = true")) << request().source;
  EXPECT_GE(backward_plan(backward, row).workspace.bytes,
            plain + static_cast<std::size_t>(problem.batch * problem.heads_q * problem.seqlen_q *
                                             problem.seqlen_k) *
                        4);

  // Keys of the attended part may begin anywhere, those of an unaligned bias as well.
  backward.deterministic = false;
  backward.forward.variant.bias_dtype = DType::f32;
  EXPECT_TRUE(contains(request().source, "hooks.bias_dtype = DType::f32")) << request().source;
  EXPECT_TRUE(contains(request().source, "hooks.bias_tile = false")) << request().source;

  // Behind a softcap as well: the scores are kept for it.
  backward.forward.variant.bias_dtype = DType::bf16;
  backward.forward.variant.softcap = 30.0f;
  EXPECT_EQ(request().name, std::string(row) + " softcap+bias+grad_bias");

  backward.forward.variant.bias.query = 0;
  backward.deterministic = true;
  EXPECT_STREQ(ampere::accept_backward(row_named(row), backward, a100()).message(),
               "deterministic is true, and the bias is shared by queries: this kernel adds its "
               "gradient in any order");
}

TEST(AmpereVariant, ABiasBesideAScoreThatIsNotAffineIsRefusedByName) {
  ForwardProblem problem = causal_problem();
  add_bias(&problem);
  const KernelInfo& row = row_named("ampere_forward_bf16_d128_causal");
  problem.variant.score = parsed(ExpressionKind::score, "s * w[h]");
  const std::string refusal = ampere::accept_forward(row, problem, a100()).message();
  EXPECT_TRUE(contains(refusal, "bias and score are given")) << refusal;
  problem.variant.score = parsed(ExpressionKind::score, "s + w[h] * j");
  expect_accepted(ampere::accept_forward(row, problem, a100()));
}

TEST(AmpereVariant, BackwardWithALiBiKnowsWhetherKeysLieBehind) {
  ForwardProblem problem = causal_problem();
  problem.variant.has_alibi = true;
  const char* const row = "ampere_backward_bf16_d64_any";
  problem.head_dim = problem.head_dim_v = 64;
  set_contiguous(&problem);
  const jit::Request causal =
      ampere::backward_request(backward_plan(backward_problem(problem), row));
  EXPECT_TRUE(contains(causal.source, "hooks.behind = false")) << causal.source;
  problem.window_right = kUnbounded;
  const jit::Request full = ampere::backward_request(backward_plan(backward_problem(problem), row));
  EXPECT_TRUE(contains(full.source, "hooks.behind = true")) << full.source;
}

TEST(AmpereVariant, ParametersAreInTheUnitsOfTheHooks) {
  ForwardProblem problem = causal_problem();
  problem.scale = -0.25f;  // the forward's Q has its sign
  problem.variant.softcap = 20.0f;
  problem.variant.dropout = 64;
  VariantTensors tensors;
  const attn::VariantParams forward = ampere::forward_variant_params(problem, tensors);
  const attn::VariantParams backward = ampere::backward_variant_params(problem, tensors);
  EXPECT_FLOAT_EQ(forward.cap_inner, 0.25f / 20.0f);
  EXPECT_FLOAT_EQ(backward.cap_inner, -0.25f / 20.0f);
  EXPECT_FLOAT_EQ(forward.unit, 20.0f * core::kLog2E);
  EXPECT_FLOAT_EQ(backward.cap_log2, 20.0f * core::kLog2E);
  EXPECT_FLOAT_EQ(forward.keep_scale, 256.0f / 192.0f);
  EXPECT_EQ(forward.dropout_add, 0xc0c0c0c0u);
  problem.variant.softcap = 0.0f;
  EXPECT_FLOAT_EQ(ampere::forward_variant_params(problem, tensors).unit, 0.25f * core::kLog2E);
  // A bias counts in natural logits.
  add_bias(&problem);
  const attn::VariantParams biased = ampere::forward_variant_params(problem, tensors);
  EXPECT_FLOAT_EQ(biased.bias_factor * biased.unit, core::kLog2E);
  EXPECT_EQ(biased.bias_query, problem.seqlen_k);
  problem.scale = 0.0f;  // Q is zeros then, and the bias is all of the scores
  EXPECT_FLOAT_EQ(ampere::forward_variant_params(problem, tensors).bias_factor, 1.0f);
}

TEST(AmpereVariant, ExpressionsAreInTheText) {
  ForwardProblem problem = causal_problem();
  problem.variant.score = parsed(ExpressionKind::score, "s + w[h] * (j - i)");
  const jit::Request affine =
      ampere::forward_request(forward_plan(problem, "ampere_forward_bf16_d128_causal"));
  EXPECT_EQ(affine.name, "ampere_forward_bf16_d128_causal score");
  EXPECT_TRUE(contains(affine.source, "struct UserScore")) << affine.source;
  EXPECT_TRUE(contains(affine.source, "ForwardVariant<attn::UserScore, attn::NoVariant>"))
      << affine.source;

  // A mask may hide any pair: the kernel is that of a window.
  problem.variant.mask_expression = parsed(ExpressionKind::mask, "i - j < 30");
  const jit::Request masked =
      ampere::forward_request(forward_plan(problem, "ampere_forward_bf16_d128_window"));
  EXPECT_EQ(masked.name, "ampere_forward_bf16_d128_window score+mask");
  EXPECT_TRUE(contains(masked.source, "attn::Both<attn::UserScore, attn::UserMask>"))
      << masked.source;
  EXPECT_EQ(mask_kind(problem), MaskKind::window);
}

TEST(AmpereVariant, MasksOfTensorsAreAskedInEveryStep) {
  ForwardProblem problem = forward_problem();
  problem.variant.has_element_mask = problem.variant.has_prefix = true;
  const char* const full = "ampere_forward_bf16_d128_full";
  const jit::Request request = ampere::forward_request(forward_plan(problem, full));
  EXPECT_EQ(request.name, std::string(full) + " elements+prefix");
  const std::uint32_t forms = kMaskElements | kMaskPrefix;
  const std::string type = "attn::StoredMask<" + std::to_string(forms) + ", false>";
  EXPECT_TRUE(contains(request.source, "ForwardVariant<attn::MaskedPairs<" + type + ">"))
      << request.source;
  // The tile of the row, with the loops of a mask that cuts tiles.
  EXPECT_TRUE(contains(request.source, "MaskKind::full")) << request.source;
  EXPECT_TRUE(contains(request.entry, "pantile::MaskKind::window")) << request.entry;

  BackwardProblem backward = backward_problem(problem);
  backward.deterministic = true;
  backward.forward.variant.mask_clauses = kMaskElements | kMaskPrefix << kMaskForms;
  const jit::Request gradients =
      ampere::backward_request(backward_plan(backward, "ampere_backward_bf16_d128_any"));
  EXPECT_TRUE(contains(gradients.source, "hooks.stored_forms = " + std::to_string(forms)))
      << gradients.source;
  EXPECT_TRUE(contains(gradients.source, "hooks.stored_clauses = true")) << gradients.source;
  EXPECT_EQ(gradients.name, "ampere_backward_bf16_d128_any elements+prefix+clauses");
}

TEST(AmpereVariant, ScoresThatAreNotAffineHaveTheirGradients) {
  ForwardProblem problem = causal_problem();
  problem.variant.score = parsed(ExpressionKind::score, "s * w[h]");
  BackwardProblem backward = backward_problem(problem);
  backward.wants_grad_captured = 1;
  const char* const row = "ampere_backward_bf16_d128_any";
  const jit::Request request = ampere::backward_request(backward_plan(backward, row));
  EXPECT_EQ(request.name, "ampere_backward_bf16_d128_any score+grad_captured");
  EXPECT_TRUE(contains(request.source, "hooks.raw_score = true")) << request.source;
  EXPECT_TRUE(contains(request.source, "hooks.grad_captured = true")) << request.source;
  EXPECT_TRUE(contains(request.source, "const float (&S)[kCount]")) << request.source;
  backward.wants_grad_captured = 0;
  EXPECT_TRUE(contains(ampere::backward_request(backward_plan(backward, row)).source,
                       "hooks.grad_captured = false"));

  backward.deterministic = true;
  const auto refusal = [&] {
    return std::string(ampere::accept_backward(row_named(row), backward, a100()).message());
  };
  EXPECT_TRUE(contains(refusal(), "one that is s plus something without s")) << refusal();
  backward.forward.variant.score = parsed(ExpressionKind::score, "s + w[h] * j");
  backward.wants_grad_captured = 1;
  EXPECT_TRUE(contains(refusal(), "gradients of captured tensors in any order")) << refusal();
}

TEST(AmpereVariant, UnitsOfExpressions) {
  ForwardProblem problem = causal_problem();
  problem.scale = -0.25f;  // the forward's Q has its sign
  ASSERT_TRUE(
      parse_expression(ExpressionKind::score, "5 * tanh(s / 5)", nullptr, 0, &problem.variant.score)
          .ok());
  const VariantTensors tensors;
  const attn::VariantParams forward = ampere::forward_variant_params(problem, tensors);
  EXPECT_FLOAT_EQ(forward.score_unit, 0.25f);
  EXPECT_FLOAT_EQ(forward.unit, 5.0f * core::kLog2E);
  const attn::VariantParams backward = ampere::backward_variant_params(problem, tensors);
  EXPECT_FLOAT_EQ(backward.score_unit, -0.25f);
  EXPECT_FLOAT_EQ(backward.cap_log2, 5.0f * core::kLog2E);
  problem.scale = 0.0f;  // Q is zeros then, and units stay positive
  EXPECT_FLOAT_EQ(ampere::forward_variant_params(problem, tensors).score_unit, 1.0f);
}

TEST(AmpereVariant, RefusesByNameWhatItDoesNotServe) {
  const auto refusal = [](const ForwardProblem& problem, const DeviceProps& device) {
    const KernelInfo& row = row_named("ampere_forward_bf16_d128_causal");
    return std::string(ampere::accept_forward(row, problem, device).message());
  };
  ForwardProblem problem = causal_problem();
  problem.variant.dropout = 26;
  problem.variant.key_offset = 24;
  EXPECT_EQ(refusal(problem, a100()),
            "variant.query_offset is 0 and variant.key_offset 24; with dropout this kernel needs "
            "multiples of 16");
  problem.variant.key_offset = 0;
  const std::string later = refusal(problem, gpu_device("B200", 10, 0, 148, 232448, 126 << 20));
  EXPECT_TRUE(contains(later, "compiles kernels with dropout for compute capability 8.x and 9.x"))
      << later;
  problem.softmax.unit = SoftmaxUnit::tensor;
  problem.softmax.tensor_quarters = 2;
  EXPECT_TRUE(contains(refusal(problem, a100()), "tensor_share = 0 only"));

  problem = causal_problem();
  problem.variant.softcap = 2.0f;
  problem.variant.score = parsed(ExpressionKind::score, "s + j");
  EXPECT_TRUE(contains(refusal(problem, a100()), "softcap and score are given"))
      << refusal(problem, a100());
}

}  // namespace
}  // namespace pantile::testing
