// Which kernels serve variants on Hopper, what their texts ask for, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "core/integer.h"
#include "hopper/backward/workspace.h"
#include "hopper/mask.h"
#include "hopper/plan.h"
#include "hopper/variant.h"
#include "pantile/attention.h"
#include "problems.h"

namespace pantile::testing {
namespace {

ForwardProblem small_problem(int head_dim) {
  ForwardProblem p = forward_problem();
  p.head_dim = p.head_dim_v = head_dim;
  set_contiguous(&p);
  return p;
}

ForwardProblem causal(ForwardProblem p) {
  p.window_right = 0;
  return p;
}

void add_bias(ForwardProblem* p, DType dtype) {
  p->variant.has_bias = true;
  p->variant.bias_dtype = dtype;
  p->variant.bias = BiasLayout{0, p->seqlen_q * p->seqlen_k, p->seqlen_k, 16};
}

// A plan by hand: the text does not depend on whether the build has CUDA.
ForwardPlan forward_plan(const ForwardProblem& problem, const KernelInfo& row) {
  ForwardPlan plan;
  plan.problem = problem;
  plan.device = h100();
  plan.kernel = &row;
  hopper::configure_forward(&plan);
  return plan;
}

BackwardPlan backward_plan(const BackwardProblem& problem, const KernelInfo& row) {
  BackwardPlan plan;
  plan.problem = problem;
  plan.device = h100();
  plan.kernel = &row;
  hopper::configure_backward(&plan);
  return plan;
}

KernelInfo row_of(Pass pass, DType dtype, int head_dim, MaskKind mask) {
  return KernelInfo{"row", Backend::hopper, pass, dtype, head_dim, head_dim, mask, true, {}};
}

template <class Plan>
std::string text_of(const Plan& plan) {
  std::vector<jit::Request> requests;
  EXPECT_TRUE(hopper::list_kernels(plan, &requests).ok());
  return requests.size() == 1 ? requests[0].source : "";
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(HopperVariant, HooksHaveNumbersOfTheirOwn) {
  std::set<int> numbers;
  int count = 0;
  for (int bias = 0; bias < hopper::kBiasForms; ++bias) {
    for (int bits = 0; bits < 384; ++bits) {
      hopper::VariantHooks hooks;
      hooks.bias_alone = bits / 192 == 1;
      hooks.shift = bits / 32 % 2 == 1;
      hooks.keys = static_cast<hopper::KeyPlace>(bits / 64 % 3);
      hooks.bias = static_cast<hopper::BiasForm>(bias);
      hooks.softcap = (bits & 1) != 0;
      hooks.alibi = (bits & 2) != 0;
      hooks.dropout = (bits & 4) != 0;
      hooks.grad_alibi = (bits & 8) != 0;
      hooks.grad_bias = (bits & 16) != 0;
      EXPECT_GE(hooks.index(), 0);
      EXPECT_LT(hooks.index(), hopper::kVariantKernels);
      numbers.insert(hooks.index());
      ++count;
    }
  }
  EXPECT_EQ(static_cast<int>(numbers.size()), count);
}

TEST(HopperVariant, PlainAttentionAndSinksNeedNoKernelOfTheirOwn) {
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::full);
  ForwardProblem problem = forward_problem();
  problem.variant.has_sinks = true;
  std::vector<jit::Request> requests;
  ASSERT_TRUE(hopper::list_kernels(forward_plan(problem, row), &requests).ok());
  EXPECT_TRUE(requests.empty());
}

TEST(HopperVariant, HooksStandInTheOrderOfTheFormulas) {
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::causal);
  ForwardProblem problem = causal(forward_problem());
  problem.variant.softcap = 30.0f;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)), "using Variant = attn::Softcap<false>;"));
  problem.variant.has_alibi = true;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)),
                    "attn::Both<attn::Softcap<false>, attn::Alibi<false, kTileK>>"));
  problem.variant.dropout = 26;
  add_bias(&problem, DType::bf16);
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)),
                    "using Variant = attn::Both<attn::Both<attn::Both<attn::Softcap<false>, "
                    "attn::BiasTile<kDType, kTileK>>, attn::Alibi<false, kTileK>>, "
                    "attn::Dropout<kTileK>>;"));
}

