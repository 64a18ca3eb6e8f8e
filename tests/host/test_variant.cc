// Rules of variants: each bad field and pointer with its exact message, the canonical form, and who
// serves them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "host/features.h"
#include "host/shape.h"
#include "host/validate.h"
#include "problems.h"

namespace pantile::testing {
namespace {

ForwardProblem with_bias() {
  ForwardProblem p = forward_problem();
  p.variant.has_bias = true;
  p.variant.bias = BiasLayout{8LL << 20, 1 << 20, 1 << 10, 16};
  return p;
}

TEST(VariantRules, NameFieldValueAndRule) {
  struct Bad {
    void (*spoil)(ForwardProblem*);
    const char* message;
  };
  const Bad bad[] = {
      {[](ForwardProblem* p) { p->variant.softcap = -1.5f; },
       "softcap is -1.5; it must be finite, and positive, or 0 for none"},
      {[](ForwardProblem* p) { p->variant.softcap = std::numeric_limits<float>::infinity(); },
       "softcap is inf; it must be finite, and positive, or 0 for none"},
      {[](ForwardProblem* p) { p->variant.alibi_by_batch = true; },
       "alibi_by_batch is true; it must be false without has_alibi"},
      {[](ForwardProblem* p) { p->variant.bias_dtype = DType::f16; },
       "bias_dtype is f16; it must be f32 or the dtype of q, bf16"},
      {[](ForwardProblem* p) { p->variant.bias.base_align_bytes = 12; },
       "bias.base_align_bytes is 12; it must be a power of two of at least 2"},
      {[](ForwardProblem* p) { p->variant.bias.head = -1; },
       "bias: stride along head is -1; it must be 0 or more"},
      {[](ForwardProblem* p) { p->variant.bias.query = std::int64_t{1} << 50; },
       "bias: stride along query is 1125899906842624; with 1024 elements on that axis the tensor "
       "spans more than 2^58 elements"},
      {[](ForwardProblem* p) { p->variant.dropout = 256; },
       "dropout is 256; it must be from 0 to 255"},
      {[](ForwardProblem* p) { p->variant.dropout = -1; },
       "dropout is -1; it must be from 0 to 255"},
      {[](ForwardProblem* p) { p->variant.batch_offset = -1; },
       "batch_offset is -1; it must be from 0 to 4294967294"},
      {[](ForwardProblem* p) { p->variant.head_offset = 4294967289; },
       "head_offset is 4294967289; it must be from 0 to 4294967288"},
      {[](ForwardProblem* p) { p->variant.query_offset = 4294966273; },
       "query_offset is 4294966273; it must be from 0 to 4294966272"},
      {[](ForwardProblem* p) { p->variant.key_offset = std::int64_t{1} << 40; },
       "key_offset is 1099511627776; it must be from 0 to 4294966272"},
  };
  EXPECT_TRUE(host::validate(with_bias()).ok());
  for (const Bad& b : bad) {
    ForwardProblem p = with_bias();
    b.spoil(&p);
    EXPECT_STREQ(host::validate(p).message(), b.message);
    EXPECT_STREQ(host::validate(backward_problem(p)).message(), b.message);
  }
}

TEST(VariantRules, OfMasks) {
  struct Bad {
    void (*spoil)(ForwardProblem*);
    const char* message;
  };
  const Bad bad[] = {
      {[](ForwardProblem* p) { p->variant.has_block_mask = true; },
       "mask_block_size is 0; it must be 64 or 128"},
      {[](ForwardProblem* p) { p->variant.mask_block_size = 64; },
       "mask_block_size is 64; it must be 0 without has_block_mask"},
      {[](ForwardProblem* p) { p->variant.mask_clauses = kMaskPrefix; },
       "mask_clauses is 0x8; it must be 0, or up to 6 clauses of 4 bits that name the forms of the "
       "mask, 0x0"},
      {[](ForwardProblem* p) {
         p->variant.has_prefix = p->variant.has_documents = true;
         p->variant.mask_clauses = kMaskPrefix;
       },
       "mask_clauses is 0x8; it must be 0, or up to 6 clauses of 4 bits that name the forms of the "
       "mask, 0xc"},
      {[](ForwardProblem* p) {
         p->variant.has_prefix = p->variant.has_documents = true;
         p->variant.mask_clauses = kMaskPrefix | kMaskDocuments << 8;
       },
       "mask_clauses is 0x408; it must be 0, or up to 6 clauses of 4 bits that name the forms of "
       "the mask, 0xc"},
      {[](ForwardProblem* p) {
         p->variant.has_prefix = true;
         p->variant.mask_prefixes = -1;
       },
       "mask_prefixes: stride along batch is -1; it must be 0 or more"},
  };
  EXPECT_TRUE(host::validate(with_bias()).ok());
  for (const Bad& b : bad) {
    ForwardProblem p = with_bias();
    b.spoil(&p);
    EXPECT_STREQ(host::validate(p).message(), b.message);
    EXPECT_STREQ(host::validate(backward_problem(p)).message(), b.message);
  }
}

TEST(VariantRules, GradientsNeedTheirTensor) {
  BackwardProblem p = backward_problem(with_bias());
  p.wants_grad_bias = true;
  EXPECT_TRUE(host::validate(p).ok());
  p.wants_grad_sinks = true;
  EXPECT_STREQ(host::validate(p).message(),
               "wants_grad_sinks is true; it must be false without has_sinks");
  p.forward.variant.has_sinks = true;
  p.wants_grad_alibi = true;
  EXPECT_STREQ(host::validate(p).message(),
               "wants_grad_alibi is true; it must be false without has_alibi");
}

// Pointers of all tensors of forward_problem(); nothing is read.
struct Pointers {
  alignas(16) char memory[64];
  ForwardTensors tensors() {
    ForwardTensors t;
    t.q = t.k = t.v = t.o = memory;
    t.lse = reinterpret_cast<float*>(memory);
    return t;
  }
};

TEST(VariantRules, PointersAreThereWhenWanted) {
  Pointers pointers;
  ForwardProblem p = with_bias();
  p.variant.has_alibi = p.variant.has_sinks = true;
  p.variant.dropout = 3;
  ForwardTensors t = pointers.tensors();
  auto* floats = reinterpret_cast<float*>(pointers.memory);
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "alibi_slopes is null; it must be set because has_alibi is true");
  t.variant.alibi_slopes = floats;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "sinks is null; it must be set because has_sinks is true");
  t.variant.sinks = floats;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "bias is null; it must be set because has_bias is true");
  t.variant.bias = pointers.memory;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "dropout_seed is null; it must be set because dropout is 3");
  t.variant.dropout_seed = reinterpret_cast<std::int64_t*>(pointers.memory);
  EXPECT_TRUE(host::validate_tensors(p, t).ok());
  p.variant.dropout = 0;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "dropout_seed is set; it must be null because dropout is 0");
  t.variant.dropout_seed = nullptr;
  p.variant.has_sinks = false;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "sinks is set; it must be null because has_sinks is false");
  p.variant.has_sinks = true;
  t.variant.bias = pointers.memory + 8;
  const std::string message = host::validate_tensors(p, t).message();
  EXPECT_NE(message.find("its address must be a multiple of 16 bytes"), std::string::npos);
}

