// Decode and append problems: what is refused and in which words, plans, and contents of arrays.
#include "pantile/kv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host/shape.h"
#include "problems.h"

namespace pantile::testing {
namespace {

using Change = std::function<void(KvProblem*)>;

KvProblem kv_problem() {
  KvProblem p;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_k = 2;
  p.head_dim = p.head_dim_v = 64;
  p.seqlen_q = p.seqlen_new = 1;
  p.blocks = 10;
  p.page_size = 16;
  p.table_rows = 2;
  p.table_pages = p.table_stride = 5;
  p.window_right = 0;
  p.scale = 0.125f;
  p.q = p.o = p.q_rotated = Layout{512, 512, 64, 16};
  p.k_new = p.v_new = Layout{128, 128, 64, 16};
  p.k = p.v = CacheLayout{2048, 128, 64, 16};
  return p;
}

std::string decode_refusal(const Change& change) {
  KvProblem p = kv_problem();
  change(&p);
  DecodePlan plan;
  return plan_decode(p, cpu_device(), {}, &plan).message();
}

std::string append_refusal(const Change& change) {
  KvProblem p = kv_problem();
  change(&p);
  AppendPlan plan;
  return plan_append(p, cpu_device(), {}, &plan).message();
}

TEST(Kv, WrongFieldsOfTheCacheAreNamedByBoth) {
  for (const auto& refusal : {decode_refusal, append_refusal}) {
    EXPECT_EQ(refusal([](KvProblem*) {}), "");
    EXPECT_EQ(refusal([](KvProblem* p) { p->dtype = DType::e4m3; }),
              "dtype is e4m3 (3); it must be f32 (0), f16 (1) or bf16 (2)");
    EXPECT_EQ(refusal([](KvProblem* p) { p->head_dim = 577; }),
              "head_dim is 577; it must be from 1 to 576");
    EXPECT_EQ(refusal([](KvProblem* p) { p->heads_q = 7; }),
              "heads_q is 7 and heads_k is 2; heads_q must be a positive multiple of heads_k, or "
              "both 0");
    EXPECT_EQ(refusal([](KvProblem* p) {
                p->v_in_k = true;
                p->head_dim_v = 65;
              }),
              "head_dim_v is 65; with v_in_k it must be at most head_dim, 64");
    EXPECT_EQ(refusal([](KvProblem* p) { p->table_rows = 1; }),
              "table_rows is 1; without cache_index it must be at least batch, 2");
    EXPECT_EQ(refusal([](KvProblem* p) { p->block_slots = 4; }),
              "block_slots is 4; it must be 0 when page_size is set");
    EXPECT_EQ(refusal([](KvProblem* p) { p->table_stride = 4; }),
              "table_stride is 4; it must be at least table_pages, 5");
    EXPECT_EQ(refusal([](KvProblem* p) { p->table_pages = p->table_stride = 1 << 26; }),
              "table_pages is 67108864 and page_size 16; their product must be at most 536870911");
    EXPECT_EQ(refusal([](KvProblem* p) { p->format = CacheFormat::int8; }),
              "scale_kind is none; a cache of format int8 needs token");
    EXPECT_EQ(refusal([](KvProblem* p) { p->scale_kind = CacheScale::head; }),
              "scale_kind is head; a cache of format plain needs none");
    EXPECT_EQ(refusal([](KvProblem* p) { p->k.slot = -2; }),
              "k: stride along slot is -2; it must be 0 or more");
    EXPECT_EQ(refusal([](KvProblem* p) { p->v.base_align_bytes = 1; }),
              "v.base_align_bytes is 1; it must be a power of two of at least 2");
  }
}

TEST(Kv, WrongFieldsOfDecodeAreNamed) {
  EXPECT_EQ(decode_refusal([](KvProblem* p) { p->scale = std::nanf(""); }),
            "scale is nan; it must be finite");
  EXPECT_EQ(decode_refusal([](KvProblem* p) { p->softcap = -1.0f; }),
            "softcap is -1; it must be 0 (none) or positive and finite");
  EXPECT_EQ(decode_refusal([](KvProblem* p) { p->split_keys = 64; }),
            "split_keys is 64; it must be 0 unless split is fixed");
  EXPECT_EQ(decode_refusal([](KvProblem* p) {
              p->split = KvSplit::fixed;
              p->split_keys = 96;
            }),
            "split_keys is 96; it must be a positive multiple of 64");
  EXPECT_EQ(decode_refusal([](KvProblem* p) {
              p->has_tree_mask = true;
              p->seqlen_q = 65;
            }),
            "seqlen_q is 65; with a tree mask it must be at most 64");
  EXPECT_EQ(decode_refusal([](KvProblem* p) {
              p->has_tree_mask = true;
              p->window_left = 3;
            }),
            "window_left is 3; with a tree mask it must be -1");
  EXPECT_EQ(decode_refusal([](KvProblem* p) { p->total_q = 3; }),
            "total_q is 3; unless packed it must be 0 or batch * seqlen_q, 2");
  EXPECT_EQ(decode_refusal([](KvProblem* p) { p->o.head = 0; }),
            "o: stride along head is 0; it must be at least 64, or its elements overlap");
}

TEST(Kv, WrongFieldsOfAppendAreNamed) {
  EXPECT_EQ(append_refusal([](KvProblem* p) { p->scale = std::nanf(""); }), "");  // not read
  EXPECT_EQ(append_refusal([](KvProblem* p) { p->rotary_dim = 66; }),
            "rotary_dim is 66; it must be even and from 0 to head_dim, 64");
  EXPECT_EQ(append_refusal([](KvProblem* p) { p->rotates_q = true; }),
            "rotates_q is true; it needs rotary_dim > 0");
  EXPECT_EQ(append_refusal([](KvProblem* p) {
              p->rotary_dim = 64;
              p->rotary_dtype = DType::f16;
              p->rotary_positions = 9;
            }),
            "rotary_dtype is f16; it must be f32 or dtype, bf16");
  EXPECT_EQ(append_refusal([](KvProblem* p) { p->rotary_dim = 64; }),
            "rotary_positions is 0; it must be from 1 to 2147483647");
  EXPECT_EQ(append_refusal([](KvProblem* p) { p->k.slot = 64; }),
            "k: stride along head is 64; it must be at least 1024, or its elements overlap");
}

TEST(Kv, CanonicalProblemsKeepWhatTheirPassReads) {
  KvProblem p = kv_problem();
  p.rotary_dim = 64;
  p.rotary_positions = 9;
  p.window_left = 79;
  const KvProblem decode = host::canonical_decode(p);
  EXPECT_EQ(decode.rotary_dim, 0);
  EXPECT_EQ(decode.window_left, kUnbounded);   // a sequence has 80 slots
  EXPECT_EQ(decode.window_right, kUnbounded);  // one query
  EXPECT_EQ(decode.k_new.head, -1);
  EXPECT_EQ(decode.total_q, 2);
  p.window_left = 78;
  EXPECT_EQ(host::canonical_decode(p).window_left, 78);
  const KvProblem append = host::canonical_append(p);
  EXPECT_EQ(append.rotary_dim, 64);
  EXPECT_EQ(append.seqlen_q, 0);
  EXPECT_EQ(append.scale, 1.0f);
  EXPECT_EQ(append.total_new, 2);
}

TEST(Kv, RowsRefuseByName) {
  KvProblem p = kv_problem();
  p.format = CacheFormat::int8;
  p.scale_kind = CacheScale::token;
  KernelInfo row{};
  row.name = "row";
  row.features = FeatureSet{Feature::paged};
  std::vector<Verdict> verdicts(static_cast<std::size_t>(kernel_count()));
  const int count =
      explain_decode(p, cpu_device(), {}, verdicts.data(), static_cast<int>(verdicts.size()));
  int chosen = 0;
  for (int i = 0; i < count; ++i) {
    const Verdict& verdict = verdicts[static_cast<std::size_t>(i)];
    EXPECT_EQ(verdict.kernel->pass, Pass::decode);
    chosen += verdict.chosen ? 1 : 0;
    EXPECT_EQ(verdict.chosen, std::string(verdict.kernel->name) == "cpu_decode_bf16");
  }
  EXPECT_EQ(chosen, 1);
  DecodePlan plan;
  PlanOptions options;
  options.backend = Backend::reference;
  ASSERT_TRUE(plan_decode(p, cpu_device(), options, &plan).ok());
  EXPECT_STREQ(plan.kernel->name, "reference_decode_bf16");
}

TEST(Kv, PlansOfAnotherTableAreRefused) {
  DecodePlan plan;
  ASSERT_TRUE(plan_decode(kv_problem(), cpu_device(), {}, &plan).ok());
  KernelInfo copy = *plan.kernel;
  plan.kernel = &copy;
  EXPECT_STREQ(run_decode(plan, {}, nullptr, nullptr).message(),
               "plan.kernel is not a row of the decode kernels; make the plan with plan_decode");
}

// 2 sequences of up to 80 slots in pages of 16.
struct Arrays {
  std::vector<std::int32_t> lengths = {20, 79};
  std::vector<std::int32_t> table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<std::int32_t> index = {1, 0};
  std::vector<std::int32_t> leftpad = {0, 3};

