// Bad problems, each with its exact message. A message names the argument, its value and what is
// allowed; a rule that changes must change here too.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>

#include "host/validate.h"
#include "problems.h"

namespace pantile::testing {
namespace {

constexpr std::int64_t kBillion = 1000000000;

template <class Problem>
struct BadCase {
  const char* name;
  void (*spoil)(Problem* problem);
  const char* message;
};

template <class Problem>
void PrintTo(const BadCase<Problem>& bad, std::ostream* out) {
  *out << bad.name;
}

template <class Problem>
std::string case_name(const ::testing::TestParamInfo<BadCase<Problem>>& info) {
  return info.param.name;
}

using BadForward = BadCase<ForwardProblem>;

const BadForward kBadForward[] = {
    {"Dtype", [](ForwardProblem* p) { p->dtype = static_cast<DType>(9); },
     "dtype is 9; it must be f32 (0), f16 (1), bf16 (2) or e4m3 (3)"},
    {"BatchNegative", [](ForwardProblem* p) { p->batch = -1; },
     "batch is -1; it must be from 0 to 2147483647"},
    {"HeadsQNegative", [](ForwardProblem* p) { p->heads_q = -8; },
     "heads_q is -8; it must be from 0 to 2147483647"},
    {"HeadsKTooMany", [](ForwardProblem* p) { p->heads_k = 3 * kBillion; },
     "heads_k is 3000000000; it must be from 0 to 2147483647"},
    {"SeqlenQNegative", [](ForwardProblem* p) { p->seqlen_q = -1; },
     "seqlen_q is -1; it must be from 0 to 536870911"},
    {"SeqlenQTooLong", [](ForwardProblem* p) { p->seqlen_q = 1 << 29; },
     "seqlen_q is 536870912; it must be from 0 to 536870911"},
    {"SeqlenKTooLong", [](ForwardProblem* p) { p->seqlen_k = 1 << 29; },
     "seqlen_k is 536870912; it must be from 0 to 536870911"},
    {"HeadDimZero", [](ForwardProblem* p) { p->head_dim = 0; },
     "head_dim is 0; it must be from 1 to 512"},
    {"HeadDimTooLarge", [](ForwardProblem* p) { p->head_dim = 513; },
     "head_dim is 513; it must be from 1 to 512"},
    {"HeadDimVTooLarge", [](ForwardProblem* p) { p->head_dim_v = 600; },
     "head_dim_v is 600; it must be from 1 to 512"},
    {"Float32Precision",
     [](ForwardProblem* p) { p->float32_precision = static_cast<Float32Precision>(2); },
     "float32_precision is 2; it must be highest (0) or tf32 (1)"},
    {"HeadsDoNotDivide", [](ForwardProblem* p) { p->heads_k = 3; },
     "heads_q is 8 and heads_k is 3; heads_q must be a positive multiple of heads_k, or both 0"},
    {"HeadsKZero", [](ForwardProblem* p) { p->heads_k = 0; },
     "heads_q is 8 and heads_k is 0; heads_q must be a positive multiple of heads_k, or both 0"},
    {"HeadsQZero", [](ForwardProblem* p) { p->heads_q = 0; },
     "heads_q is 0 and heads_k is 2; heads_q must be a positive multiple of heads_k, or both 0"},
    {"TooMuchWork", [](ForwardProblem* p) { p->batch = kBillion; },
     "batch * heads_q is 8000000000; it must be at most 2147483647"},
    {"SoftmaxUnit", [](ForwardProblem* p) { p->softmax.unit = static_cast<SoftmaxUnit>(7); },
     "softmax.unit is 7; it must be automatic (0), vector (1) or tensor (2)"},
    {"SoftmaxMode", [](ForwardProblem* p) { p->softmax.mode = static_cast<SoftmaxMode>(3); },
     "softmax.mode is 3; it must be exact (0), surrogate (1) or fast_scale (2)"},
    {"SoftmaxModeNeedsTensor", [](ForwardProblem* p) { p->softmax.mode = SoftmaxMode::surrogate; },
     "softmax_mode is surrogate; it needs softmax = tensor, which is auto"},
    {"TensorShareOfThree",
     [](ForwardProblem* p) {
       p->softmax.unit = SoftmaxUnit::tensor;
       p->softmax.tensor_quarters = 3;
     },
     "tensor_quarters is 3; it must be 0, 1, 2 or 4, or -1 for automatic"},
    {"TensorShareNeedsTensor",
     [](ForwardProblem* p) {
       p->softmax.unit = SoftmaxUnit::vector;
       p->softmax.tensor_quarters = 2;
     },
     "tensor_share is 0.5; it needs softmax = tensor, which is vector"},
    {"TensorShareOfAMode",
     [](ForwardProblem* p) {
       p->softmax.unit = SoftmaxUnit::tensor;
       p->softmax.mode = SoftmaxMode::fast_scale;
       p->softmax.tensor_quarters = 4;
     },
     "tensor_share is 1; with softmax_mode = fast_scale it must be 0"},
    {"TensorSplit",
     [](ForwardProblem* p) {
       p->softmax.unit = SoftmaxUnit::tensor;
       p->softmax.split_rows = true;
     },
     "tensor_split is rows; it needs tensor_share = 0.5"},
    {"RescaleThresholdNegative", [](ForwardProblem* p) { p->softmax.rescale_threshold = -1.0f; },
     "rescale_threshold is -1; it must be from 0 to 15"},
    {"RescaleThresholdNan", [](ForwardProblem* p) { p->softmax.rescale_threshold = NAN; },
     "rescale_threshold is nan; it must be from 0 to 15"},
    {"RescaleThresholdOfSurrogate",
     [](ForwardProblem* p) {
       p->softmax.unit = SoftmaxUnit::tensor;
       p->softmax.mode = SoftmaxMode::surrogate;
       p->softmax.rescale_threshold = 4.0f;
     },
     "rescale_threshold is 4; with softmax_mode = surrogate it must be at least 8"},
    {"PMaxOffset", [](ForwardProblem* p) { p->softmax.p_max_offset = 8.0f; },
     "p_max_offset is 8; with rescale_threshold 8 it must be from 0 to 7"},
    {"MinExponent", [](ForwardProblem* p) { p->softmax.min_exponent_log2 = -200.0f; },
     "min_exponent_log2 is -200; it must be from -126 to 0"},
    {"DenseTotalQ", [](ForwardProblem* p) { p->total_q = 100; },
     "total_q is 100; for a dense tensor it must be 0 or batch * seqlen, 2048"},
    {"DenseTotalK", [](ForwardProblem* p) { p->total_k = 1024; },
     "total_k is 1024; for a dense tensor it must be 0 or batch * seqlen, 2048"},
    {"PackedTotalQNegative",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->total_q = -1;
     },
     "total_q is -1; it must be from 0 to 2147483647"},
    {"PackedTotalKTooMany",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->total_k = 3 * kBillion;
     },
     "total_k is 3000000000; it must be from 0 to 2147483647"},
    {"PackedRowsOfNoSequence",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->batch = 0;
     },
     "total_q is 2048; it must be 0 when batch is 0"},
    {"PackedLengthForgotten",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->seqlen_q = 0;
     },
     "max_seqlen_q (seqlen_q) is 0; with batch 2 and total_q 2048 it must be at least 1024"},
    {"PackedKeysLengthForgotten",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->seqlen_k = 0;
     },
     "max_seqlen_k (seqlen_k) is 0; with batch 2 and total_k 2048 it must be at least 1024"},
    {"PackedLengthBelowTheMean",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->batch = 3;
       p->seqlen_k = 682;
     },
     "max_seqlen_k (seqlen_k) is 682; with batch 3 and total_k 2048 it must be at least 683"},
    {"PackedLengthNegative",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->seqlen_k = -1;
     },
     "max_seqlen_k (seqlen_k) is -1; it must be from 0 to 536870911"},
    {"WindowLeft", [](ForwardProblem* p) { p->window_left = -2; },
     "window_left is -2; it must be 0 or more, or -1 for unbounded"},
    {"WindowRight", [](ForwardProblem* p) { p->window_right = -7; },
     "window_right is -7; it must be 0 or more, or -1 for unbounded"},
    {"ScaleNan", [](ForwardProblem* p) { p->scale = std::numeric_limits<float>::quiet_NaN(); },
     "scale is nan; it must be finite"},
    {"ScaleNotSet", [](ForwardProblem* p) { p->scale = ForwardProblem().scale; },
     "scale is nan; it must be finite"},
    {"LayoutOfQNotSet", [](ForwardProblem* p) { p->q = Layout(); },
     "q: stride along batch is -1; it must be 0 or more"},
    {"LayoutOfVNotSet", [](ForwardProblem* p) { p->v = ForwardProblem().v; },
     "v: stride along batch is -1; it must be 0 or more"},
    {"OneStrideOfKNotSet", [](ForwardProblem* p) { p->k.head = Layout().head; },
     "k: stride along head is -1; it must be 0 or more"},
    {"ScaleInfinite", [](ForwardProblem* p) { p->scale = -std::numeric_limits<float>::infinity(); },
     "scale is -inf; it must be finite"},
    {"AlignmentZero", [](ForwardProblem* p) { p->q.base_align_bytes = 0; },
     "q.base_align_bytes is 0; it must be a power of two of at least 2"},
    {"AlignmentNotPower", [](ForwardProblem* p) { p->k.base_align_bytes = 24; },
     "k.base_align_bytes is 24; it must be a power of two of at least 2"},
    {"AlignmentBelowElement",
     [](ForwardProblem* p) {
       p->dtype = DType::f32;
       p->v.base_align_bytes = 2;
     },
     "v.base_align_bytes is 2; it must be a power of two of at least 4"},
    {"OLowOfF32",
     [](ForwardProblem* p) {
       p->dtype = DType::f32;
       p->wants_o_low = true;
     },
     "wants_o_low is true; it must be false unless dtype is f16 or bf16, it is f32"},
    {"OLowOfE4m3",
     [](ForwardProblem* p) {
       p->dtype = DType::e4m3;
       p->wants_o_low = true;
     },
     "wants_o_low is true; it must be false unless dtype is f16 or bf16, it is e4m3"},
    {"OLowOfFloatOutput",
     [](ForwardProblem* p) {
       p->output_f32 = true;
       p->wants_o_low = true;
     },
     "wants_o_low is true; it must be false when output_f32 is true"},
    {"StrideNegative", [](ForwardProblem* p) { p->q.seq = -1024; },
     "q: stride along seq is -1024; it must be 0 or more"},
    {"StrideTooLong", [](ForwardProblem* p) { p->v.batch = std::int64_t{1} << 61; },
     "v: stride along batch is 2305843009213693952; with 2 elements on that axis the tensor spans "
     "more than 2^60 elements"},
    {"OutputExpanded", [](ForwardProblem* p) { p->o.head = 0; },
     "o: stride along head is 0; it must be at least 128, or its elements overlap"},
    {"OutputOverlaps", [](ForwardProblem* p) { p->o.seq = 1000; },
     "o: stride along seq is 1000; it must be at least 1024, or its elements overlap"},
    {"OutputBatchesOverlap", [](ForwardProblem* p) { p->o.batch = 1024 * 1024 - 1; },
     "o: stride along batch is 1048575; it must be at least 1048576, or its elements overlap"},
};