TEST(VariantRules, GradientPointersAreThereWhenWanted) {
  Pointers pointers;
  BackwardProblem p = backward_problem(with_bias());
  BackwardTensors t;
  t.forward = pointers.tensors();
  t.forward.variant.bias = pointers.memory;
  t.grad_o = t.grad_q = t.grad_k = t.grad_v = pointers.memory;
  EXPECT_TRUE(host::validate_tensors(p, t).ok());
  p.wants_grad_bias = true;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "grad_bias is null; it must be set because wants_grad_bias is true");
  t.variant.bias = reinterpret_cast<float*>(pointers.memory);
  EXPECT_TRUE(host::validate_tensors(p, t).ok());
  t.variant.sinks = t.variant.bias;
  EXPECT_STREQ(host::validate_tensors(p, t).message(),
               "grad_sinks is set; it must be null because wants_grad_sinks is false");
}

TEST(VariantRules, CanonicalFormDropsWhatCannotMatter) {
  ForwardProblem p = with_bias();
  p.batch = p.heads_k = p.heads_q = p.seqlen_q = 1;
  set_contiguous(&p);
  p.variant.has_alibi = p.variant.alibi_by_batch = true;
  p.variant.head_offset = p.variant.key_offset = 5;
  Variant v = host::canonical(p).variant;
  EXPECT_FALSE(v.alibi_by_batch);
  EXPECT_EQ(v.bias.batch, 0);
  EXPECT_EQ(v.bias.head, 0);
  EXPECT_EQ(v.bias.query, 0);
  EXPECT_EQ(v.head_offset, 0);
  EXPECT_EQ(v.key_offset, 0);
  p.variant.dropout = 1;
  EXPECT_EQ(host::canonical(p).variant.key_offset, 5);
  p.variant.has_bias = false;
  p.variant.bias_dtype = DType::f32;
  v = host::canonical(p).variant;
  EXPECT_EQ(v.bias_dtype, Variant().bias_dtype);
  EXPECT_EQ(v.bias.base_align_bytes, BiasLayout().base_align_bytes);
}