  std::string refusal(bool indexed = false, bool padded = false) const {
    KvProblem p = kv_problem();
    KvTensors t;
    t.lengths = lengths.data();
    t.block_table = table.data();
    p.has_cache_index = indexed;
    t.cache_index = indexed ? index.data() : nullptr;
    p.has_leftpad = padded;
    t.leftpad = padded ? leftpad.data() : nullptr;
    return check_cache(p, t).message();
  }
};

TEST(Kv, ContentsAreChecked) {
  EXPECT_EQ(Arrays().refusal(true, true), "");
  Arrays wrong;
  wrong.lengths = {20, 80};
  EXPECT_EQ(wrong.refusal(),
            "lengths[1] is 80 and 1 keys are new; it must be 0 or more, and the sum at most 80, "
            "the slots of a sequence");
  wrong.lengths = {-1, 3};
  EXPECT_EQ(wrong.refusal().substr(0, 16), "lengths[0] is -1");
  wrong = Arrays();
  wrong.table[1] = 10;
  EXPECT_EQ(wrong.refusal(),
            "block_table[0, 1] is 10; sequence 0 uses that page, so it must be from 0 to 9");
  wrong.table[1] = 1;
  wrong.table[2] = -7;  // sequence 0 has 21 slots
  EXPECT_EQ(wrong.refusal(), "");
  wrong = Arrays();
  wrong.index[0] = 2;
  EXPECT_EQ(wrong.refusal(true), "cache_index[0] is 2; it must be from 0 to 1");
  wrong.leftpad[1] = 81;
  EXPECT_EQ(wrong.refusal(false, true), "leftpad[1] is 81; it must be from 0 to 80");
}

}  // namespace
}  // namespace pantile::testing
