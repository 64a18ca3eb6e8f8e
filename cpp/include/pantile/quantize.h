// FP8: Q, K and V as e4m3 codes with scales, in the form that FP8 attention reads.
//
//   ForwardProblem forward;  forward.dtype = DType::e4m3;  /* shapes, fp8 format */
//   QuantizeProblem quantize;  quantize.forward = forward;  /* dtype and layouts of the inputs */
//   plan_quantize(...); run_quantize(...); plan_forward(forward, ...); run_forward(...);
//
// A code times its scale is the number it stands for: q . k is nearly the sum of code_q * code_k,
// times scale_q * scale_k. Scales are powers of two (for e4m3 inputs: times the descale).
//
// Operands are cut into blocks of 128 rows that never hold rows of two sequences. Sequence b starts
// with block b * ceil(seqlen / 128), packed with block cu_seqlens[b] / 128 + b; its row i is row
// r = 128 * (first block) + i of an operand. Rows of a block behind the end of its sequence are
// zeros; blocks without any row of a sequence are neither written nor read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pantile/attention.h"
#include "pantile/device.h"
#include "pantile/export.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile {

struct QuantizeProblem {
  // The attention that will read the operands: dtype e4m3, shapes, packing and fp8 format. Its
  // window, scale, wants_lse, layouts, fp8.output and fp8.exp are not read.
  ForwardProblem forward;
  DType dtype = DType::bf16;  // of the inputs: bf16, f16, f32, or e4m3 with descales
  Layout q, k, v;             // of the inputs, shaped like those of ForwardProblem
  // Rotates Q and K by a Hadamard matrix with random signs, which spreads outliers over channels
  // and leaves Q K^T as it is. Channels are rotated in groups of the largest power of two that
  // divides head_dim. Not for e4m3 inputs, nor is fp8.smooth_k.
  bool hadamard = true;
  // The other way: reads the operands and writes what they stand for. `dtype` and the layouts are
  // then those of what is written, never e4m3.
  bool dequantize = false;
  // dequantize only: Q and K stay rotated, which leaves each number exact in 16 bits and Q K^T as
  // it is. Q is H D q / b and K is H D k b / group, with D the signs, H Sylvester's matrix and b =
  // core::rotation_balance(group). Nothing else differs; without hadamard nothing at all.
  bool keep_rotation = false;
};

// How many elements the operands have. blocks_*: of 128 rows.
struct QuantizedSizes {
  std::int64_t blocks_q = 0, blocks_k = 0;
  std::int64_t codes_q = 0, codes_k = 0, codes_v = 0;
  std::int64_t scale_q = 0, scale_kv = 0;
  std::int64_t nonfinite_v = 0;
  std::int64_t q_dot_mean = 0;  // 0 unless smooth_k
  std::int64_t mean_k = 0;      // 0 unless smooth_k
};
PANTILE_API QuantizedSizes quantized_sizes(const ForwardProblem& forward);

struct QuantizeTensors {
  const void* q = nullptr;  // not with dequantize, nor are k, v and the descales
  const void* k = nullptr;
  const void* v = nullptr;
  // e4m3 inputs only, [batch, heads_k], positive: an input code times its descale is the number.
  // Query head h takes the one of its key head, h / (heads_q / heads_k).
  const float* descale_q = nullptr;
  const float* descale_k = nullptr;
  const float* descale_v = nullptr;
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* seqused_q = nullptr;
  const std::int32_t* seqused_k = nullptr;

  // dequantize only, written: Q, K less its mean if it was smoothed, V; code times scale, rotated
  // back, rounded to the nearest. V is 0 where nonfinite_v has a bit. Rows that no sequence uses
  // are not written. A 16-bit backward on them belongs to the FP8 forward's O, and to its LSE less
  // scale * q_dot_mean.
  void* restored_q = nullptr;
  void* restored_k = nullptr;
  void* restored_v = nullptr;

  // Written, with dequantize read; 16-byte aligned. NaN and Inf become the code 0x7f (NaN) in Q
  // and K.
  void* codes_q =
      nullptr;  // [heads_q, 128 * blocks_q, head_dim rounded up to 16], padded with zeros
  void* codes_k =
      nullptr;  // [heads_k, 128 * blocks_k, head_dim rounded up to 16], padded with zeros
  // [heads_k, blocks_k, head_dim_v, 128]: each channel's keys side by side, key t of a block in
  // column core::value_column(t). NaN and Inf become the code 0: see nonfinite_v.
  void* codes_v = nullptr;
  float* scale_q = nullptr;   // [heads_q, 128 * blocks_q / block_q]
  float* scale_kv = nullptr;  // [heads_k, 128 * blocks_k / block_k, 2]: of K, of V
  // [heads_k, blocks_k, head_dim_v, 4]: bit t % 32 of word t / 32 is set when key t of the block
  // holds NaN or Inf in this channel. Only written for blocks with such a key; each scale of V in
  // these has its sign bit set, its absolute value being the scale. The scale of a block of V whose
  // finite values are all 0 is 0 or -0.
  std::uint32_t* nonfinite_v = nullptr;
  float* q_dot_mean = nullptr;  // [heads_q, 128 * blocks_q]: Q . mean_k; smooth_k only
  float* mean_k = nullptr;      // [batch, heads_k, head_dim]; smooth_k only
};

struct QuantizePlan {
  QuantizeProblem problem;
  DeviceProps device;
  const KernelInfo* kernel = nullptr;
  int tile_q = 0;  // query rows a work item quantises
  int tile_k = 0;  // keys a work item quantises
  int blocks = 0;
  Workspace workspace;
};

// As plan_forward, run_forward and explain_forward.
PANTILE_API Status plan_quantize(const QuantizeProblem& problem, const DeviceProps& device,
                                 const PlanOptions& options, QuantizePlan* plan);
PANTILE_API Status run_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors,
                                void* workspace, void* stream);
PANTILE_API int explain_quantize(const QuantizeProblem& problem, const DeviceProps& device,
                                 const PlanOptions& options, Verdict* verdicts, int capacity);

PANTILE_API const char* fp8_exp_name(Fp8Exp exp);

}  // namespace pantile
