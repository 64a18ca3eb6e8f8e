#include "host/features.h"

#include <cstdio>

#include "pantile/fields.h"

namespace pantile::host {
namespace {

template <class Problem>
FeatureSet required_of(const Problem& problem) {
  FeatureSet set;
  for_each_field(problem, [&](const char*, const char*, const auto& value, Feature feature) {
    if (feature != Feature::none &&
        value != std::remove_const_t<std::remove_reference_t<decltype(value)>>{}) {
      set = set.with(feature);
    }
  });
  return set;
}

}  // namespace

FeatureSet required(const ForwardProblem& problem) {
  return required_of(problem);
}
FeatureSet required(const BackwardProblem& problem) {
  return required_of(problem);
}
FeatureSet required(const QuantizeProblem& problem) {
  return required_of(problem);
}
FeatureSet required(const KvProblem& problem) {
  return required_of(problem);
}

Status feature_rule(const KernelInfo& row, FeatureSet required) {
  char missing[192] = {0};
  int length = 0;
  for (int i = 1; i < kFeatureCount; ++i) {
    const auto feature = static_cast<Feature>(i);
    const int room = static_cast<int>(sizeof missing) - length;
    if (required.has(feature) && !row.features.has(feature) && room > 1) {
      length += std::snprintf(missing + length, static_cast<std::size_t>(room), "%s%s",
                              length == 0 ? "" : ", ", feature_name(feature));
    }
  }
  return length == 0 ? Status()
                     : Status::error(StatusCode::unsupported, "does not serve %s", missing);
}

}  // namespace pantile::host

namespace pantile {

const char* feature_name(Feature feature) {
  switch (feature) {
    case Feature::none: return "none";
    case Feature::packed: return "packed sequences";
    case Feature::seqused: return "seqused";
    case Feature::lse: return "LSE";
    case Feature::max_logit: return "max_logit";
    case Feature::output_f32: return "output_f32";
    case Feature::o_low: return "o_low";
    case Feature::grad_lse: return "grad_lse";
    case Feature::deterministic: return "deterministic";
    case Feature::key_statistics: return "key_statistics";
    case Feature::smooth_k: return "smooth_k";
    case Feature::hadamard: return "hadamard";
    case Feature::dequantize: return "dequantize";
    case Feature::softcap: return "softcap";
    case Feature::alibi: return "ALiBi";
    case Feature::sinks: return "sinks";
    case Feature::bias: return "bias";
    case Feature::dropout: return "dropout";
    case Feature::grad_alibi: return "gradient of ALiBi slopes";
    case Feature::grad_sinks: return "gradient of sinks";
    case Feature::grad_bias: return "gradient of bias";
    case Feature::block_mask: return "block masks";
    case Feature::element_mask: return "masks of elements";
    case Feature::documents: return "document masks";
    case Feature::prefix: return "prefix masks";
    case Feature::score: return "score expressions";
    case Feature::mask_expression: return "mask expressions";
    case Feature::grad_captured: return "gradient of captured tensors";
    case Feature::key_ranges: return "key ranges (k_begin)";
    case Feature::mask_shift: return "mask_shift";
    case Feature::paged: return "keys in pages (block_table)";
    case Feature::cache_index: return "cache_index";
    case Feature::leftpad: return "leftpad";
    case Feature::v_in_k: return "V inside of K";
    case Feature::cache_e4m3: return "e4m3 caches";
    case Feature::cache_int8: return "int8 caches";
    case Feature::scale_head: return "scales of heads";
    case Feature::scale_token: return "scales of tokens";
    case Feature::tree_mask: return "tree masks";
    case Feature::split_invariant: return "split=invariant";
    case Feature::split_fixed: return "splits of fixed length";
    case Feature::rotary: return "rotary embedding";
    case Feature::num_splits: return "num_splits";
  }
  return "?";
}

}  // namespace pantile