TEST(HopperVariant, ABiasIsReadInTilesWhereItCanBe) {
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::causal);
  ForwardProblem problem = causal(forward_problem());
  add_bias(&problem, DType::bf16);
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)),
                    "using Shape = WithBiasTile<ForwardVariant<128, 128, MaskKind::causal, "
                    "false>>;"));
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)), "attn::BiasTile<kDType, kTileK>"));
  const auto reads_pairs = [&](const ForwardProblem& other, const KernelInfo& of) {
    const std::string text = text_of(forward_plan(other, of));
    return holds(text, "attn::Bias<kDType, true, kTileK>") && !holds(text, "WithBiasTile");
  };
  EXPECT_FALSE(reads_pairs(problem, row));
  for (std::int64_t BiasLayout::* stride :
       {&BiasLayout::batch, &BiasLayout::head, &BiasLayout::query}) {
    ForwardProblem other = problem;
    other.variant.bias.*stride += 4;
    EXPECT_TRUE(reads_pairs(other, row));
  }
  ForwardProblem far = problem;
  far.variant.bias.query = std::int64_t{1} << 30;
  EXPECT_TRUE(reads_pairs(far, row));
  ForwardProblem narrow = problem;
  narrow.variant.bias.base_align_bytes = 8;
  EXPECT_TRUE(reads_pairs(narrow, row));
  // Head dim 256 has no memory for it.
  problem.head_dim = problem.head_dim_v = 256;
  EXPECT_TRUE(reads_pairs(problem, row_of(Pass::forward, DType::bf16, 256, MaskKind::causal)));
}

TEST(HopperVariant, AlibiWithoutAMaskBeginsWithTheNearestKeys) {
  ForwardProblem problem = forward_problem();
  const KernelInfo full = row_of(Pass::forward, DType::bf16, 128, MaskKind::full);
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::causal);
  problem.variant.has_alibi = true;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, full)), "Variant, NearWalk<kTileK>, "));
  EXPECT_TRUE(holds(text_of(forward_plan(causal(problem), row)), "Variant, SpanWalk, "));
  problem.variant.has_documents = true;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, full)), "Variant, ListWalk<"));
}

TEST(HopperVariant, TextsDependOnDtypeMaskAndAlignment) {
  ForwardProblem problem = forward_problem();
  problem.dtype = DType::f16;
  problem.variant.softcap = 30.0f;
  problem.variant.has_alibi = true;
  const KernelInfo row = row_of(Pass::forward, DType::f16, 128, MaskKind::full);
  const std::string text = text_of(forward_plan(problem, row));
  EXPECT_TRUE(holds(text, "attn::Softcap<true>"));
  EXPECT_TRUE(holds(text, "attn::Alibi<true, kTileK>"));
  EXPECT_TRUE(holds(text, "ForwardVariant<128, 128, MaskKind::full, false>"));
  EXPECT_TRUE(holds(text, "DType::f16"));

  ForwardProblem biased = forward_problem();
  add_bias(&biased, DType::f32);
  const KernelInfo full = row_of(Pass::forward, DType::bf16, 128, MaskKind::full);
  EXPECT_TRUE(holds(text_of(forward_plan(biased, full)), "attn::Bias<DType::f32, true, kTileK>"));
  biased.seqlen_k = 1023;  // the last pair of keys would reach over the row's end
  EXPECT_TRUE(holds(text_of(forward_plan(biased, full)), "attn::Bias<DType::f32, false, kTileK>"));
  biased.seqlen_k = 1024;
  biased.variant.bias.base_align_bytes = 4;
  EXPECT_TRUE(holds(text_of(forward_plan(biased, full)), "attn::Bias<DType::f32, false, kTileK>"));
}

TEST(HopperVariant, ShapesLeaveRegistersForHooks) {
  const KernelInfo full64 = row_of(Pass::forward, DType::bf16, 64, MaskKind::full);
  ForwardProblem problem = small_problem(64);
  problem.seqlen_q = problem.seqlen_k = 4096;
  EXPECT_EQ(forward_plan(problem, full64).tile_q, 192);
  problem.variant.softcap = 30.0f;
  EXPECT_EQ(forward_plan(problem, full64).tile_q, 192);
  problem.variant.dropout = 1;
  const ForwardPlan plan = forward_plan(problem, full64);
  EXPECT_EQ(plan.tile_q, 128);
  EXPECT_TRUE(holds(text_of(plan), "ForwardVariant<64, 64, MaskKind::full, true>"));

  const KernelInfo full96 = row_of(Pass::forward, DType::bf16, 96, MaskKind::full);
  ForwardProblem wide = small_problem(96);
  wide.seqlen_q = wide.seqlen_k = 4096;
  EXPECT_EQ(forward_plan(wide, full96).tile_k, 160);
  wide.variant.has_alibi = true;
  EXPECT_EQ(forward_plan(wide, full96).tile_k, 128);
}

