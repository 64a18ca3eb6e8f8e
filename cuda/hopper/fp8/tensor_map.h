// Tensor maps of FP8 operands: bytes in the quantiser's layouts (pantile/quantize.h), all heads one
// after the other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "driver.h"
#include "pantile/status.h"

namespace pantile::hopper {

struct CodeTensor {
  const char* name;  // for messages
  const void* base;
  std::int64_t columns, rows, matrices;  // contiguous
};

// A box is box_columns x box_rows of one matrix; what lies outside it reads as zeros.
inline Status encode_code_map(const CodeTensor& t, int box_columns, int box_rows,
                              CUtensorMap* map) {
  Status status;
  const cuda::TensorMapEncoder encode = cuda::tensor_map_encoder(&status);
  if (encode == nullptr) {
    return status;
  }
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(t.columns), static_cast<cuuint64_t>(t.rows),
                              static_cast<cuuint64_t>(t.matrices)};
  const cuuint64_t strides[2] = {dims[0], dims[0] * dims[1]};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(t.base), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_columns == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error(
        StatusCode::device_error,
        "cuTensorMapEncodeTiled refused the codes of %s (CUresult %d): %lld x %lld x %lld", t.name,
        static_cast<int>(result), static_cast<long long>(t.columns), static_cast<long long>(t.rows),
        static_cast<long long>(t.matrices));
  }
  return Status();
}

}  // namespace pantile::hopper
