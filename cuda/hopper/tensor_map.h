// Tensor maps of attention tensors, encoded on the host and passed to kernels by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "driver.h"
#include "pantile/dtype.h"
#include "pantile/problem.h"
#include "tile/panel.h"

namespace pantile::hopper {

// A tensor [batch, rows, heads, dim] of 16-bit elements; packed tensors have batch 1. A length of 0
// is not allowed: the caller has a tensor to point to or does not launch.
struct MappedTensor {
  const char* name;  // for messages
  const void* base;
  DType dtype;
  std::int64_t batch, rows, heads, dim;
  Layout layout;  // elements
};

// What a stride of 0 (an expanded axis) means for coordinates: see MapSteps.
inline bool is_expanded(std::int64_t size, std::int64_t stride) {
  return size > 1 && stride == 0;
}

// Panels that one copy of a tile of `columns` columns moves: all, when the tensor's rows are whole
// panels; else one at a time, because only the end of the innermost axis cuts a panel short.
inline int panels_per_copy(std::int64_t dim, int columns) {
  return dim % tile::kPanelColumns == 0 ? columns / tile::kPanelColumns : 1;
}

// The map has the axes {column, row, panel, head, batch}: rows of whole panels are split into
// panels of 64 columns, others are one panel of `dim` columns. A box is `box_rows` rows of
// panels_per_copy() panels, 128-byte swizzled; what lies outside the tensor reads as zeros and is
// not written. An expanded head or batch axis has one element in the map: its coordinate must be 0.
inline Status encode_tensor_map(const MappedTensor& t, tile::PanelTile box_tile, CUtensorMap* map) {
  Status status;
  const cuda::TensorMapEncoder encode = cuda::tensor_map_encoder(&status);
  if (encode == nullptr) {
    return status;
  }
  constexpr cuuint64_t kAnyStride = 16;  // of an axis that is never stepped along; a legal value
  const auto bytes = [](std::int64_t size, std::int64_t stride) {
    return size <= 1 || stride == 0 ? kAnyStride
                                    : static_cast<cuuint64_t>(stride * tile::kElementBytes);
  };
  const auto length = [](std::int64_t size, std::int64_t stride) {
    return size <= 1 || stride == 0 ? cuuint64_t{1} : static_cast<cuuint64_t>(size);
  };
  const bool whole_panels = t.dim % tile::kPanelColumns == 0;
  const auto dim = static_cast<cuuint64_t>(t.dim);
  const cuuint64_t dims[5] = {whole_panels ? tile::kPanelColumns : dim,
                              length(t.rows, t.layout.seq),
                              whole_panels ? dim / tile::kPanelColumns : 1,
                              length(t.heads, t.layout.head), length(t.batch, t.layout.batch)};
  const cuuint64_t strides[4] = {bytes(t.rows, t.layout.seq), tile::kPanelRowBytes,
                                 bytes(t.heads, t.layout.head), bytes(t.batch, t.layout.batch)};
  const cuuint32_t box[5] = {
      tile::kPanelColumns, static_cast<cuuint32_t>(box_tile.rows),
      static_cast<cuuint32_t>(panels_per_copy(t.dim, box_tile.panels() * tile::kPanelColumns)), 1,
      1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  // Rows that begin between two sectors of 32 bytes: reading ahead to 256 bytes costs more than it
  // brings (head dim 72, forward at 4k keys: 12 % slower; at 80 no difference).
  const bool whole_sectors = t.dim * tile::kElementBytes % 32 == 0;
  const CUresult result = encode(
      map,
      t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      5, const_cast<void*>(t.base), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B,
      whole_sectors ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error(
        StatusCode::device_error,
        "cuTensorMapEncodeTiled refused %s (CUresult %d): dim %lld, rows %lld, heads %lld, batch "
        "%lld, strides seq %lld, head %lld, batch %lld",
        t.name, static_cast<int>(result), static_cast<long long>(t.dim),
        static_cast<long long>(t.rows), static_cast<long long>(t.heads),
        static_cast<long long>(t.batch), static_cast<long long>(t.layout.seq),
        static_cast<long long>(t.layout.head), static_cast<long long>(t.layout.batch));
  }
  return Status();
}

}  // namespace pantile::hopper
