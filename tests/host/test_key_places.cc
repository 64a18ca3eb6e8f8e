// Keys in ranges or pages, and the shift of the mask: rules with their messages, contents of the
// arrays, the canonical form, and who serves them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ampere/plan.h"
#include "hopper/plan.h"
#include "host/features.h"
#include "host/shape.h"
#include "host/validate.h"
#include "pantile/expression.h"
#include "problems.h"

namespace pantile::testing {
namespace {

ForwardProblem ranged_problem() {
  ForwardProblem p = packed_problem();
  p.has_k_begin = p.has_seqused_k = true;
  return p;
}

// 40 pages of 64 slots, 16 of them at most for a sequence.
ForwardProblem paged_problem() {
  ForwardProblem p = forward_problem();
  p.packed_q = true;
  p.total_q = 2048;
  p.has_seqused_k = true;
  p.page_size = 64;
  p.pages = 40;
  p.max_pages = 16;
  p.table_stride = 20;
  p.k = p.v = contiguous(p.page_size, p.heads_k, p.head_dim);
  return p;
}

TEST(KeyPlaces, RulesNameFieldValueAndRule) {
  struct Bad {
    ForwardProblem (*problem)();
    void (*spoil)(ForwardProblem*);
    const char* message;
  };
  const Bad bad[] = {
      {ranged_problem, [](ForwardProblem* p) { p->packed_k = false; },
       "packed_k is false; it must be true because has_k_begin is true"},
      {ranged_problem, [](ForwardProblem* p) { p->has_seqused_k = false; },
       "has_seqused_k is false; it must be true because has_k_begin is true: it gives the number "
       "of keys"},
      {ranged_problem, [](ForwardProblem* p) { p->page_size = 16; },
       "has_k_begin is true; it must not be when page_size is set"},
      {ranged_problem, [](ForwardProblem* p) { p->pages = 1; },
       "pages, max_pages or table_stride is set; it must not be when page_size is 0"},
      {paged_problem, [](ForwardProblem* p) { p->packed_k = true; },
       "packed_k is true; it must be false because keys are in pages"},
      {paged_problem, [](ForwardProblem* p) { p->page_size = -1; },
       "page_size is -1; it must be from 1 to 536870911"},
      {paged_problem, [](ForwardProblem* p) { p->pages = -1; },
       "pages is -1; it must be from 0 to 2147483647"},
      {paged_problem, [](ForwardProblem* p) { p->max_pages = 15; },
       "seqlen_k is 1024; it must be at most max_pages * page_size, 15 * 64"},
      {paged_problem, [](ForwardProblem* p) { p->table_stride = 15; },
       "table_stride is 15; it must be from 16 to 536870912"},
      {paged_problem, [](ForwardProblem* p) { p->total_k = 64; },
       "total_k is 64; it must be from 2560 to 2560"},
      {paged_problem, [](ForwardProblem* p) { p->k.batch = 0; }, nullptr},  // a shared page
  };
  EXPECT_TRUE(host::validate(ranged_problem()).ok());
  EXPECT_TRUE(host::validate(paged_problem()).ok());
  for (const Bad& b : bad) {
    ForwardProblem p = b.problem();
    b.spoil(&p);
    const Status status = host::validate(p);
    EXPECT_EQ(status.ok(), b.message == nullptr) << status.message();
    if (b.message != nullptr) {
      EXPECT_STREQ(status.message(), b.message);
    }
  }
}

// Ranges may repeat keys: no sum of lengths has to fit the tensor, and the tensor may be larger.
TEST(KeyPlaces, RangesNeedNotAddUp) {
  for (const std::int64_t total : {1, 1 << 20}) {
    ForwardProblem p = ranged_problem();
    p.total_k = total;
    EXPECT_TRUE(host::validate(p).ok()) << total;
  }
}

TEST(KeyPlaces, ContentsAreChecked) {
  const std::int32_t cu[] = {0, 1024, 2048};
  const std::int32_t used[] = {1024, 70};
  const std::int32_t begins[] = {1024, 1979};
  ForwardTensors t;
  t.cu_seqlens_q = cu;
  t.seqused_k = used;
  t.k_begin = begins;
  EXPECT_STREQ(check_sequences(ranged_problem(), t).message(),
               "k_begin[1] is 1979 with 70 keys; the range must lie within the 2048 rows of k");
  const std::int32_t good[] = {1024, 1978};
  t.k_begin = good;
  EXPECT_TRUE(check_sequences(ranged_problem(), t).ok());
  ForwardProblem shifted = ranged_problem();
  shifted.has_mask_shift = true;
  const std::int32_t shifts[] = {-(1 << 29) + 1, 1 << 29};
  t.mask_shift = shifts;
  EXPECT_STREQ(check_sequences(shifted, t).message(),
               "mask_shift[1] is 536870912; it must be from -536870911 to 536870911");
  std::vector<std::int32_t> table(40, 39);
  table[21] = 40;  // page 1 of sequence 1
  t = ForwardTensors();
  t.cu_seqlens_q = cu;
  t.seqused_k = used;
  t.block_table = table.data();
  EXPECT_STREQ(check_sequences(paged_problem(), t).message(),
               "block_table[1][1] is 40; it must be from 0 to 39");
  table[21] = 0;
  table[22] = -5;  // behind its last page
  EXPECT_TRUE(check_sequences(paged_problem(), t).ok());
}

TEST(KeyPlaces, PointersBelongToTheirFields) {
  ForwardTensors t;
  alignas(16) static char memory[16];
  static const std::int32_t ints[4] = {0};
  t.q = t.k = t.v = memory;
  t.o = memory;
  t.lse = reinterpret_cast<float*>(memory);
  t.cu_seqlens_q = t.seqused_k = ints;
  EXPECT_STREQ(host::validate_tensors(ranged_problem(), t).message(),
               "k_begin is null; it must be set because has_k_begin is true");
  t.k_begin = ints;
  EXPECT_TRUE(host::validate_tensors(ranged_problem(), t).ok());
  EXPECT_STREQ(host::validate_tensors(paged_problem(), t).message(),
               "k_begin is set; it must be null because has_k_begin is false");
  t.k_begin = nullptr;
  t.block_table = ints;
  EXPECT_TRUE(host::validate_tensors(paged_problem(), t).ok());
  t.mask_shift = ints;
  EXPECT_STREQ(host::validate_tensors(paged_problem(), t).message(),
               "mask_shift is set; it must be null because has_mask_shift is false");
}

// Windows that hide nothing from the bottom right may hide something elsewhere, and a causal mask
// that is moved ends somewhere else than at the last key.
TEST(KeyPlaces, ShiftedMasksStayWindows) {
  ForwardProblem p = packed_problem();
  p.window_left = 4000;
  p.window_right = 0;
  EXPECT_EQ(mask_kind(host::canonical(p)), MaskKind::causal);
  p.has_mask_shift = true;
  EXPECT_EQ(host::canonical(p).window_left, 4000);
  EXPECT_EQ(mask_kind(host::canonical(p)), MaskKind::window);
  p.window_left = kUnbounded;
  EXPECT_EQ(mask_kind(host::canonical(p)), MaskKind::window);
  p.window_right = kUnbounded;
  EXPECT_EQ(mask_kind(host::canonical(p)), MaskKind::full);
}

TEST(KeyPlaces, CpuServesThemAndNoBackwardOfPages) {
  ForwardProblem ranged = ranged_problem();
  ranged.has_mask_shift = true;
  for (const ForwardProblem& p : {ranged, paged_problem()}) {
    ForwardPlan forward;
    EXPECT_TRUE(plan_forward(p, cpu_device(), PlanOptions(), &forward).ok());
    BackwardProblem problem = backward_problem(p);
    BackwardPlan backward;
    const Status status = plan_backward(problem, cpu_device(), PlanOptions(), &backward);
    EXPECT_EQ(status.ok(), p.page_size == 0);
    if (p.page_size > 0) {
      EXPECT_NE(std::string(status.message()).find("does not serve keys in pages (block_table)"),
                std::string::npos)
          << status.message();
    }
  }
}

KernelInfo gpu_row(Backend backend, MaskKind mask) {
  return KernelInfo{"row", backend, Pass::forward, DType::bf16, 128, 128, mask, true, {}};
}

// The texts of the kernels that a plan has compiled.
template <class Configure, class List>
std::string text_of(const ForwardProblem& problem, const KernelInfo& row, const DeviceProps& device,
                    Configure configure, List list) {
  ForwardPlan plan;
  plan.problem = host::canonical(problem);
  plan.device = device;
  plan.kernel = &row;
  configure(&plan);
  std::vector<jit::Request> requests;
  EXPECT_TRUE(list(plan, &requests).ok());
  return requests.size() == 1 ? requests[0].source : "";
}

TEST(KeyPlaces, GpuKernelsAreCompiledForTheirSource) {
  ForwardProblem shifted = ranged_problem();
  shifted.has_mask_shift = true;
  const struct {
    ForwardProblem problem;
    const char* source;
  } cases[] = {{packed_problem(), nullptr},
               {ranged_problem(), "KeySource{true, false, false}"},
               {shifted, "KeySource{true, false, true}"},
               {paged_problem(), "KeySource{false, true, false}"}};
  const KernelInfo hopper_row = gpu_row(Backend::hopper, MaskKind::full);
  const KernelInfo ampere_row = gpu_row(Backend::ampere, MaskKind::full);
  for (const auto& c : cases) {
    const std::string texts[] = {
        text_of(c.problem, hopper_row, h100(), hopper::configure_forward,
                [](const ForwardPlan& plan, std::vector<jit::Request>* requests) {
                  return hopper::list_kernels(plan, requests);
                }),
        text_of(c.problem, ampere_row, a100(), ampere::configure_forward,
                [](const ForwardPlan& plan, std::vector<jit::Request>* requests) {
                  return ampere::list_kernels(plan, requests);
                })};
    for (const std::string& text : texts) {
      EXPECT_EQ(text.empty(), c.source == nullptr) << text;
      if (c.source != nullptr) {
        EXPECT_NE(text.find(c.source), std::string::npos) << text;
      }
    }
  }
}

Expression parsed(ExpressionKind kind, const char* text) {
  Expression expression = Expression::none;
  EXPECT_TRUE(parse_expression(kind, text, nullptr, 0, &expression).ok());
  return expression;
}

// A mask or a score is a type of the kernel's text beside the place of the keys.
TEST(KeyPlaces, GpuKernelsHaveMasksAndScoresBesideTheirSource) {
  const std::string hopper_ends[] = {"SpanWalk, KeySource{false, true, true}>",
                                     "ListWalk<attn::StoredMask<8, false>, "
                                     "KeySource{false, true, true}>, "
                                     "KeySource{false, true, true}>"};
  for (const bool stored : {false, true}) {
    ForwardProblem p = paged_problem();
    p.has_mask_shift = true;
    p.window_right = 0;
    p.variant.score = parsed(ExpressionKind::score, "s + j - i");
    if (!stored) {
      p.variant.mask_expression = parsed(ExpressionKind::mask, "(i + j) % 3 == 0");
    } else {
      p.variant.has_prefix = true;
      p.variant.mask_prefixes = 1;
      p.variant.mask_clauses = kMaskPrefix;
    }
    const ForwardProblem canonical = host::canonical(p);
    EXPECT_EQ(mask_kind(canonical), MaskKind::window);
    const KernelInfo hopper_row = gpu_row(Backend::hopper, MaskKind::window);
    const KernelInfo ampere_row = gpu_row(Backend::ampere, MaskKind::window);
    EXPECT_TRUE(hopper::accept_forward(hopper_row, canonical, h100()).ok());
    EXPECT_TRUE(ampere::accept_forward(ampere_row, canonical, a100()).ok());
    const std::string hopper_text =
        text_of(p, hopper_row, h100(), hopper::configure_forward,
                [](const ForwardPlan& plan, std::vector<jit::Request>* requests) {
                  return hopper::list_kernels(plan, requests);
                });
    const std::string ampere_text =
        text_of(p, ampere_row, a100(), ampere::configure_forward,
                [](const ForwardPlan& plan, std::vector<jit::Request>* requests) {
                  return ampere::list_kernels(plan, requests);
                });
    const std::string hooks =
        stored ? "Variant = attn::UserScore;" : "attn::Both<attn::UserScore, attn::UserMask>";
    for (const std::string& part : {hooks, hopper_ends[stored ? 1 : 0]}) {
      EXPECT_NE(hopper_text.find(part), std::string::npos) << part << "\n" << hopper_text;
    }
    EXPECT_NE(ampere_text.find("KeySource{false, true, true}>"), std::string::npos) << ampere_text;
    EXPECT_EQ(
        ampere_text.find("attn::MaskedPairs<attn::StoredMask<8, false>>") != std::string::npos,
        stored)
        << ampere_text;
  }
}

// Pages that TMA cannot copy go to Ampere kernels, on an H100 too, whatever the build holds.
TEST(KeyPlaces, PagesOfOddSizesGoToAmpereKernels) {
  ForwardProblem p = paged_problem();
  p.page_size = 8;
  p.max_pages = 128;
  p.table_stride = 128;
  const ForwardProblem odd = host::canonical(p);
  EXPECT_STREQ(
      hopper::accept_forward(gpu_row(Backend::hopper, MaskKind::full), odd, h100()).message(),
      "needs page_size to be a multiple of 16, it is 8");
  EXPECT_TRUE(ampere::accept_forward(gpu_row(Backend::ampere, MaskKind::full), odd, h100()).ok());
  const ForwardProblem even = host::canonical(paged_problem());
  EXPECT_TRUE(hopper::accept_forward(gpu_row(Backend::hopper, MaskKind::full), even, h100()).ok());
  p = paged_problem();
  p.k.batch = p.v.batch = 0;
  EXPECT_STREQ(
      hopper::accept_forward(gpu_row(Backend::hopper, MaskKind::full), host::canonical(p), h100())
          .message(),
      "needs pages that are not expanded");
}

// What TMA and 16-byte stores can write: any order of the axes.
TEST(KeyPlaces, GpuKernelsWriteAnyOrderOfAxes) {
  ForwardProblem p = forward_problem();
  const std::int64_t n = p.seqlen_q, h = p.heads_q, d = p.head_dim, b = p.batch;
  const Layout layouts[] = {{n * h * d, d, n * d, 16},  // [b, h, s, d]
                            {d, b * h * d, b * d, 16},  // [s, h, b, d]
                            {n * d, d, b * n * d, 16},  // [h, b, s, d]
                            {n * (h * d + 8), h * d + 8, d, 16}};
  for (const Layout& layout : layouts) {
    p.o = layout;
    EXPECT_TRUE(host::validate(p).ok());
    EXPECT_TRUE(hopper::accept_forward(gpu_row(Backend::hopper, MaskKind::full), p, h100()).ok());
    EXPECT_TRUE(ampere::accept_forward(gpu_row(Backend::ampere, MaskKind::full), p, a100()).ok());
    BackwardProblem backward = backward_problem();
    backward.grad_q = layout;
    EXPECT_TRUE(host::validate(backward).ok());
    const KernelInfo row{"row", Backend::hopper, Pass::backward, DType::bf16, 128,
                         128,   MaskKind::full,  true,           {}};
    EXPECT_TRUE(hopper::accept_backward(row, host::canonical(backward), h100()).ok());
  }
}

}  // namespace
}  // namespace pantile::testing
