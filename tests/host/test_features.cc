// Fields of problems and the features that they ask for: nothing is missed, and what a row does not
// list is refused by name.
#include "host/features.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "host/kernel_table.h"
#include "host/shape.h"
#include "pantile/fields.h"
#include "problems.h"

namespace pantile::testing {
namespace {

// The values of all fields, in order. A scale that is not set is NaN, which is unequal to itself.
template <class Problem>
std::vector<double> values(const Problem& problem) {
  constexpr double kNotSet = 1e300;
  std::vector<double> result;
  for_each_field(problem, [&](const char*, const char*, const auto& value, Feature) {
    const auto number = static_cast<double>(value);
    result.push_back(number == number ? number : kNotSet);
  });
  return result;
}

template <class Problem>
void change(Problem* problem, std::size_t number) {
  std::size_t at = 0;
  for_each_field(*problem, [&](const char*, const char*, auto& value, Feature) {
    using T = std::remove_reference_t<decltype(value)>;
    if (at++ == number) {
      if constexpr (std::is_same_v<T, bool>) {
        value = !value;
      } else if constexpr (std::is_enum_v<T>) {
        value = static_cast<T>(static_cast<int>(value) + 1);
      } else {
        value = value == value ? value + 1 : T{1};
      }
    }
  });
}

template <class Problem>
std::vector<std::string> names() {
  Problem problem;
  std::vector<std::string> result;
  for_each_field(problem, [&](const char* owner, const char* name, auto&, Feature) {
    result.push_back(std::string(owner) + "." + name);
  });
  return result;
}

// Each visited field is one of the problem's bytes, and none is visited twice.
template <class Problem>
void expect_every_field_once() {
  Problem problem;
  std::set<const void*> seen;
  std::size_t bytes = 0;
  for_each_field(problem, [&](const char*, const char* name, auto& value, Feature) {
    const char* const begin = reinterpret_cast<const char*>(&problem);
    const char* const address = reinterpret_cast<const char*>(&value);
    EXPECT_TRUE(address >= begin && address + sizeof value <= begin + sizeof problem) << name;
    EXPECT_TRUE(seen.insert(&value).second) << name;
    bytes += sizeof value;
  });
  const std::vector<std::string> all = names<Problem>();
  EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), all.size());
  // What is left is padding: less than 8 bytes behind each of the structs.
  EXPECT_LE(bytes, sizeof problem);
  EXPECT_LT(sizeof problem - bytes, 8 * seen.size() / 2);
  for (std::size_t i = 0; i < all.size(); ++i) {
    Problem changed;
    change(&changed, i);
    std::vector<double> before = values(Problem()), after = values(changed);
    EXPECT_NE(before[i], after[i]) << all[i];
    after[i] = before[i];
    EXPECT_EQ(before, after) << all[i];
  }
}

TEST(Fields, AreVisitedOnce) {
  expect_every_field_once<ForwardProblem>();
  expect_every_field_once<BackwardProblem>();
  expect_every_field_once<QuantizeProblem>();
  expect_every_field_once<KvProblem>();
}

TEST(Fields, CanonicalProblemsStayAsTheyAre) {
  for (ForwardProblem p : {forward_problem(), packed_problem()}) {
    p.window_left = 4000;
    p.q.batch = 77;
    EXPECT_EQ(values(host::canonical(host::canonical(p))), values(host::canonical(p)));
    const BackwardProblem backward = backward_problem(p);
    EXPECT_EQ(values(host::canonical(host::canonical(backward))),
              values(host::canonical(backward)));
  }
}

// Kernels of no GPU walk over tiles that such a mask names: a row that listed it would ignore it.
TEST(Features, GpuRowsThatServeMasksBesideTheWindow) {
  int serving = 0;
  for (int i = 0; i < kernel_count(); ++i) {
    const KernelInfo& row = kernel_info(i);
    if (row.backend == Backend::hopper || row.backend == Backend::ampere) {
      // Those that have hooks in weights and scores, or none.
      const bool hooks = row.features.has(Feature::dropout);
      serving += hooks ? 1 : 0;
      for (const Feature mask :
           {Feature::block_mask, Feature::element_mask, Feature::documents, Feature::prefix}) {
        EXPECT_EQ(row.features.has(mask), hooks) << row.name;
      }
    }
  }
  EXPECT_GT(serving, 60);
}

