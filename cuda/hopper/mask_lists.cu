#include "hopper/mask_lists.h"

#include "common/tile_lists.cuh"
#include "driver.h"

namespace pantile::hopper {
namespace {

// One instance serves all masks of pantile/variant.h.
using AnyMask = attn::StoredMask<kMaskBlocks | kMaskElements | kMaskDocuments | kMaskPrefix, true>;

core::SequenceSide side_of(std::int64_t length, const std::int32_t* cu_seqlens,
                           const std::int32_t* seqused) {
  core::SequenceSide side;
  side.max_length = static_cast<int>(length);
  side.cu_seqlens = cu_seqlens;
  side.seqused = seqused;
  return side;
}

}  // namespace

Status make_lists(bool backward, const ForwardProblem& problem, const ForwardTensors& tensors,
                  const ListLayout& layout, int tile_q, int tile_k, const ListedWork& work,
                  void* workspace, cudaStream_t stream) {
  const std::int64_t length = backward ? problem.seqlen_k : problem.seqlen_q;
  const int own = backward ? tile_k : tile_q;
  const core::Mask window = core::make_mask(0, 0, problem.window_left, problem.window_right);
  common::ListParams params{};
  params.mask = mask_params(problem, tensors.variant);
  params.lists = layout.at(workspace);
  params.queries = side_of(problem.seqlen_q, tensors.cu_seqlens_q, tensors.seqused_q);
  params.keys = side_of(problem.seqlen_k, tensors.cu_seqlens_k, tensors.seqused_k);
  params.numbers = common::TileNumbers{own, static_cast<int>(problem.batch),
                                       static_cast<int>(core::ceil_div<std::int64_t>(length, own)),
                                       backward ? tensors.cu_seqlens_k : tensors.cu_seqlens_q};
  params.mask_shift = problem.has_mask_shift ? tensors.mask_shift : nullptr;
  params.window_left = window.left;
  params.window_right = window.right;
  params.tile_rows = tile_q;
  params.tile_keys = tile_k;
  const cuda::Launch how{dim3(static_cast<unsigned>(layout.tiles * layout.heads)),
                         dim3(common::kListThreads), 0, stream};
  Status status = backward
                      ? cuda::launch("list_tiles", how, common::list_tiles<AnyMask, true>, params)
                      : cuda::launch("list_tiles", how, common::list_tiles<AnyMask, false>, params);
  if (!status.ok()) {
    return status;
  }
  common::OrderParams order{};
  order.lists = params.lists;
  order.order = work.order;
  order.items = static_cast<int>(layout.items);
  order.section_items = work.packed_keys ? order.items : work.order.section_items();
  order.group = backward ? static_cast<int>(problem.heads_q / problem.heads_k) : 1;
  order.packed_heads = work.packed_keys ? static_cast<int>(problem.heads_k) : 0;
  const int sections = core::ceil_div(order.items, order.section_items);
  const cuda::Launch how_order{dim3(static_cast<unsigned>(sections)), dim3(common::kOrderThreads),
                               0, stream};
  return cuda::launch("order_work", how_order, common::order_work<>, order);
}

}  // namespace pantile::hopper
