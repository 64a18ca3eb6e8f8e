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

// The map has the axes {dim, row, head, batch}. A box is one panel, 64 elements x `box_rows` rows,
// of a 128-byte swizzled tile; what lies outside the tensor reads as zeros and is not written. An
// expanded head or batch axis has one element in the map: its coordinate must be 0.
inline Status encode_tensor_map(const MappedTensor& t, int box_rows, CUtensorMap* map) {
  Status status;
  const cuda::TensorMapEncoder encode = cuda::tensor_map_encoder(&status);
  if (encode == nullptr) {
    return status;
  }
  constexpr std::int64_t kElement = tile::kElementBytes;
  const std::int64_t sizes[] = {t.rows, t.heads, t.batch};
  const std::int64_t strides[] = {t.layout.seq, t.layout.head, t.layout.batch};
  cuuint64_t dims[4] = {static_cast<cuuint64_t>(t.dim)};
  cuuint64_t stride_bytes[3];
  for (int axis = 0; axis < 3; ++axis) {
    const bool one = sizes[axis] <= 1 || strides[axis] == 0;
    dims[axis + 1] = one ? 1 : static_cast<cuuint64_t>(sizes[axis]);
    // Never used to step; it only has to be a legal value.
    stride_bytes[axis] = one ? 16 : static_cast<cuuint64_t>(strides[axis] * kElement);
  }
  const cuuint32_t box[4] = {tile::kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = encode(
      map,
      t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, const_cast<void*>(t.base), dims, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error(StatusCode::device_error,
                         "cuTensorMapEncodeTiled refused %s (CUresult %d): dim %lld, rows %lld, "
                         "heads %lld, batch %lld, strides seq %lld, head %lld, batch %lld",
                         t.name, static_cast<int>(result), static_cast<long long>(t.dim),
                         static_cast<long long>(t.rows), static_cast<long long>(t.heads),
                         static_cast<long long>(t.batch), static_cast<long long>(t.layout.seq),
                         static_cast<long long>(t.layout.head),
                         static_cast<long long>(t.layout.batch));
  }
  return Status();
}

}  // namespace pantile::hopper
