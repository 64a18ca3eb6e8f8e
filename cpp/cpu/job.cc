#include "cpu/job.h"

#include <cmath>
#include <cstring>

#include "expression/program.h"
#include "pantile/expression.h"
#include "pantile/quantize.h"

namespace pantile::cpu {
namespace {

Operand operand(const void* data, const Layout& layout, std::int64_t max_length,
                const std::int32_t* cu_seqlens, const std::int32_t* seqused) {
  Operand result;
  result.data = const_cast<void*>(data);
  result.head_stride = layout.head;
  result.side.batch_stride = layout.batch;
  result.side.seq_stride = layout.seq;
  result.side.max_length = static_cast<int>(max_length);
  result.side.cu_seqlens = cu_seqlens;
  result.side.seqused = seqused;
  return result;
}

Operand query_operand(const void* data, const Layout& layout, const ForwardProblem& problem,
                      const ForwardTensors& tensors) {
  return operand(data, layout, problem.seqlen_q, tensors.cu_seqlens_q, tensors.seqused_q);
}

Operand key_operand(const void* data, const Layout& layout, const ForwardProblem& problem,
                    const ForwardTensors& tensors) {
  Operand keys = operand(data, layout, problem.seqlen_k, tensors.cu_seqlens_k, tensors.seqused_k);
  keys.side.begins = tensors.k_begin;
  return keys;
}

ScoreJob score_job(const expression::Programs& programs, const CapturedTensor* captured) {
  ScoreJob job;
  job.exists = true;
  job.value = programs.value.view();
  job.value_and_slope = programs.value_and_slope.view();
  job.gradients = programs.gradients.view();
  job.addends = programs.addends.data();
  job.addend_count = static_cast<int>(programs.addends.size());
  job.captured = captured;
  return job;
}

VariantJob variant_job(const ForwardProblem& problem, const VariantTensors& tensors) {
  const Variant& variant = problem.variant;
  VariantJob job;
  job.any_score = variant.softcap > 0.0f || variant.has_alibi || variant.has_bias ||
                  variant.score != Expression::none;
  job.softcap = variant.softcap;
  job.slopes = tensors.alibi_slopes;
  job.slope_batch_stride = variant.alibi_by_batch ? problem.heads_q : 0;
  job.sinks = tensors.sinks;
  job.bias_dtype = variant.bias_dtype;
  job.bias = tensors.bias;
  job.bias_batch = variant.bias.batch;
  job.bias_head = variant.bias.head;
  job.bias_query = variant.bias.query;
  job.dropped = variant.dropout;
  if (tensors.dropout_seed != nullptr) {
    job.key = core::philox_key(static_cast<std::uint64_t>(tensors.dropout_seed[0]),
                               static_cast<std::uint64_t>(tensors.dropout_seed[1]));
  }
  job.mask.clauses = mask_clauses(variant);
  job.mask.blocks = tensors.block_mask;
  job.mask.elements = tensors.mask;
  job.mask.block_layout = variant.block_mask;
  job.mask.element_layout = variant.mask;
  job.mask.block = core::max_of(variant.mask_block_size, 1);
  job.mask.query_ids = tensors.query_ids;
  job.mask.key_ids = tensors.key_ids;
  job.mask.batch_queries = variant.mask_queries;
  job.mask.batch_keys = variant.mask_keys;
  if (variant.mask_expression != Expression::none) {
    job.mask.has_expression = true;
    job.mask_programs = &expression::programs_of(variant.mask_expression);
    job.mask.program = job.mask_programs->value.view();
    job.mask.captured = tensors.mask_captured;
  }
  if (variant.score != Expression::none) {
    job.score_programs = &expression::programs_of(variant.score);
    job.score = score_job(*job.score_programs, tensors.score_captured);
  }
  job.mask.prefixes = tensors.prefixes;
  job.mask.batch_prefixes = variant.mask_prefixes;
  job.batch_offset = static_cast<std::uint32_t>(variant.batch_offset);
  job.head_offset = static_cast<std::uint32_t>(variant.head_offset);
  job.query_offset = static_cast<std::uint32_t>(variant.query_offset);
  job.key_offset = static_cast<std::uint32_t>(variant.key_offset);
  return job;
}

void fill_job(const ForwardProblem& problem, const ForwardTensors& tensors, Job* job) {
  job->dtype = problem.dtype;
  job->batch = static_cast<int>(problem.batch);
  job->dim = static_cast<int>(problem.head_dim);
  job->dim_v = static_cast<int>(problem.head_dim_v);
  job->heads = core::Heads{static_cast<int>(problem.heads_q), static_cast<int>(problem.heads_k)};
  job->window_left = problem.window_left;
  job->window_right = problem.window_right;
  job->mask_shift = tensors.mask_shift;
  job->scale = problem.scale;
  job->q = query_operand(tensors.q, problem.q, problem, tensors);
  job->k = key_operand(tensors.k, problem.k, problem, tensors);
  job->v = key_operand(tensors.v, problem.v, problem, tensors);
  job->o = query_operand(tensors.o, problem.o, problem, tensors);
  if (problem.page_size > 0) {
    // Where there is no table yet, the job serves to measure scratch memory.
    static constexpr std::int32_t kNoTable = 0;
    job->pages.table = tensors.block_table == nullptr ? &kNoTable : tensors.block_table;
    job->pages.stride = problem.table_stride;
    job->pages.page_size = static_cast<int>(problem.page_size);
  }
  job->variant = variant_job(problem, tensors.variant);
}

// The low bits of O: contiguous, whatever the strides of O.
Operand o_low_operand(const std::int8_t* data, const ForwardProblem& problem,
                      const ForwardTensors& tensors) {
  const std::int64_t row = problem.heads_q * problem.head_dim_v;
  return query_operand(data, Layout{problem.seqlen_q * row, row, problem.head_dim_v, 1}, problem,
                       tensors);
}

RowValues row_values(const float* data, const ForwardProblem& problem) {
  RowValues result;
  result.data = const_cast<float*>(data);
  result.head_stride = problem.packed_q ? problem.total_q : problem.seqlen_q;
  result.batch_stride = problem.packed_q ? 0 : problem.heads_q * problem.seqlen_q;
  return result;
}

core::TileOrder tile_order(const ForwardProblem& problem, std::int64_t length, int tile_size,
                           std::int64_t heads, int section, core::TileDirection direction) {
  const auto tiles = static_cast<int>(core::ceil_div<std::int64_t>(length, tile_size));
  return core::TileOrder(tiles, static_cast<int>(heads), static_cast<int>(problem.batch), section,
                         direction);
}

// Rows of one packed tensor that no sequence holds, set to zero.
void clear_tensor(DType dtype, const Operand& operand, int heads, int dim, std::int64_t begin,
                  std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (int head = 0; head < heads; ++head) {
      const std::int64_t offset = row * operand.side.seq_stride + head * operand.head_stride;
      std::memset(static_cast<char*>(operand.data) + offset * dtype_bytes(dtype), 0,
                  static_cast<std::size_t>(dim * dtype_bytes(dtype)));
    }
  }
}

void clear_tensor_outside(DType dtype, const Operand& operand, int heads, int dim,
                          std::int64_t batch, std::int64_t total) {
  if (operand.side.cu_seqlens != nullptr) {
    clear_tensor(dtype, operand, heads, dim, 0, operand.side.cu_seqlens[0]);
    clear_tensor(dtype, operand, heads, dim, operand.side.cu_seqlens[batch], total);
  }
}

// Parts of the heads that sum gradients of captured tensors side by side, each in doubles of its
// own: no more than 256 MB of them.
int captured_parts(const BackwardProblem& problem) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 25;
  constexpr std::int64_t kMostParts = 8;
  if (problem.wants_grad_captured == 0) {
    return 0;
  }
  const std::int64_t heads = problem.forward.batch * problem.forward.heads_q;
  const std::int64_t elements = core::max_of<std::int64_t>(problem.grad_captured_elements, 1);
  return static_cast<int>(
      core::clamp(kMostElements / elements, std::int64_t{1},
                  core::max_of<std::int64_t>(core::min_of(heads, kMostParts), 1)));
}

