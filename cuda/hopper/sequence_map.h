// Tensor maps whose loads stop at the end of a sequence, wherever it ends: rows past it arrive as
// zeros, even when a packed neighbour or an unused tail (which may hold NaN) follows in memory.
//
// The hardware bounds every axis of a map by a constant. So the row axis, of `extent` rows, is laid
// over memory so that its end falls on the sequence's end: a fourth axis with the stride of a row
// slides it. With the base moved back by `extent` rows,
//
//   address(row, start) = tensor - extent * stride + row * stride + start * stride
//
// row `extent` is the first out of bounds, and start = the sequence's end (in rows from the
// tensor's begin) puts it there; row r of a sequence of n rows has the coordinate extent - n + r.
// Axes, innermost first: dim, row, head, start, batch.
//
// NOTE: no box may lie wholly outside along `dim`. The copy engine fills such a box with zeros, but
// it still translates the address of the map's base, which lies before the tensor, in memory that
// may not be mapped (seen as cudaErrorIllegalAddress). Kernels wider than the tensor do not load
// the panels that it does not have; clear_missing_panels() has set them to zero.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "driver.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::hopper {

struct SequenceTensor {
  const char* name;
  const void* data;
  Layout layout;
  std::int64_t dim, extent, heads, batch;  // batch is 1 for packed tensors
};

// Boxes of box_rows x 64 columns of 16-bit elements, 128-byte swizzled; columns past `dim` in the
// last panel are zeros. An empty tensor gets a map that nothing may load from.
inline Status encode_sequence_map(const SequenceTensor& tensor, DType dtype, int box_rows,
                                  CUtensorMap* map) {
  Status status;
  const cuda::TensorMapEncoder encode = cuda::tensor_map_encoder(&status);
  if (encode == nullptr) {
    return status;
  }
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  // An axis of one element needs a valid stride all the same.
  const auto bytes = [](std::int64_t elements, std::int64_t count) {
    return count > 1 ? static_cast<cuuint64_t>(elements) * 2 : cuuint64_t{16};
  };
  const cuuint64_t sizes[5] = {size(tensor.dim), size(tensor.extent), size(tensor.heads),
                               size(tensor.extent + 1), size(tensor.batch)};
  const cuuint64_t row = bytes(tensor.layout.seq, tensor.extent);
  const cuuint64_t strides[4] = {row, bytes(tensor.layout.head, tensor.heads), row,
                                 bytes(tensor.layout.batch, tensor.batch)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const std::uint64_t base = reinterpret_cast<std::uintptr_t>(tensor.data) -
                             static_cast<std::uint64_t>(tensor.extent) * row;
  const CUresult result = encode(
      map,
      dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
      reinterpret_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error(StatusCode::device_error,
                         "the driver refused the tensor map of %s (CUresult %d)", tensor.name,
                         static_cast<int>(result));
  }
  return Status();
}

}  // namespace pantile::hopper
