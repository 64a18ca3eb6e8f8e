#include "hopper/mask.h"

#include "core/integer.h"
#include "hopper/backward/workspace.h"
#include "hopper/forward/order.h"

namespace pantile::hopper {
namespace {

using core::ceil_div;

// Whether sequences, or heads, have lists of their own.
bool differs_by_batch(const ForwardProblem& p) {
  const Variant& v = p.variant;
  return p.has_seqused_q || p.has_seqused_k || p.has_mask_shift || p.packed_q || p.packed_k ||
         v.block_mask.batch != 0 || v.mask.batch != 0 || v.mask_queries != 0 || v.mask_keys != 0 ||
         v.mask_prefixes != 0;
}
bool differs_by_head(const ForwardProblem& p) {
  return p.variant.block_mask.head != 0 || p.variant.mask.head != 0;
}

// `own`: rows or keys of a tile that has a list, `other`: of the tiles in it.
ListLayout lists_of(const ForwardProblem& p, bool by_keys, int own, int other, std::int64_t items,
                    std::size_t begin) {
  constexpr std::size_t kAlign = 256;
  const auto aligned = [](std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; };
  const bool packed = by_keys ? p.packed_k : p.packed_q;
  const std::int64_t length = by_keys ? p.seqlen_k : p.seqlen_q;
  const std::int64_t total = by_keys ? p.total_k : p.total_q;
  const std::int64_t per_sequence = ceil_div<std::int64_t>(length, own);
  ListLayout lists;
  lists.batch_step = !packed && differs_by_batch(p) ? static_cast<int>(per_sequence) : 0;
  lists.tiles = packed                 ? total / own + p.batch
                : lists.batch_step > 0 ? per_sequence * p.batch
                                       : per_sequence;
  lists.heads = differs_by_head(p) ? p.heads_q : 1;
  lists.capacity = core::max_of<std::int64_t>(
      ceil_div<std::int64_t>(by_keys ? p.seqlen_q : p.seqlen_k, other), 1);
  lists.items = items;
  const auto count = static_cast<std::size_t>(lists.tiles * lists.heads);
  constexpr std::size_t kInt = sizeof(std::int32_t);
  lists.counts = aligned(begin);
  lists.entries = aligned(lists.counts + count * 2 * kInt);
  lists.order = aligned(lists.entries + count * static_cast<std::size_t>(lists.capacity) * kInt);
  lists.end = aligned(lists.order + static_cast<std::size_t>(items) * 4 * kInt);
  return lists;
}

}  // namespace

attn::TileLists ListLayout::at(void* workspace) const {
  auto* const bytes = static_cast<unsigned char*>(workspace);
  const auto ints = [bytes](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(bytes + offset);
  };
  attn::TileLists lists{};
  lists.counts = ints(counts);
  lists.entries = ints(entries);
  lists.order = ints(order);
  lists.tiles = static_cast<int>(tiles);
  lists.head_step = heads > 1 ? 1 : 0;
  lists.batch_step = batch_step;
  lists.capacity = static_cast<int>(capacity);
  return lists;
}

ListLayout forward_lists(const ForwardPlan& plan) {
  const int items = forward_order(plan.problem, plan.kernel->mask, plan.tile_q).count();
  return lists_of(plan.problem, false, plan.tile_q, plan.tile_k, items,
                  plan.workspace.zeroed_bytes);
}

ListLayout backward_lists(const BackwardPlan& plan) {
  const ForwardProblem& forward = plan.problem.forward;
  return lists_of(forward, true, plan.tile_k, plan.tile_q, key_work(forward, plan.tile_k),
                  backward_workspace(plan.problem, plan.kernel->head_dim).bytes);
}

}  // namespace pantile::hopper