void place_captured(const BackwardProblem& problem, const BackwardTensors& tensors,
                    BackwardJob* job) {
  job->captured_parts = captured_parts(problem);
  job->captured_elements = problem.grad_captured_elements;
  const int count = captured_count(problem.forward.variant.score);
  const CapturedTensor* captured = tensors.forward.variant.score_captured;
  std::int64_t begin = 0;
  for (int i = 0; i < count && captured != nullptr; ++i) {
    if ((problem.wants_grad_captured >> i & 1u) != 0) {
      job->captured_begin[i] = begin;
      begin += captured_elements(captured[i]);
    }
  }
}

}  // namespace

ForwardJob forward_job(const ForwardPlan& plan, const ForwardTensors& tensors) {
  const ForwardProblem& problem = plan.problem;
  ForwardJob job;
  fill_job(problem, tensors, &job);
  job.output_dtype = output_dtype(problem);
  job.lse = row_values(tensors.lse, problem);
  job.o_low = o_low_operand(tensors.o_low, problem, tensors);
  job.max_logit = tensors.max_logit;
  job.item_rows = plan.tile_q;
  // Longest first, of all heads, so that threads finish together under a causal mask.
  const auto all_heads = static_cast<int>(problem.heads_q * problem.batch);
  job.order = tile_order(problem, problem.seqlen_q, job.item_rows, problem.heads_q,
                         core::max_of(all_heads, 1), core::TileDirection::descending);
  return job;
}

