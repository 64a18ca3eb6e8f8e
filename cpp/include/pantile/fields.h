// Every field of a problem, by name, with the feature that it asks for. Behind the features that a
// row must have, the key of cached plans and the log of plans, so that none of them can miss one:
// the structured bindings below name every field of a struct, and a new field does not compile
// before it stands here.
#pragma once

#include <type_traits>

#include "pantile/kv.h"
#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/registry.h"

namespace pantile {
namespace fields {

template <class L, class F>
constexpr void of_layout(const char* owner, L& layout, F&& f) {
  auto& [batch, seq, head, base_align_bytes] = layout;
  f(owner, "batch", batch, Feature::none);
  f(owner, "seq", seq, Feature::none);
  f(owner, "head", head, Feature::none);
  f(owner, "base_align_bytes", base_align_bytes, Feature::none);
}

template <class S, class F>
constexpr void of_softmax(S& softmax, F&& f) {
  auto& [unit, mode, tensor_quarters, split_rows, rescale_threshold, p_max_offset,
         min_exponent_log2, exact_lse] = softmax;
  f("softmax", "unit", unit, Feature::none);
  f("softmax", "mode", mode, Feature::none);
  f("softmax", "tensor_quarters", tensor_quarters, Feature::none);
  f("softmax", "split_rows", split_rows, Feature::none);
  f("softmax", "rescale_threshold", rescale_threshold, Feature::none);
  f("softmax", "p_max_offset", p_max_offset, Feature::none);
  f("softmax", "min_exponent_log2", min_exponent_log2, Feature::none);
  f("softmax", "exact_lse", exact_lse, Feature::none);
}

template <class Format, class F>
constexpr void of_fp8(Format& fp8, F&& f) {
  auto& [output, exp, block_q, block_k, smooth_k] = fp8;
  f("fp8", "output", output, Feature::none);
  f("fp8", "exp", exp, Feature::none);
  f("fp8", "block_q", block_q, Feature::none);
  f("fp8", "block_k", block_k, Feature::none);
  f("fp8", "smooth_k", smooth_k, Feature::smooth_k);
}

template <class L, class F>
constexpr void of_mask(const char* owner, L& mask, F&& f) {
  auto& [batch, head, query] = mask;
  f(owner, "batch", batch, Feature::none);
  f(owner, "head", head, Feature::none);
  f(owner, "query", query, Feature::none);
}

template <class V, class F>
constexpr void of_variant(V& variant, F&& f) {
  auto& [softcap, has_alibi, alibi_by_batch, has_sinks, has_bias, bias_dtype, bias, dropout,
         batch_offset, head_offset, query_offset, key_offset, has_block_mask, has_element_mask,
         has_documents, has_prefix, mask_block_size, block_mask, mask, mask_queries, mask_keys,
         mask_prefixes, mask_clauses, score, mask_expression] = variant;
  auto& [batch, head, query, base_align_bytes] = bias;
  f("variant", "softcap", softcap, Feature::softcap);
  f("variant", "has_alibi", has_alibi, Feature::alibi);
  f("variant", "alibi_by_batch", alibi_by_batch, Feature::alibi);
  f("variant", "has_sinks", has_sinks, Feature::sinks);
  f("variant", "has_bias", has_bias, Feature::bias);
  f("variant", "bias_dtype", bias_dtype, Feature::none);
  f("bias", "batch", batch, Feature::none);
  f("bias", "head", head, Feature::none);
  f("bias", "query", query, Feature::none);
  f("bias", "base_align_bytes", base_align_bytes, Feature::none);
  f("variant", "dropout", dropout, Feature::dropout);
  f("variant", "batch_offset", batch_offset, Feature::none);
  f("variant", "head_offset", head_offset, Feature::none);
  f("variant", "query_offset", query_offset, Feature::none);
  f("variant", "key_offset", key_offset, Feature::none);
  f("variant", "has_block_mask", has_block_mask, Feature::block_mask);
  f("variant", "has_element_mask", has_element_mask, Feature::element_mask);
  f("variant", "has_documents", has_documents, Feature::documents);
  f("variant", "has_prefix", has_prefix, Feature::prefix);
  f("variant", "mask_block_size", mask_block_size, Feature::none);
  of_mask("block_mask", block_mask, f);
  of_mask("mask", mask, f);
  f("variant", "mask_queries", mask_queries, Feature::none);
  f("variant", "mask_keys", mask_keys, Feature::none);
  f("variant", "mask_prefixes", mask_prefixes, Feature::none);
  f("variant", "mask_clauses", mask_clauses, Feature::none);
  f("variant", "score", score, Feature::score);
  f("variant", "mask_expression", mask_expression, Feature::mask_expression);
}

template <class P, class F>
constexpr void of_forward(P& problem, F&& f) {
  auto& [dtype, batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, packed_q,
         packed_k, total_q, total_k, has_seqused_q, has_seqused_k, has_k_begin, page_size, pages,
         max_pages, table_stride, has_mask_shift, window_left, window_right, scale,
         float32_precision, softmax, wants_lse, wants_max_logit, output_f32, wants_o_low,
         num_splits, q, k, v, o, fp8, variant] = problem;
  f("", "dtype", dtype, Feature::none);
  f("", "batch", batch, Feature::none);
  f("", "heads_q", heads_q, Feature::none);
  f("", "heads_k", heads_k, Feature::none);
  f("", "seqlen_q", seqlen_q, Feature::none);
  f("", "seqlen_k", seqlen_k, Feature::none);
  f("", "head_dim", head_dim, Feature::none);
  f("", "head_dim_v", head_dim_v, Feature::none);
  f("", "packed_q", packed_q, Feature::packed);
  f("", "packed_k", packed_k, Feature::packed);
  f("", "total_q", total_q, Feature::none);
  f("", "total_k", total_k, Feature::none);
  f("", "has_seqused_q", has_seqused_q, Feature::seqused);
  f("", "has_seqused_k", has_seqused_k, Feature::seqused);
  f("", "has_k_begin", has_k_begin, Feature::key_ranges);
  f("", "page_size", page_size, Feature::paged);
  f("", "pages", pages, Feature::none);
  f("", "max_pages", max_pages, Feature::none);
  f("", "table_stride", table_stride, Feature::none);
  f("", "has_mask_shift", has_mask_shift, Feature::mask_shift);
  f("", "window_left", window_left, Feature::none);  // the row's MaskKind
  f("", "window_right", window_right, Feature::none);
  f("", "scale", scale, Feature::none);
  f("", "float32_precision", float32_precision, Feature::none);
  of_softmax(softmax, f);
  f("", "wants_lse", wants_lse, Feature::lse);
  f("", "wants_max_logit", wants_max_logit, Feature::max_logit);
  f("", "output_f32", output_f32, Feature::output_f32);
  f("", "wants_o_low", wants_o_low, Feature::o_low);
  f("", "num_splits", num_splits, num_splits > 1 ? Feature::num_splits : Feature::none);
  of_layout("q", q, f);
  of_layout("k", k, f);
  of_layout("v", v, f);
  of_layout("o", o, f);
  of_fp8(fp8, f);
  of_variant(variant, f);
}

template <class P, class F>
constexpr void of_backward(P& problem, F&& f) {
  auto& [forward, deterministic, has_grad_lse, has_o_low, key_statistics, wants_grad_alibi,
         wants_grad_sinks, wants_grad_bias, wants_grad_captured, grad_captured_elements, grad_o,
         grad_q, grad_k, grad_v] = problem;
  of_forward(forward, f);
  f("", "deterministic", deterministic, Feature::deterministic);
  f("", "has_grad_lse", has_grad_lse, Feature::grad_lse);
  f("", "has_o_low", has_o_low, Feature::o_low);
  f("", "key_statistics", key_statistics, Feature::key_statistics);
  f("", "wants_grad_alibi", wants_grad_alibi, Feature::grad_alibi);
  f("", "wants_grad_sinks", wants_grad_sinks, Feature::grad_sinks);
  f("", "wants_grad_bias", wants_grad_bias, Feature::grad_bias);
  f("", "wants_grad_captured", wants_grad_captured, Feature::grad_captured);
  f("", "grad_captured_elements", grad_captured_elements, Feature::none);
  of_layout("grad_o", grad_o, f);
  of_layout("grad_q", grad_q, f);
  of_layout("grad_k", grad_k, f);
  of_layout("grad_v", grad_v, f);
}

template <class P, class F>
constexpr void of_quantize(P& problem, F&& f) {
  auto& [forward, dtype, q, k, v, hadamard, dequantize, keep_rotation] = problem;
  of_forward(forward, f);
  f("input", "dtype", dtype, Feature::none);
  of_layout("input q", q, f);
  of_layout("input k", k, f);
  of_layout("input v", v, f);
  f("", "hadamard", hadamard, Feature::hadamard);
  f("", "dequantize", dequantize, Feature::dequantize);
  f("", "keep_rotation", keep_rotation, Feature::dequantize);
}

template <class L, class F>
constexpr void of_cache_layout(const char* owner, L& layout, F&& f) {
  auto& [block, slot, head, base_align_bytes] = layout;
  f(owner, "block", block, Feature::none);
  f(owner, "slot", slot, Feature::none);
  f(owner, "head", head, Feature::none);
  f(owner, "base_align_bytes", base_align_bytes, Feature::none);
}

template <class L, class F>
constexpr void of_scale_layout(const char* owner, L& layout, F&& f) {
  auto& [block, slot, head] = layout;
  f(owner, "block", block, Feature::none);
  f(owner, "slot", slot, Feature::none);
  f(owner, "head", head, Feature::none);
}

template <class P, class F>
constexpr void of_kv(P& problem, F&& f) {
  auto& [dtype, batch, heads_q, heads_k, head_dim, head_dim_v, v_in_k, seqlen_q, packed_q, total_q,
         seqlen_new, packed_new, total_new, blocks, page_size, block_slots, table_rows, table_pages,
         table_stride, has_cache_index, has_leftpad, format, scale_kind, scale_k, scale_v,
         window_left, window_right, has_tree_mask, has_sinks, softcap, scale, split, split_keys,
         wants_lse, output_f32, rotary_dim, rotary_interleaved, rotates_q, rotary_dtype,
         rotary_positions, rotary_stride, q, o, k_new, v_new, q_rotated, k, v] = problem;
  f("", "dtype", dtype, Feature::none);
  f("", "batch", batch, Feature::none);
  f("", "heads_q", heads_q, Feature::none);
  f("", "heads_k", heads_k, Feature::none);
  f("", "head_dim", head_dim, Feature::none);
  f("", "head_dim_v", head_dim_v, Feature::none);
  f("", "v_in_k", v_in_k, Feature::v_in_k);
  f("", "seqlen_q", seqlen_q, Feature::none);
  f("", "packed_q", packed_q, Feature::packed);
  f("", "total_q", total_q, Feature::none);
  f("", "seqlen_new", seqlen_new, Feature::none);
  f("", "packed_new", packed_new, Feature::packed);
  f("", "total_new", total_new, Feature::none);
  f("", "blocks", blocks, Feature::none);
  f("", "page_size", page_size, Feature::paged);
  f("", "block_slots", block_slots, Feature::none);
  f("", "table_rows", table_rows, Feature::none);
  f("", "table_pages", table_pages, Feature::none);
  f("", "table_stride", table_stride, Feature::none);
  f("", "has_cache_index", has_cache_index, Feature::cache_index);
  f("", "has_leftpad", has_leftpad, Feature::leftpad);
  f("", "format", format, format == CacheFormat::int8 ? Feature::cache_int8 : Feature::cache_e4m3);
  f("", "scale_kind", scale_kind,
    scale_kind == CacheScale::token ? Feature::scale_token : Feature::scale_head);
  of_scale_layout("scale_k", scale_k, f);
  of_scale_layout("scale_v", scale_v, f);
  f("", "window_left", window_left, Feature::none);
  f("", "window_right", window_right, Feature::none);
  f("", "has_tree_mask", has_tree_mask, Feature::tree_mask);
  f("", "has_sinks", has_sinks, Feature::sinks);
  f("", "softcap", softcap, Feature::softcap);
  f("", "scale", scale, Feature::none);
  f("", "split", split,
    split == KvSplit::invariant ? Feature::split_invariant : Feature::split_fixed);
  f("", "split_keys", split_keys, Feature::none);
  f("", "wants_lse", wants_lse, Feature::lse);
  f("", "output_f32", output_f32, Feature::output_f32);
  f("", "rotary_dim", rotary_dim, Feature::rotary);
  f("", "rotary_interleaved", rotary_interleaved, Feature::rotary);
  f("", "rotates_q", rotates_q, Feature::rotary);
  f("", "rotary_dtype", rotary_dtype, Feature::none);
  f("", "rotary_positions", rotary_positions, Feature::none);
  f("", "rotary_stride", rotary_stride, Feature::none);
  of_layout("q", q, f);
  of_layout("o", o, f);
  of_layout("k_new", k_new, f);
  of_layout("v_new", v_new, f);
  of_layout("q_rotated", q_rotated, f);
  of_cache_layout("k", k, f);
  of_cache_layout("v", v, f);
}

}  // namespace fields

// f(owner, name, value, feature) for each field of a ForwardProblem, BackwardProblem,
// QuantizeProblem or KvProblem; those of the forward problem in the others first. `owner` is the
// struct inside the problem, for example "q", or empty. `value` is a reference to the field. A
// value that is not 0 or false asks for the feature.
template <class Problem, class F>
constexpr void for_each_field(Problem& problem, F&& f) {
  using P = std::remove_const_t<Problem>;
  if constexpr (std::is_same_v<P, ForwardProblem>) {
    fields::of_forward(problem, f);
  } else if constexpr (std::is_same_v<P, BackwardProblem>) {
    fields::of_backward(problem, f);
  } else if constexpr (std::is_same_v<P, KvProblem>) {
    fields::of_kv(problem, f);
  } else {
    static_assert(std::is_same_v<P, QuantizeProblem>);
    fields::of_quantize(problem, f);
  }
}

}  // namespace pantile