class ForwardRules : public ::testing::TestWithParam<BadForward> {};

TEST_P(ForwardRules, NamesArgumentValueAndRule) {
  ForwardProblem problem = forward_problem();
  GetParam().spoil(&problem);
  const Status status = host::validate(problem);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_STREQ(status.message(), GetParam().message);
  // The same text reaches the caller of plan_forward, and nothing was planned.
  ForwardPlan plan;
  EXPECT_STREQ(plan_forward(problem, cpu_device(), {}, &plan).message(), GetParam().message);
  EXPECT_EQ(plan.kernel, nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, ForwardRules, ::testing::ValuesIn(kBadForward),
                         case_name<ForwardProblem>);

using BadBackward = BadCase<BackwardProblem>;

const BadBackward kBadBackward[] = {
    {"ForwardRule", [](BackwardProblem* p) { p->forward.head_dim = 0; },
     "head_dim is 0; it must be from 1 to 512"},
    {"NoLse", [](BackwardProblem* p) { p->forward.wants_lse = false; },
     "forward.wants_lse is false; the backward needs the LSE of the forward"},
    {"MaxLogit", [](BackwardProblem* p) { p->forward.wants_max_logit = true; },
     "forward.wants_max_logit is true; it must be false in a backward problem"},
    {"OutputF32", [](BackwardProblem* p) { p->forward.output_f32 = true; },
     "forward.output_f32 is true; it must be false in a backward problem"},
    {"OLowWanted", [](BackwardProblem* p) { p->forward.wants_o_low = true; },
     "forward.wants_o_low is true; it must be false in a backward problem"},
    {"OLowOfF32",
     [](BackwardProblem* p) {
       p->forward.dtype = DType::f32;
       p->has_o_low = true;
     },
     "has_o_low is true; it must be false unless dtype is f16 or bf16, it is f32"},
    {"StatisticsWithoutDeterministic",
     [](BackwardProblem* p) { p->key_statistics = KeyStatistics::given; },
     "key_statistics is given; it must be own unless deterministic is true"},
    {"StatisticsOfAWindow",
     [](BackwardProblem* p) {
       p->deterministic = true;
       p->key_statistics = KeyStatistics::written;
       p->forward.window_right = 0;
     },
     "key_statistics is written, and the window is -1, 0; it must be unbounded, for "
     "statistics of all keys"},
    {"StatisticsUnknown",
     [](BackwardProblem* p) {
       p->deterministic = true;
       p->key_statistics = static_cast<KeyStatistics>(3);
     },
     "key_statistics is 3; it must be own (0), given (1) or written (2)"},
    {"GradOStride", [](BackwardProblem* p) { p->grad_o.head = -1; },
     "grad_o: stride along head is -1; it must be 0 or more"},
    {"GradQExpanded", [](BackwardProblem* p) { p->grad_q.batch = 0; },
     "grad_q: stride along batch is 0; it must be at least 128, or its elements overlap"},
    {"GradKAlignment", [](BackwardProblem* p) { p->grad_k.base_align_bytes = 1; },
     "grad_k.base_align_bytes is 1; it must be a power of two of at least 2"},
    {"GradVOverlaps", [](BackwardProblem* p) { p->grad_v.seq = 200; },
     "grad_v: stride along seq is 200; it must be at least 256, or its elements overlap"},
};

class BackwardRules : public ::testing::TestWithParam<BadBackward> {};

TEST_P(BackwardRules, NamesArgumentValueAndRule) {
  BackwardProblem problem = backward_problem();
  GetParam().spoil(&problem);
  const Status status = host::validate(problem);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_STREQ(status.message(), GetParam().message);
  BackwardPlan plan;
  EXPECT_STREQ(plan_backward(problem, cpu_device(), {}, &plan).message(), GetParam().message);
  EXPECT_EQ(plan.kernel, nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, BackwardRules, ::testing::ValuesIn(kBadBackward),
                         case_name<BackwardProblem>);

// The backward reads o: like any input it may be expanded along an axis.
TEST(BackwardLayouts, OutputOfTheForwardIsAnInput) {
  BackwardProblem problem = backward_problem();
  problem.forward.o.batch = 0;
  EXPECT_TRUE(host::validate(problem).ok());
  EXPECT_FALSE(host::validate(problem.forward).ok());
  problem.forward.o.seq = -1;
  EXPECT_STREQ(host::validate(problem).message(),
               "o: stride along seq is -1; it must be 0 or more");
}

// What must not be refused.
const BadForward kGoodForward[] = {
    {"Plain", [](ForwardProblem*) {}, ""},
    {"Packed", [](ForwardProblem* p) { *p = packed_problem(); }, ""},
    {"PackedQueriesOnly",
     [](ForwardProblem* p) {
       p->packed_q = true;
       p->total_q = 77;
     },
     ""},
    {"NothingAtAll",
     [](ForwardProblem* p) {
       p->batch = p->heads_q = p->heads_k = p->seqlen_q = p->seqlen_k = 0;
       p->q = p->k = p->v = p->o = Layout{};
     },
     ""},
    {"PackedNothing",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->batch = p->total_q = p->total_k = 0;
     },
     ""},
    {"PackedLengthOfTheMean",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->batch = 3;
       p->seqlen_q = p->seqlen_k = 683;
     },
     ""},
    {"PackedMostWork",
     [](ForwardProblem* p) {
       *p = packed_problem();
       p->heads_q = p->heads_k = 1;
       p->batch = p->total_q = p->total_k = (std::int64_t{1} << 31) - 1;
       p->seqlen_q = p->seqlen_k = (1 << 29) - 1;
     },
     ""},
    {"DenseTotalsStated", [](ForwardProblem* p) { p->total_q = p->total_k = 2048; }, ""},
    {"ExpandedInputs", [](ForwardProblem* p) { p->q.batch = p->k.head = p->v.seq = 0; }, ""},
    {"HeadsBeforeRows",
     [](ForwardProblem* p) { p->o = Layout{8 * 1024 * 128, 128, 1024 * 128, 16}; }, ""},
    {"StridesAbove2To31",
     [](ForwardProblem* p) { p->q.batch = p->o.batch = std::int64_t{1} << 40; }, ""},
    {"OddStrideOfSingleAxis",
     [](ForwardProblem* p) {
       p->batch = 1;
       p->o.batch = p->q.batch = -5;
     },
     ""},
    {"WindowWiderThanKeys", [](ForwardProblem* p) { p->window_left = 1LL << 40; }, ""},
    {"ZeroScale", [](ForwardProblem* p) { p->scale = 0.0f; }, ""},
    {"LongestSequence",
     [](ForwardProblem* p) {
       p->seqlen_q = p->seqlen_k = (1 << 29) - 1;
       set_contiguous(p);
     },
     ""},
    {"ManyHeads",
     [](ForwardProblem* p) {
       p->batch = 70000;
       p->seqlen_q = p->seqlen_k = 1;
       set_contiguous(p);
     },
     ""},
};