// Which fields ask for a feature. One that is new must be put here, or among those that have none
// because a rule of every family looks at them.
const std::map<std::string, Feature>& asking_fields() {
  static const std::map<std::string, Feature> asking = {
      {".packed_q", Feature::packed},
      {".packed_k", Feature::packed},
      {".has_seqused_q", Feature::seqused},
      {".has_seqused_k", Feature::seqused},
      {".has_k_begin", Feature::key_ranges},
      {".page_size", Feature::paged},
      {".has_mask_shift", Feature::mask_shift},
      {".wants_lse", Feature::lse},
      {".wants_max_logit", Feature::max_logit},
      {".output_f32", Feature::output_f32},
      {".wants_o_low", Feature::o_low},
      {"fp8.smooth_k", Feature::smooth_k},
      {".deterministic", Feature::deterministic},
      {".has_grad_lse", Feature::grad_lse},
      {".has_o_low", Feature::o_low},
      {".key_statistics", Feature::key_statistics},
      {".hadamard", Feature::hadamard},
      {".dequantize", Feature::dequantize},
      {".keep_rotation", Feature::dequantize},
      {"variant.softcap", Feature::softcap},
      {"variant.has_alibi", Feature::alibi},
      {"variant.alibi_by_batch", Feature::alibi},
      {"variant.has_sinks", Feature::sinks},
      {"variant.has_bias", Feature::bias},
      {"variant.dropout", Feature::dropout},
      {"variant.has_block_mask", Feature::block_mask},
      {"variant.has_element_mask", Feature::element_mask},
      {"variant.has_documents", Feature::documents},
      {"variant.score", Feature::score},
      {"variant.mask_expression", Feature::mask_expression},
      {"variant.has_prefix", Feature::prefix},
      {".wants_grad_alibi", Feature::grad_alibi},
      {".wants_grad_sinks", Feature::grad_sinks},
      {".wants_grad_bias", Feature::grad_bias},
      {".wants_grad_captured", Feature::grad_captured},
      // Of KvProblem. What an enumeration asks for depends on its value; here it is the default's,
      // which is not asked for.
      {".v_in_k", Feature::v_in_k},
      {".packed_new", Feature::packed},
      {".page_size", Feature::paged},
      {".has_cache_index", Feature::cache_index},
      {".has_leftpad", Feature::leftpad},
      {".format", Feature::cache_e4m3},
      {".scale_kind", Feature::scale_head},
      {".has_tree_mask", Feature::tree_mask},
      {".has_sinks", Feature::sinks},
      {".softcap", Feature::softcap},
      {".split", Feature::split_fixed},
      {".rotary_dim", Feature::rotary},
      {".rotary_interleaved", Feature::rotary},
      {".rotates_q", Feature::rotary},
  };
  return asking;
}

TEST(Features, AreAskedForByTheseFields) {
  const std::map<std::string, Feature>& asking = asking_fields();
  const auto check = [&](auto problem) {
    for_each_field(problem, [&](const char* owner, const char* name, auto& value, Feature feature) {
      const auto found = asking.find(std::string(owner) + "." + name);
      EXPECT_EQ(feature, found == asking.end() ? Feature::none : found->second) << name;
      using T = std::remove_reference_t<decltype(value)>;
      if constexpr (std::is_same_v<T, bool>) {
        const bool of_softmax = std::strcmp(owner, "softmax") == 0;
        EXPECT_TRUE(feature != Feature::none || of_softmax) << name;
      }
    });
    const FeatureSet before = host::required(decltype(problem){});
    const std::vector<std::string> all = names<decltype(problem)>();
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto changed = decltype(problem){};
      change(&changed, i);
      const auto found = asking.find(all[i]);
      const bool asks = found != asking.end() || all[i] == ".num_splits";  // more than its default
      EXPECT_EQ(host::required(changed) == before, !asks) << all[i];
    }
  };
  check(ForwardProblem());
  check(BackwardProblem());
  check(QuantizeProblem());
  check(KvProblem());
}

