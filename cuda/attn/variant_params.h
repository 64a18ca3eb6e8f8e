// What the kernels of variants are told beside the parameters of plain attention. No CUDA headers.
#pragma once

#include <cstdint>

#include "attn/tile_mask.h"
#include "pantile/variant.h"

namespace pantile::attn {

// A tensor that an expression captures. Distances in elements.
struct CapturedParams {
  const void* data;
  std::int64_t stride[kMaxCapturedAxes];
  int last[kMaxCapturedAxes];  // index along each axis
};

// One struct for all variants; a kernel reads what its own needs. Distances in elements.
struct VariantParams {
  // Forward: base-2 logits in a unit of the scores that exponents are made of, and natural logits
  // in a unit of what row maxima are taken of.
  float unit;
  float logit_scale;

  // Softcap: the argument of its function in units of the raw scores, see attn::capped(), and
  // softcap * log2(e).
  float cap_inner;
  float cap_log2;

  const float* alibi_slopes;  // natural; [heads], or [batch][heads]:
  std::int64_t alibi_batch;   // distance of batches, or 0

  const void* bias;
  std::int64_t bias_batch, bias_head, bias_query;
  float bias_factor;  // scores in a unit of the bias

  const std::int64_t* dropout_seed;  // {seed, offset}
  std::uint32_t dropout_add;         // 256 - dropped, in every byte
  float keep_scale;                  // 256 / (256 - dropped); 1 without dropout
  std::uint32_t batch_offset, head_offset, row_offset, key_offset;  // of the dropout mask

  // A mask beside the window, and the lists of the tiles that it leaves.
  MaskParams mask;
  TileLists lists;

  // Backward: gradients that are wanted, else null. Of the slopes, the sums of every warp over
  // every tile of keys, [heads][key_tile_count][warps], zero before. Of the bias, fp32, zero
  // before.
  float* grad_alibi_parts;
  std::int64_t key_tile_count;
  float* grad_bias;
  std::int64_t grad_bias_batch, grad_bias_head, grad_bias_query;

  // Of expressions: natural logits in a unit of the scores that they are computed from; what the
  // score captures, then what the mask does; and the gradients of the first, zero before.
  float score_unit;
  CapturedParams captured[kMaxCaptured];
  float* grad_captured[kMaxCaptured];
};

}  // namespace pantile::attn
