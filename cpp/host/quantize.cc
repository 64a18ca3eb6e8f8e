// Sizes and names of the FP8 format; plan and run are in attention.cc, with those of attention.
#include "pantile/quantize.h"

#include "core/blocked.h"

namespace pantile {
namespace {

constexpr std::int64_t kRows = core::kBlockedRows;

std::int64_t block_count(bool packed, std::int64_t total, std::int64_t length, std::int64_t batch) {
  return packed ? core::packed_blocks(total, static_cast<int>(batch), core::kBlockedRows)
                : batch * core::ceil_div(length, kRows);
}

}  // namespace

QuantizedSizes quantized_sizes(const ForwardProblem& p) {
  const std::int64_t dim = core::round_up(p.head_dim, std::int64_t{core::kCodeAlign});
  QuantizedSizes sizes;
  sizes.blocks_q = block_count(p.packed_q, p.total_q, p.seqlen_q, p.batch);
  sizes.blocks_k = block_count(p.packed_k, p.total_k, p.seqlen_k, p.batch);
  sizes.codes_q = p.heads_q * kRows * sizes.blocks_q * dim;
  sizes.codes_k = p.heads_k * kRows * sizes.blocks_k * dim;
  sizes.codes_v = p.heads_k * kRows * sizes.blocks_k * p.head_dim_v;
  sizes.scale_q = p.heads_q * kRows * sizes.blocks_q / core::max_of(p.fp8.block_q, 1);
  sizes.scale_kv = 2 * p.heads_k * kRows * sizes.blocks_k / core::max_of(p.fp8.block_k, 1);
  sizes.nonfinite_v = p.heads_k * sizes.blocks_k * p.head_dim_v * (kRows / 32);
  if (p.fp8.smooth_k) {
    sizes.q_dot_mean = p.heads_q * kRows * sizes.blocks_q;
    sizes.mean_k = p.batch * p.heads_k * p.head_dim;
  }
  return sizes;
}

const char* fp8_exp_name(Fp8Exp exp) {
  switch (exp) {
    case Fp8Exp::code: return "code";
    case Fp8Exp::mixed: return "mixed";
    case Fp8Exp::exp2: return "exp2";
  }
  return "?";
}

}  // namespace pantile