TEST(HopperVariant, BackwardTextsNameTheirHooks) {
  BackwardProblem problem = backward_problem(causal(forward_problem()));
  problem.forward.variant.softcap = 30.0f;
  problem.forward.variant.dropout = 26;
  const KernelInfo row = row_of(Pass::backward, DType::bf16, 128, MaskKind::causal);
  const std::string text = text_of(backward_plan(problem, row));
  EXPECT_TRUE(holds(text, "#include \"hopper/backward/kernel_paired.cuh\""));
  EXPECT_TRUE(holds(text, "attn::GradHooks kHooks{.softcap = true, .dropout = true};"));
  EXPECT_TRUE(holds(text, "SumKind::floating"));
  problem.deterministic = true;
  EXPECT_TRUE(holds(text_of(backward_plan(problem, row)), "SumKind::integer"));

  const KernelInfo wide = row_of(Pass::backward, DType::bf16, 256, MaskKind::causal);
  const std::string pipeline = text_of(backward_plan(problem, wide));
  EXPECT_TRUE(holds(pipeline, "#include \"hopper/backward/kernel_pipeline.cuh\""));
  EXPECT_TRUE(holds(pipeline, "pipeline_body<Config, MaskKind::causal, kSum, kHooks, SpanRows>"));

  BackwardProblem full = backward_problem();
  full.forward.variant.has_alibi = true;
  full.wants_grad_alibi = true;
  const KernelInfo full_row = row_of(Pass::backward, DType::f16, 96, MaskKind::full);
  EXPECT_TRUE(holds(text_of(backward_plan(full, full_row)),
                    "{.alibi = true, .behind = true, .grad_alibi = true}"));
}

TEST(HopperVariant, RefusesByName) {
  ForwardProblem problem = forward_problem();
  problem.variant.dropout = 26;
  problem.variant.query_offset = 24;
  Status status = hopper::variant_rule(problem);
  EXPECT_TRUE(holds(status.message(), "query_offset is 24"));
  problem.variant.query_offset = 32;
  EXPECT_TRUE(hopper::variant_rule(problem).ok());

  BackwardProblem both = backward_problem();
  both.forward.variant.has_alibi = true;
  both.wants_grad_alibi = true;
  EXPECT_TRUE(hopper::variant_rule(both).ok());
  both.forward.variant.softcap = 20.0f;
  EXPECT_TRUE(holds(hopper::variant_rule(both).message(), "softcap is 20"));

  BackwardProblem shared = backward_problem();
  add_bias(&shared.forward, DType::bf16);  // by all sequences
  shared.wants_grad_bias = true;
  EXPECT_TRUE(hopper::variant_rule(shared).ok());
  shared.deterministic = true;
  EXPECT_TRUE(hopper::variant_rule(shared).ok());
  shared.forward.variant.bias.query = 0;
  EXPECT_TRUE(holds(hopper::variant_rule(shared).message(),
                    "deterministic is true, and the bias is shared by queries"));
}

TEST(HopperVariant, MasksWalkLists) {
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::causal);
  ForwardProblem problem = causal(forward_problem());
  EXPECT_EQ(text_of(forward_plan(problem, row)), "");
  problem.variant.has_documents = true;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)),
                    "forward_body<Shape, kDType, Variant, ListWalk<attn::StoredMask<4, false>>, "));
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)), "using Variant = attn::NoVariant;"));
  problem.variant.softcap = 30.0f;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)), "using Variant = attn::Softcap<false>;"));
  problem.variant.has_prefix = true;
  EXPECT_TRUE(holds(text_of(forward_plan(problem, row)), "attn::StoredMask<12, false>"));
  // Which clauses there are is no part of the text.
  problem.variant.mask_clauses = kMaskDocuments | kMaskPrefix << 4;
  const std::string text = text_of(forward_plan(problem, row));
  EXPECT_TRUE(holds(text, "attn::StoredMask<12, true>"));
  problem.variant.mask_clauses = kMaskPrefix | kMaskDocuments << 4;
  EXPECT_EQ(text_of(forward_plan(problem, row)), text);

  const KernelInfo row_b = row_of(Pass::backward, DType::bf16, 128, MaskKind::full);
  BackwardProblem backward = backward_problem(forward_problem());
  backward.forward.variant.has_element_mask = true;
  EXPECT_TRUE(holds(text_of(backward_plan(backward, row_b)),
                    "kHooks, ListRows<attn::StoredMask<2, false>>>(maps, params, variant)"));
  EXPECT_TRUE(holds(text_of(backward_plan(backward, row_b)), "kHooks{.lists = true}"));
  EXPECT_TRUE(hopper::variant_rule(backward).ok());
  backward.deterministic = true;
  EXPECT_TRUE(holds(hopper::variant_rule(backward).message(),
                    "deterministic is true; this kernel has that without a mask only"));
}