TEST(Features, OnlyMoreThanOnePartIsAskedFor) {
  ForwardProblem p;
  for (const int splits : {kAutomaticSplits, 1, 2, kMaxSplits}) {
    p.num_splits = splits;
    EXPECT_EQ(host::required(p).has(Feature::num_splits), splits > 1) << splits;
  }
  BackwardProblem backward = backward_problem();
  backward.forward.num_splits = 4;
  EXPECT_FALSE(host::required(host::canonical(backward)).has(Feature::num_splits));
}

TEST(Features, OfEnumerationsFollowTheirValues) {
  KvProblem p;
  p.format = CacheFormat::int8;
  p.scale_kind = CacheScale::token;
  p.split = KvSplit::invariant;
  EXPECT_EQ(host::required(p),
            (FeatureSet{Feature::cache_int8, Feature::scale_token, Feature::split_invariant}));
  p.format = CacheFormat::e4m3;
  p.scale_kind = CacheScale::head;
  p.split = KvSplit::fixed;
  EXPECT_EQ(host::required(p),
            (FeatureSet{Feature::cache_e4m3, Feature::scale_head, Feature::split_fixed}));
}

TEST(Features, RowsRefuseWhatTheyDoNotList) {
  KernelInfo row{};
  row.features = FeatureSet{Feature::packed, Feature::lse};
  EXPECT_TRUE(host::feature_rule(row, FeatureSet{Feature::lse}).ok());
  EXPECT_TRUE(host::feature_rule(row, FeatureSet{}).ok());
  const Status refused =
      host::feature_rule(row, FeatureSet{Feature::lse, Feature::max_logit, Feature::deterministic});
  EXPECT_EQ(refused.code(), StatusCode::unsupported);
  EXPECT_STREQ(refused.message(), "does not serve max_logit, deterministic");
  for (int i = 1; i < kFeatureCount; ++i) {
    const auto feature = static_cast<Feature>(i);
    EXPECT_NE(std::string(feature_name(feature)), "?");
    row.features = FeatureSet{};
    EXPECT_FALSE(host::feature_rule(row, FeatureSet{feature}).ok()) << feature_name(feature);
    row.features = FeatureSet{feature};
    EXPECT_TRUE(host::feature_rule(row, FeatureSet{feature}).ok()) << feature_name(feature);
  }
}

TEST(Features, EveryRowListsWhatItsPassHas) {
  for (int i = 0; i < kernel_count(); ++i) {
    const KernelInfo& row = kernel_info(i);
    const bool sixteen = row.dtype == DType::bf16 || row.dtype == DType::f16;
    const bool of_cache = row.pass == Pass::decode || row.pass == Pass::append;
    EXPECT_TRUE(row.features.has(Feature::packed)) << row.name;
    EXPECT_EQ(row.features.has(Feature::seqused), !of_cache) << row.name;
    EXPECT_EQ(row.features.has(Feature::o_low), sixteen && row.pass != Pass::quantize && !of_cache)
        << row.name;
    EXPECT_EQ(row.features.has(Feature::lse),
              row.pass != Pass::quantize && row.pass != Pass::append)
        << row.name;
    EXPECT_EQ(row.features.has(Feature::rotary), row.pass == Pass::append) << row.name;
    EXPECT_EQ(row.features.has(Feature::tree_mask), row.pass == Pass::decode) << row.name;
    EXPECT_EQ(row.features.has(Feature::deterministic), row.pass == Pass::backward) << row.name;
    EXPECT_EQ(row.features.has(Feature::grad_lse), row.pass == Pass::backward) << row.name;
    // Those of GPUs that sum no dQ in units of the keys would ignore it.
    const bool on_cpu = row.backend == Backend::cpu || row.backend == Backend::reference;
    EXPECT_EQ(row.features.has(Feature::key_statistics),
              row.pass == Pass::backward && (sixteen || (on_cpu && row.dtype == DType::f32)))
        << row.name;
    const bool rotates = row.pass == Pass::quantize && row.dtype != DType::e4m3;
    EXPECT_EQ(row.features.has(Feature::hadamard), rotates) << row.name;
    EXPECT_EQ(row.features.has(Feature::dequantize), rotates) << row.name;
    EXPECT_EQ(row.features.has(Feature::max_logit),
              row.pass == Pass::forward && row.dtype != DType::e4m3)
        << row.name;
  }
}

}  // namespace
}  // namespace pantile::testing