BackwardJob backward_job(const BackwardPlan& plan, const BackwardTensors& tensors) {
  const ForwardProblem& problem = plan.problem.forward;
  const ForwardTensors& inputs = tensors.forward;
  BackwardJob job;
  fill_job(problem, inputs, &job);
  job.grad_o = query_operand(tensors.grad_o, plan.problem.grad_o, problem, inputs);
  job.grad_q = query_operand(tensors.grad_q, plan.problem.grad_q, problem, inputs);
  job.grad_k = key_operand(tensors.grad_k, plan.problem.grad_k, problem, inputs);
  job.grad_v = key_operand(tensors.grad_v, plan.problem.grad_v, problem, inputs);
  job.total_k = problem.total_k;
  job.lse = row_values(inputs.lse, problem);
  job.grad_lse = row_values(tensors.grad_lse, problem);
  job.o_low = o_low_operand(tensors.o_low, problem, inputs);
  job.row_order = tile_order(problem, problem.seqlen_q, kBackwardRows, problem.heads_q, 1,
                             core::TileDirection::ascending);
  // As many heads at a time as there are threads: items of one head read and add to the same rows,
  // which stay in L2 (measured at d64 in f32, 5 % faster than all heads at a time), and threads on
  // different heads do not wait for each other's turns.
  job.item_keys = plan.tile_k;
  job.key_order = tile_order(problem, problem.seqlen_k, job.item_keys, problem.heads_k,
                             core::max_of(plan.device.threads, 1), core::TileDirection::ascending);
  job.row_tiles = static_cast<int>(core::ceil_div<std::int64_t>(problem.seqlen_q, kBackwardRows));
  job.key_tiles = static_cast<int>(core::ceil_div<std::int64_t>(problem.seqlen_k, job.item_keys));
  job.variant_gradients = tensors.variant;
  job.wants_grad_bias = plan.problem.wants_grad_bias;
  if (job.wants_grad_bias) {
    const BiasShape shape = bias_gradient_shape(problem);
    job.bias_batches = static_cast<int>(shape.batch);
    job.bias_heads = static_cast<int>(shape.heads);
    job.bias_rows = static_cast<int>(shape.queries);
    job.bias_keys = static_cast<int>(shape.keys);
  }
  place_captured(plan.problem, tensors, &job);
  return job;
}

Fp8ForwardJob fp8_forward_job(const ForwardPlan& plan, const ForwardTensors& tensors) {
  const QuantizedSizes sizes = quantized_sizes(plan.problem);
  Fp8ForwardJob job;
  static_cast<ForwardJob&>(job) = forward_job(plan, tensors);
  job.dtype = plan.problem.fp8.output;
  job.format = plan.problem.fp8;
  job.tensors = tensors.fp8;
  job.blocks_q = sizes.blocks_q;
  job.blocks_k = sizes.blocks_k;
  return job;
}

void clear_outside(const ForwardJob& job, const ForwardProblem& problem) {
  clear_tensor_outside(job.output_dtype, job.o, job.heads.heads_q, job.dim_v, problem.batch,
                       problem.total_q);
  if (job.q.side.cu_seqlens != nullptr && job.lse.data != nullptr) {
    for (int head = 0; head < job.heads.heads_q; ++head) {
      float* lse = job.lse.data + head * job.lse.head_stride;
      for (std::int64_t row = 0; row < job.q.side.cu_seqlens[0]; ++row) {
        lse[row] = -HUGE_VALF;
      }
      for (std::int64_t row = job.q.side.cu_seqlens[problem.batch]; row < problem.total_q; ++row) {
        lse[row] = -HUGE_VALF;
      }
    }
  }
}

void clear_outside(const BackwardJob& job, const ForwardProblem& problem) {
  clear_tensor_outside(job.dtype, job.grad_q, job.heads.heads_q, job.dim, problem.batch,
                       problem.total_q);
  if (problem.has_k_begin) {
    return;  // all rows of dK and dV are written
  }
  clear_tensor_outside(job.dtype, job.grad_k, job.heads.heads_k, job.dim, problem.batch,
                       problem.total_k);
  clear_tensor_outside(job.dtype, job.grad_v, job.heads.heads_k, job.dim_v, problem.batch,
                       problem.total_k);
}

}  // namespace pantile::cpu