TEST(HopperVariant, ListsAreSharedByWhatSharesTheMask) {
  const KernelInfo row = row_of(Pass::forward, DType::bf16, 128, MaskKind::full);
  ForwardProblem problem = forward_problem();  // 2 sequences, 1024 queries and keys
  const std::int64_t batch = problem.batch, heads = problem.heads_q;
  problem.variant.has_block_mask = true;
  problem.variant.mask_block_size = 128;
  problem.variant.block_mask.query = 8;
  const auto lists = [&] { return hopper::forward_lists(forward_plan(problem, row)); };
  EXPECT_EQ(lists().tiles, core::ceil_div<std::int64_t>(problem.seqlen_q, 128));
  EXPECT_EQ(lists().heads, 1);
  EXPECT_EQ(lists().batch_step, 0);
  EXPECT_EQ(lists().capacity, core::ceil_div<std::int64_t>(problem.seqlen_k, 128));
  EXPECT_EQ(lists().items, batch * heads * lists().tiles);
  const std::int64_t tiles = lists().tiles;
  problem.variant.block_mask.head = 64;
  EXPECT_EQ(lists().heads, heads);
  problem.variant.block_mask.batch = 1024;
  EXPECT_EQ(lists().tiles, batch * tiles);
  EXPECT_EQ(lists().batch_step, tiles);
  // Behind the counters, apart from each other, and inside of the workspace.
  const hopper::ListLayout all = lists();
  const ForwardPlan plan = forward_plan(problem, row);
  EXPECT_GE(all.counts, plan.workspace.zeroed_bytes);
  EXPECT_GE(all.entries, all.counts + static_cast<std::size_t>(all.tiles * all.heads) * 8);
  EXPECT_GE(all.order, all.entries + static_cast<std::size_t>(all.tiles * all.heads) *
                                         static_cast<std::size_t>(all.capacity) * 4);
  EXPECT_GE(all.end, all.order + static_cast<std::size_t>(all.items) * 16);
  EXPECT_EQ(plan.workspace.bytes, all.end);
}

TEST(HopperVariant, RowsOfTheTable) {
  const auto features = [](const char* name) {
    for (int i = 0; i < kernel_count(); ++i) {
      if (std::string(kernel_info(i).name) == name) {
        return kernel_info(i).features;
      }
    }
    ADD_FAILURE() << name;
    return FeatureSet();
  };
  EXPECT_TRUE(features("hopper_forward_bf16_d256_causal").has(Feature::dropout));
  EXPECT_TRUE(features("hopper_backward_f16_d96_full").has(Feature::grad_bias));
  EXPECT_TRUE(features("hopper_backward_bf16_d64_full").has(Feature::grad_sinks));
  EXPECT_FALSE(features("hopper_backward_bf16_d64_full").has(Feature::alibi));
  EXPECT_TRUE(features("hopper_backward_bf16_d256_full").has(Feature::softcap));
  EXPECT_FALSE(features("hopper_forward_e4m3_d128_full").has(Feature::sinks));
}

// Of a row in the verdicts on a problem: "" if it serves, or would in a build with CUDA.
std::string refusal_of(const BackwardProblem& problem, const char* name) {
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int count = explain_backward(problem, h100(), {}, verdicts.data(), kernel_count());
  for (int i = 0; i < count; ++i) {
    const Verdict& verdict = verdicts[static_cast<std::size_t>(i)];
    if (std::string(verdict.kernel->name) == name) {
      const std::string reason = verdict.reason.ok() ? "" : verdict.reason.message();
      return holds(reason, "it would serve") ? "" : reason;
    }
  }
  return "no such row";
}

