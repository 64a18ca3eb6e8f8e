// Codes of Q, K and V as numbers again: code times scale, rotated back.
#include <cmath>

#include "core/hadamard.h"
#include "cpu/convert.h"
#include "cpu/quantize_job.h"

namespace pantile::cpu {
namespace {

constexpr int kRows = core::kBlockedRows;

// Elements of `dtype` nearest to x; where that is f16, infinity is out of reach.
void store_row(DType dtype, const float* x, int count, std::uint8_t* out) {
  constexpr double kLargestHalf = 65504.0;
  for (int c = 0; c < count; ++c) {
    auto number = static_cast<double>(x[c]);
    if (dtype == DType::f16 && !std::isnan(number)) {
      number = core::clamp(number, -kLargestHalf, kLargestHalf);
    }
    write_element(dtype, out, c, number);
  }
}

// The inverse of hadamard_rotate(): the matrix is symmetric and its square is `group`, which the
// rotation has divided by once.
void rotate_back(float* row, int dim, int group) {
  for (int distance = 1; distance < group; distance *= 2) {
    for (int c = 0; c < dim; ++c) {
      if ((c & distance) == 0) {
        const float a = row[c];
        const float b = row[c + distance];
        row[c] = a + b;
        row[c + distance] = a - b;
      }
    }
  }
  for (int c = 0; c < dim; ++c) {
    row[c] *= core::hadamard_factor(c, 1);
  }
}

void dequantize_rows(const QuantizeJob& job, const QuantizeSide& side, const Block& block,
                     const std::uint8_t* codes, const float* scales, int scale_rows, int stride,
                     float factor) {
  const QuantizeProblem& problem = job.plan->problem;
  const int group = problem.hadamard && !problem.keep_rotation ? core::hadamard_group(side.dim) : 1;
  const int padded = core::round_up(side.dim, core::kCodeAlign);
  const DType dtype = job.plan->problem.dtype;
  const std::int64_t first = (block.head * side.blocks + block.index) * kRows;
  float row[core::kMaxFp8Dim];
  for (int i = 0; i < block.rows; ++i) {
    for (int c = 0; c < side.dim; ++c) {
      row[c] = core::decode_e4m3(codes[(first + i) * padded + c]);
    }
    if (group > 1) {
      rotate_back(row, side.dim, group);
    }
    const float scale = scales[(first + i) / scale_rows * stride] * factor;
    for (int c = 0; c < side.dim; ++c) {
      row[c] *= scale;
    }
    auto* out = static_cast<std::uint8_t*>(const_cast<void*>(side.data));
    store_row(dtype, row, side.dim,
              out + (block.element + i * side.layout.seq) * dtype_bytes(dtype));
  }
}

void dequantize_values(const QuantizeJob& job, const Block& block) {
  const QuantizeTensors& t = *job.tensors;
  const DType dtype = job.plan->problem.dtype;
  const int block_k = job.plan->problem.forward.fp8.block_k;
  const std::int64_t index = block.head * job.v.blocks + block.index;
  const auto* codes =
      static_cast<const std::uint8_t*>(t.codes_v) + index * job.v.dim * std::int64_t{kRows};
  float row[core::kMaxFp8Dim];
  for (int i = 0; i < block.rows; ++i) {
    const float scale = std::fabs(t.scale_kv[(index * kRows + i) / block_k * 2 + 1]);
    for (int c = 0; c < job.v.dim; ++c) {
      row[c] = core::decode_e4m3(codes[c * kRows + core::value_column(i)]) * scale;
    }
    auto* out = static_cast<std::uint8_t*>(t.restored_v);
    store_row(dtype, row, job.v.dim,
              out + (block.element + i * job.v.layout.seq) * dtype_bytes(dtype));
  }
}

}  // namespace

void dequantize_block(const QuantizeJob& job, const Block& block, bool is_query, bool is_key) {
  const QuantizeTensors& t = *job.tensors;
  const Fp8Format& format = job.plan->problem.forward.fp8;
  const QuantizeProblem& problem = job.plan->problem;
  // The scale of Q holds the group once, which stands in for the 1 / group of the rotation.
  const int group = problem.hadamard ? core::hadamard_group(job.q.dim) : 1;
  const auto balance = static_cast<float>(core::rotation_balance(group));
  if (is_query) {
    const float factor = 1.0f / (problem.keep_rotation ? balance : static_cast<float>(group));
    dequantize_rows(job, job.q, block, static_cast<const std::uint8_t*>(t.codes_q), t.scale_q,
                    format.block_q, 1, factor);
  } else if (is_key) {
    dequantize_rows(job, job.k, block, static_cast<const std::uint8_t*>(t.codes_k), t.scale_kv,
                    format.block_k, 2, problem.keep_rotation ? balance : 1.0f);
  } else {
    dequantize_values(job, block);
  }
}

}  // namespace pantile::cpu
