// The kernel table: every compiled kernel, GPU and CPU, in the order in which they are tried.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "pantile/dtype.h"
#include "pantile/export.h"

namespace pantile {

// `reference` is the textbook algorithm in double on the CPU; it is never chosen automatically.
enum class Backend : std::uint8_t { automatic = 0, hopper, ampere, cpu, reference };
// `quantize` turns Q, K and V into the operands of an FP8 forward.
// `decode` and `append` read and write a cache of keys and values (kv.h).
enum class Pass : std::uint8_t { forward = 0, backward, quantize, decode, append };
// `window` covers every mask that is neither full nor plain causal. `any`: decided at run time.
enum class MaskKind : std::uint8_t { full = 0, causal, window, any };

// What a problem may ask for beside its shape, mask and types, which other rules concern. A field
// of a problem that asks for one says so in fields.h; a row refuses what it does not list.
enum class Feature : std::uint8_t {
  none = 0,
  packed,          // sequences of different lengths in one tensor
  seqused,         // lengths shorter than what is allocated
  lse,             // written by the forward, read by the backward
  max_logit,       // the largest score of a head
  output_f32,      // O that is not rounded
  o_low,           // 8 more bits of O
  grad_lse,        // dLSE
  deterministic,   // equal bits from equal inputs
  key_statistics,  // what a deterministic backward must know of keys, from outside
  smooth_k,        // FP8: K less its mean
  hadamard,        // FP8: rotated Q and K
  dequantize,      // FP8: the numbers of codes
  softcap,         // of the variant (variant.h), and the gradients of its tensors
  alibi,
  sinks,
  bias,
  dropout,
  grad_alibi,
  grad_sinks,
  grad_bias,
  block_mask,
  element_mask,
  documents,
  prefix,
  score,
  mask_expression,
  grad_captured,
  key_ranges,  // keys that begin anywhere, each sequence's
  mask_shift,  // a shift of the mask for each sequence
  paged,       // keys in pages: of a forward, or of a cache (kv.h)
  cache_index,
  leftpad,
  v_in_k,
  cache_e4m3,
  cache_int8,
  scale_head,
  scale_token,
  tree_mask,
  split_invariant,
  split_fixed,
  rotary,
  num_splits,  // keys of a forward in parts
};
inline constexpr int kFeatureCount = static_cast<int>(Feature::num_splits) + 1;

class FeatureSet {
 public:
  constexpr FeatureSet() = default;
  constexpr FeatureSet(std::initializer_list<Feature> features) {
    for (const Feature feature : features) {
      bits_ |= bit(feature);
    }
  }

  constexpr bool operator==(const FeatureSet& other) const { return bits_ == other.bits_; }
  constexpr bool has(Feature feature) const { return (bits_ & bit(feature)) != 0; }
  constexpr FeatureSet with(Feature feature) const {
    FeatureSet result = *this;
    result.bits_ |= bit(feature);
    return result;
  }

 private:
  static constexpr std::uint64_t bit(Feature feature) {
    return std::uint64_t{1} << static_cast<int>(feature);
  }

  std::uint64_t bits_ = 0;
};

struct KernelInfo {
  const char* name;  // for example "hopper_forward_bf16_d128_causal"
  Backend backend;
  Pass pass;
  DType dtype;     // of Q, K and V as they come in
  int head_dim;    // largest head_dim of Q and K the row serves
  int head_dim_v;  // largest head_dim of V and O the row serves
  MaskKind mask;
  bool compiled;  // false: known to the table, left out of this build (no CUDA)
  FeatureSet features{};
};

PANTILE_API int kernel_count();
PANTILE_API const KernelInfo& kernel_info(int index);  // 0 <= index < kernel_count()

PANTILE_API const char* backend_name(Backend backend);
PANTILE_API const char* pass_name(Pass pass);
PANTILE_API const char* mask_kind_name(MaskKind mask);
PANTILE_API const char* feature_name(Feature feature);

}  // namespace pantile