TEST(HopperVariant, HeadDim64GoesBackwardInTheRowOf96) {
  BackwardProblem problem = backward_problem(causal(small_problem(64)));
  EXPECT_EQ(refusal_of(problem, "hopper_backward_bf16_d64_causal"), "");
  problem.forward.variant.has_sinks = problem.wants_grad_sinks = true;
  EXPECT_EQ(refusal_of(problem, "hopper_backward_bf16_d64_causal"), "");
  problem.forward.variant.has_alibi = true;
  EXPECT_TRUE(
      holds(refusal_of(problem, "hopper_backward_bf16_d64_causal"), "does not serve ALiBi"));
  EXPECT_EQ(refusal_of(problem, "hopper_backward_bf16_d96_causal"), "");
}

TEST(HopperVariant, ParametersOfTheFormulas) {
  ForwardProblem problem = forward_problem();
  problem.scale = 0.25f;
  const VariantTensors none;
  const attn::VariantParams plain = hopper::variant_params(problem, none);
  EXPECT_FLOAT_EQ(plain.unit, 0.25f * 1.44269504f);
  EXPECT_FLOAT_EQ(plain.logit_scale, 0.25f);
  problem.variant.softcap = 20.0f;
  const attn::VariantParams capped = hopper::variant_params(problem, none);
  EXPECT_FLOAT_EQ(capped.cap_inner, 0.25f / 20.0f);
  EXPECT_FLOAT_EQ(capped.unit, 20.0f * 1.44269504f);
  EXPECT_FLOAT_EQ(capped.logit_scale, 20.0f);
  EXPECT_FLOAT_EQ(capped.bias_factor * capped.unit, 1.44269504f);
  problem.variant.has_alibi = true;  // maxima are then taken of base-2 logits
  EXPECT_FLOAT_EQ(hopper::variant_params(problem, none).logit_scale, std::log(2.0f));
  problem.variant.dropout = 64;
  const attn::VariantParams dropped = hopper::variant_params(problem, none);
  EXPECT_EQ(dropped.dropout_add, 0xc0c0c0c0u);
  EXPECT_FLOAT_EQ(dropped.keep_scale, 256.0f / 192.0f);
}

TEST(HopperVariant, GradientOfTheBiasHasItsShape) {
  ForwardProblem problem = forward_problem();  // batch 2, 8 heads, 1024 x 1024
  problem.variant.has_bias = true;
  problem.variant.bias = BiasLayout{0, 4096, 0, 16};  // a row a head
  BackwardProblem backward;
  backward.forward = problem;
  backward.wants_grad_bias = true;
  const BiasLayout layout = common::grad_bias_layout(backward);
  EXPECT_EQ(layout.batch, 0);
  EXPECT_EQ(layout.head, 1024);
  EXPECT_EQ(layout.query, 0);
  EXPECT_EQ(common::grad_bias_bytes(backward), 8u * 1024u * 4u);
  EXPECT_FALSE(hopper::variant_hooks(backward).bias_alone);
  backward.forward.variant.bias = BiasLayout{1 << 30, 1 << 24, 2048, 16};
  EXPECT_EQ(common::grad_bias_layout(backward).batch, 8 * 1024 * 1024);
  EXPECT_EQ(common::grad_bias_bytes(backward), 2u * 8u * 1024u * 1024u * 4u);
  EXPECT_TRUE(hopper::variant_hooks(backward).bias_alone);
}

TEST(HopperVariant, DeterministicGradientsOfASharedBiasHaveParts) {
  BackwardProblem backward = backward_problem();  // 2 sequences, 8 heads, 1024 x 1024
  add_bias(&backward.forward, DType::bf16);       // by all sequences
  backward.wants_grad_bias = true;
  const std::size_t plain = hopper::backward_workspace(backward, 128).bytes;
  EXPECT_FALSE(common::has_bias_parts(backward));
  EXPECT_FALSE(hopper::variant_hooks(backward).bias_alone);
  backward.deterministic = true;
  EXPECT_TRUE(common::has_bias_parts(backward));
  EXPECT_TRUE(hopper::variant_hooks(backward).bias_alone);
  EXPECT_EQ(common::grad_bias_layout(backward).batch, 8 * 1024 * 1024);
  const hopper::BackwardWorkspace workspace = hopper::backward_workspace(backward, 128);
  EXPECT_GE(workspace.bytes, workspace.bias_parts + common::grad_bias_bytes(backward));
  EXPECT_GE(workspace.bias_parts, plain);
  const KernelInfo row = row_of(Pass::backward, DType::bf16, 128, MaskKind::full);
  EXPECT_TRUE(holds(text_of(backward_plan(backward, row)), ".bias_alone = true"));
  backward.forward.batch = 1;
  EXPECT_FALSE(common::has_bias_parts(backward));
}

}  // namespace
}  // namespace pantile::testing