TEST(VariantRules, MasksWithoutWhatCannotMatter) {
  ForwardProblem p = forward_problem();
  p.variant.mask = p.variant.block_mask = MaskLayout{4, 5, 6};
  p.variant.mask_queries = p.variant.mask_keys = p.variant.mask_prefixes = 7;
  const Variant none = host::canonical(p).variant;
  EXPECT_EQ(none.mask.batch + none.mask.head + none.mask.query, 0);
  EXPECT_EQ(none.block_mask.batch + none.block_mask.head + none.block_mask.query, 0);
  EXPECT_EQ(none.mask_queries + none.mask_keys + none.mask_prefixes, 0);
  p.variant.has_prefix = p.variant.has_documents = true;
  p.variant.mask_clauses = kMaskPrefix | kMaskDocuments;
  const Variant two = host::canonical(p).variant;
  EXPECT_EQ(two.mask_keys, 7);
  EXPECT_EQ(two.mask_prefixes, 7);
  EXPECT_EQ(two.mask_clauses, 0u);
  EXPECT_EQ(mask_clauses(two), kMaskPrefix | kMaskDocuments);
  p.variant.mask_clauses = kMaskPrefix | kMaskDocuments << 4;
  EXPECT_EQ(host::canonical(p).variant.mask_clauses, 0x48u);
  p.batch = 1;
  EXPECT_EQ(host::canonical(p).variant.mask_prefixes, 0);
}

TEST(VariantRules, ShapeOfTheGradientOfTheBias) {
  ForwardProblem p = with_bias();
  EXPECT_EQ(bias_gradient_shape(p).count(), 2LL * 8 * 1024 * 1024);
  p.variant.bias.head = 0;
  p.variant.bias.query = 0;
  const BiasShape shape = bias_gradient_shape(p);
  EXPECT_EQ(shape.batch, 2);
  EXPECT_EQ(shape.heads, 1);
  EXPECT_EQ(shape.queries, 1);
  EXPECT_EQ(shape.keys, 1024);
}

// Without queries, or sequences, gradients of the variant's tensors are still written.
TEST(VariantRules, GradientsAreWrittenWithoutQueries) {
  BackwardProblem p = backward_problem();
  p.forward.batch = 0;
  EXPECT_TRUE(host::writes_nothing(p));
  p.forward.variant.has_sinks = p.wants_grad_sinks = true;
  EXPECT_FALSE(host::writes_nothing(p));
  p.forward.heads_q = p.forward.heads_k = 0;
  EXPECT_TRUE(host::writes_nothing(p));
}

TEST(VariantRules, RowsOfTheCpuServeThem) {
  for (int i = 0; i < kernel_count(); ++i) {
    const KernelInfo& row = kernel_info(i);
    const bool on_cpu = row.backend == Backend::cpu || row.backend == Backend::reference;
    if (row.pass == Pass::decode || row.pass == Pass::append) {
      continue;  // they have sinks and softcap (test_kv.cc)
    }
    const bool serves = on_cpu && row.dtype != DType::e4m3 && row.pass != Pass::quantize;
    for (const Feature feature :
         {Feature::softcap, Feature::alibi, Feature::sinks, Feature::bias, Feature::dropout}) {
      if (on_cpu) {
        EXPECT_EQ(row.features.has(feature), serves) << row.name;
      }
    }
    for (const Feature feature : {Feature::grad_alibi, Feature::grad_sinks, Feature::grad_bias}) {
      if (on_cpu) {
        EXPECT_EQ(row.features.has(feature), serves && row.pass == Pass::backward) << row.name;
      }
    }
  }
}

TEST(VariantRules, OthersRefuseByName) {
  ForwardProblem p = forward_problem();
  p.dtype = DType::e4m3;
  p.variant.softcap = 2.0f;
  p.variant.dropout = 4;
  PlanOptions options;
  options.backend = Backend::cpu;
  ForwardPlan plan;
  const Status status = plan_forward(p, cpu_device(), options, &plan);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(std::string(status.message()).find("does not serve softcap, dropout"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace pantile::testing