class ForwardRulesPass : public ::testing::TestWithParam<BadForward> {};

TEST_P(ForwardRulesPass, Accepts) {
  ForwardProblem problem = forward_problem();
  GetParam().spoil(&problem);
  const Status status = host::validate(problem);
  EXPECT_TRUE(status.ok()) << status.message();
  const Status backward = host::validate(backward_problem(problem));
  const bool expanded = std::string(GetParam().name) == "ExpandedInputs";
  EXPECT_EQ(backward.ok(), !expanded)
      << "gradients take the inputs' strides: " << backward.message();
}

INSTANTIATE_TEST_SUITE_P(All, ForwardRulesPass, ::testing::ValuesIn(kGoodForward),
                         case_name<ForwardProblem>);

TEST(DeviceRules, NameArgumentValueAndRule) {
  DeviceProps device = cpu_device();
  EXPECT_TRUE(host::validate(device).ok());
  device.threads = 0;
  EXPECT_STREQ(host::validate(device).message(), "device.threads is 0; it must be 1 or more");
  device = h100();
  EXPECT_TRUE(host::validate(device).ok());
  device.device.index = -1;
  EXPECT_STREQ(host::validate(device).message(), "device.index is -1; it must be 0 or more");
  device.device.type = static_cast<DeviceType>(7);
  EXPECT_STREQ(host::validate(device).message(),
               "device.type is 7; it must be cpu (0) or cuda (1)");
}

TEST(OptionRules, NameArgumentValueAndRule) {
  PlanOptions options;
  EXPECT_TRUE(host::validate(options).ok());
  options.backend = static_cast<Backend>(5);
  EXPECT_STREQ(host::validate(options).message(),
               "options.backend is 5; it must be auto (0), hopper (1), ampere (2), cpu (3) or "
               "reference (4)");
}

}  // namespace
}  // namespace pantile::testing
