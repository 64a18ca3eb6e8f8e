// What problems ask for and rows serve: a row refuses every feature that it does not list, so that
// one that is new is refused by all rows until their kernels have it.
#pragma once

#include "pantile/kv.h"
#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/registry.h"
#include "pantile/status.h"

namespace pantile::host {

// The sets of cuda/kernels.def and of the CPU rows.
namespace feature_sets {
inline constexpr FeatureSet forward_f32{Feature::packed,     Feature::seqused,
                                        Feature::lse,        Feature::max_logit,
                                        Feature::output_f32, Feature::num_splits};
inline constexpr FeatureSet forward_16bit = forward_f32.with(Feature::o_low);
inline constexpr FeatureSet forward_fp8{Feature::packed, Feature::seqused, Feature::lse,
                                        Feature::smooth_k};
inline constexpr FeatureSet backward_f32{Feature::packed, Feature::seqused, Feature::lse,
                                         Feature::grad_lse, Feature::deterministic};
// The CPU's: no unit of a sum depends on the keys, and none is refused.
inline constexpr FeatureSet backward_f32_cpu = backward_f32.with(Feature::key_statistics);
inline constexpr FeatureSet backward_fp8 = backward_f32.with(Feature::smooth_k);
inline constexpr FeatureSet backward_16bit =
    backward_f32.with(Feature::o_low).with(Feature::key_statistics);
// What changes scores and weights (variant.h), masks beside the window, and the gradients of the
// variants' tensors. Each is named by the rows that have it: a set that grows would let rows serve,
// and ignore, what they lack.
constexpr FeatureSet with_variants(FeatureSet set) {
  return set.with(Feature::softcap)
      .with(Feature::alibi)
      .with(Feature::sinks)
      .with(Feature::bias)
      .with(Feature::dropout);
}
constexpr FeatureSet with_masks(FeatureSet set) {
  return set.with(Feature::block_mask)
      .with(Feature::element_mask)
      .with(Feature::documents)
      .with(Feature::prefix)
      .with(Feature::mask_expression);
}
constexpr FeatureSet with_score(FeatureSet set) {
  return set.with(Feature::score);
}
constexpr FeatureSet with_score_gradients(FeatureSet set) {
  return with_score(set).with(Feature::grad_captured);
}
constexpr FeatureSet with_variant_gradients(FeatureSet set) {
  return with_variants(set)
      .with(Feature::grad_alibi)
      .with(Feature::grad_sinks)
      .with(Feature::grad_bias);
}
// Keys that lie in ranges, and a shift of the mask.
constexpr FeatureSet with_ranges(FeatureSet set) {
  return set.with(Feature::key_ranges).with(Feature::mask_shift);
}
// On a GPU sinks are in every such kernel, and the others are hooks of kernels that are compiled at
// run time.
inline constexpr FeatureSet forward_sinks = forward_16bit.with(Feature::sinks);
inline constexpr FeatureSet forward_hooks =
    with_ranges(with_score(with_masks(with_variants(forward_16bit))))
        .with(Feature::mask_expression)
        .with(Feature::paged);
inline constexpr FeatureSet backward_sinks =
    backward_16bit.with(Feature::sinks).with(Feature::grad_sinks);
inline constexpr FeatureSet backward_hooks =
    with_score_gradients(with_masks(with_variant_gradients(backward_16bit)))
        .with(Feature::mask_expression);
inline constexpr FeatureSet quantize_fp8{Feature::packed, Feature::seqused};
inline constexpr FeatureSet quantize =
    quantize_fp8.with(Feature::smooth_k).with(Feature::hadamard).with(Feature::dequantize);
// Over a cache. On a GPU rows may list less.
inline constexpr FeatureSet append{Feature::packed,     Feature::paged,      Feature::cache_index,
                                   Feature::leftpad,    Feature::v_in_k,     Feature::cache_e4m3,
                                   Feature::cache_int8, Feature::scale_head, Feature::scale_token,
                                   Feature::rotary};
inline constexpr FeatureSet decode_plain{
    Feature::packed,     Feature::paged,           Feature::cache_index, Feature::leftpad,
    Feature::tree_mask,  Feature::sinks,           Feature::softcap,     Feature::lse,
    Feature::output_f32, Feature::split_invariant, Feature::split_fixed};
inline constexpr FeatureSet decode_8bit = decode_plain.with(Feature::cache_e4m3)
                                              .with(Feature::cache_int8)
                                              .with(Feature::scale_head)
                                              .with(Feature::scale_token);
// Latent caches on a GPU: the order of additions depends on the number of queries.
inline constexpr FeatureSet decode_latent{
    Feature::packed,    Feature::paged,      Feature::cache_index,    Feature::leftpad,
    Feature::v_in_k,    Feature::sinks,      Feature::softcap,        Feature::lse,
    Feature::tree_mask, Feature::output_f32, Feature::split_invariant};
inline constexpr FeatureSet decode_latent_8bit = decode_latent.with(Feature::cache_e4m3)
                                                     .with(Feature::cache_int8)
                                                     .with(Feature::scale_head)
                                                     .with(Feature::scale_token);
inline constexpr FeatureSet decode = decode_8bit.with(Feature::v_in_k);
}  // namespace feature_sets

// What a canonical problem asks for.
FeatureSet required(const ForwardProblem& problem);
FeatureSet required(const BackwardProblem& problem);
FeatureSet required(const QuantizeProblem& problem);
FeatureSet required(const KvProblem& problem);  // of canonical_decode or canonical_append

// Ok, or which features the row lacks.
Status feature_rule(const KernelInfo& row, FeatureSet required);

}  // namespace pantile::host
