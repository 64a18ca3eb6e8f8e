#include "common/stored_mask.h"

#include "common/kernel_text.h"

#include <cstdint>

namespace pantile::common {

bool has_clauses(const Variant& variant) {
  return mask_clauses(variant) >> kMaskForms != 0;
}

attn::MaskParams mask_params(const ForwardProblem& problem, const VariantTensors& tensors) {
  const Variant& v = problem.variant;
  const auto is_even = [](const void* base, const MaskLayout& layout) {
    return reinterpret_cast<std::uintptr_t>(base) % 2 == 0 && layout.batch % 2 == 0 &&
           layout.head % 2 == 0 && layout.query % 2 == 0;
  };
  attn::MaskParams params{};
  params.clauses = mask_clauses(v);
  params.blocks = tensors.block_mask;
  params.blocks_batch = v.block_mask.batch;
  params.blocks_head = v.block_mask.head;
  params.blocks_row = v.block_mask.query;
  params.block_shift = v.mask_block_size == 64 ? 6 : 7;
  params.elements = tensors.mask;
  params.elements_batch = v.mask.batch;
  params.elements_head = v.mask.head;
  params.elements_row = v.mask.query;
  params.element_pairs = is_even(tensors.mask, v.mask);
  params.query_ids = tensors.query_ids;
  params.key_ids = tensors.key_ids;
  params.query_ids_batch = v.mask_queries;
  params.key_ids_batch = v.mask_keys;
  params.prefixes = tensors.prefixes;
  params.prefixes_batch = v.mask_prefixes;
  return params;
}

std::string stored_mask_type(std::uint32_t forms, bool clauses) {
  return "attn::StoredMask<" + std::to_string(forms) + ", " + (clauses ? "true" : "false") + ">";
}

}  // namespace pantile::common
