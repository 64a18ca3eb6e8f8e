// Three passes over work items of 128 rows: partial sums of K for its mean, the mean, and the
// codes. The first two only with K smoothing. Order of sums, rotation and rounding: core/blocked.h,
// core/hadamard.h, core/scaling.h. Dequantising is one pass (dequantize.cc).
#include "pantile/quantize.h"

#include <cinttypes>
#include <cstring>

#include "core/hadamard.h"
#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/quantize_job.h"

namespace pantile::cpu {
namespace {

constexpr int kRows = core::kBlockedRows;

// The rows of a block as floats, [kRows][dim].
void load(const QuantizeJob& job, const QuantizeSide& side, const Block& block, float* rows) {
  const DType dtype = job.plan->problem.dtype;
  for (int i = 0; i < block.rows; ++i) {
    load_row(dtype, side.data, block.element + i * side.layout.seq, side.dim, rows + i * side.dim);
  }
}

float amax_of(const float* x, int count) {
  float amax = 0.0f;
  for (int i = 0; i < count; ++i) {
    amax = core::raise_amax(amax, x[i]);
  }
  return amax;
}

// What e4m3 inputs are multiplied by: the scale takes it in.
float descale_of(const QuantizeJob& job, const float* descales, const Block& block, int key_head) {
  return descales == nullptr ? 1.0f : descales[block.batch * job.heads.heads_k + key_head];
}

// ---- the mean of K ------------------------------------------------------------------------------

void sum_block(const QuantizeJob& job, const Block& block, float* rows) {
  const int dim = job.k.dim;
  load(job, job.k, block, rows);
  float* out = job.partial + (block.head * job.k.blocks + block.index) * dim;
  for (int c = 0; c < dim; ++c) {
    float sums[core::kMeanRowSums] = {};
    for (int i = 0; i < block.rows; ++i) {
      sums[i % core::kMeanRowSums] += core::mean_term(rows[i * dim + c]);
    }
    out[c] = core::fold_sums(sums, core::kMeanRowSums);
  }
}

void mean_of_head(const QuantizeJob& job, int batch, int head) {
  const int dim = job.k.dim;
  const int length = core::locate_sequence(job.k.sequences, batch).length;
  const int blocks = core::ceil_div(length, kRows);
  const std::int64_t first = head * job.k.blocks + core::first_block(job.k.sequences, batch);
  for (int c = 0; c < dim; ++c) {
    float sums[core::kMeanBlockSums] = {};
    for (int i = 0; i < blocks; ++i) {
      sums[i % core::kMeanBlockSums] += job.partial[(first + i) * dim + c];
    }
    job.tensors->mean_k[(static_cast<std::int64_t>(batch) * job.k.heads + head) * dim + c] =
        core::channel_mean(core::fold_sums(sums, core::kMeanBlockSums), length);
  }
}

// ---- codes --------------------------------------------------------------------------------------

// Rows of Q or K, as they are to be rounded: smoothed and rotated.
void prepare_rows(const QuantizeJob& job, const Block& block, int dim, const float* mean,
                  bool is_query, float* rows) {
  const int group = job.plan->problem.hadamard ? core::hadamard_group(dim) : 1;
  for (int i = 0; i < block.rows; ++i) {
    float* row = rows + i * dim;
    if (mean != nullptr && !is_query) {
      for (int c = 0; c < dim; ++c) {
        row[c] -= mean[c];
      }
    }
    if (group > 1) {
      core::hadamard_rotate(row, dim, group);
    }
  }
}

void dot_with_mean(const QuantizeJob& job, const Block& block, const float* mean,
                   const float* rows) {
  const int dim = job.q.dim;
  float* out = job.tensors->q_dot_mean + (block.head * job.q.blocks + block.index) * kRows;
  for (int i = 0; i < block.rows; ++i) {
    float dot = 0.0f;
    for (int c = 0; c < dim; ++c) {
      dot += rows[i * dim + c] * mean[c];
    }
    out[i] = dot;
  }
}

// Codes and scales of a block of Q or K. `stride` is the distance between scales in `scales`.
void write_rows(const QuantizeSide& side, const Block& block, const float* rows, int scale_rows,
                float factor, float descale, std::uint8_t* codes, float* scales, int stride) {
  const int dim = side.dim;
  const int padded = core::round_up(dim, core::kCodeAlign);
  const float limit = core::score_code_limit(dim);
  const std::int64_t first = (block.head * side.blocks + block.index) * kRows;
  codes += first * padded;
  std::memset(codes, 0, static_cast<std::size_t>(kRows) * static_cast<std::size_t>(padded));
  for (int begin = 0; begin < block.rows; begin += scale_rows) {
    const int end = core::min_of(begin + scale_rows, block.rows);
    const core::BlockScale scale =
        core::block_scale(amax_of(rows + begin * dim, (end - begin) * dim), limit);
    scales[(first + begin) / scale_rows * stride] = core::stored_scale(scale, factor) * descale;
    for (int i = begin; i < end; ++i) {
      for (int c = 0; c < dim; ++c) {
        codes[i * padded + c] = core::quantize(rows[i * dim + c], scale, limit);
      }
    }
  }
}

const float* mean_of(const QuantizeJob& job, int batch, int key_head) {
  if (!job.plan->problem.forward.fp8.smooth_k) {
    return nullptr;
  }
  return job.tensors->mean_k +
         (static_cast<std::int64_t>(batch) * job.k.heads + key_head) * job.k.dim;
}

void quantize_queries(const QuantizeJob& job, const Block& block, float* rows) {
  const QuantizeTensors& t = *job.tensors;
  const Fp8Format& format = job.plan->problem.forward.fp8;
  const int key_head = job.heads.key_head(block.head);
  const float* mean = mean_of(job, block.batch, key_head);
  load(job, job.q, block, rows);
  if (mean != nullptr) {
    dot_with_mean(job, block, mean, rows);
  }
  prepare_rows(job, block, job.q.dim, mean, true, rows);
  const int group = job.plan->problem.hadamard ? core::hadamard_group(job.q.dim) : 1;
  write_rows(job.q, block, rows, format.block_q, static_cast<float>(group),
             descale_of(job, t.descale_q, block, key_head), static_cast<std::uint8_t*>(t.codes_q),
             t.scale_q, 1);
}

void quantize_keys(const QuantizeJob& job, const Block& block, float* rows) {
  const QuantizeTensors& t = *job.tensors;
  load(job, job.k, block, rows);
  prepare_rows(job, block, job.k.dim, mean_of(job, block.batch, block.head), false, rows);
  write_rows(job.k, block, rows, job.plan->problem.forward.fp8.block_k, 1.0f,
             descale_of(job, t.descale_k, block, block.head), static_cast<std::uint8_t*>(t.codes_k),
             t.scale_kv, 2);
}

// Codes of the values that share a scale, by channel; true when one is not finite.
bool write_values(const QuantizeSide& side, const float* rows, int begin, int end,
                  const core::BlockScale& scale, std::uint8_t* codes, std::uint32_t* nonfinite) {
  bool found = false;
  for (int i = begin; i < end; ++i) {
    for (int c = 0; c < side.dim; ++c) {
      const float x = rows[i * side.dim + c];
      if (core::is_finite(x)) {
        codes[c * kRows + core::value_column(i)] = core::quantize(x, scale, core::kE4m3Max);
      } else {
        nonfinite[c * (kRows / 32) + i / 32] |= 1u << (i % 32);
        found = true;
      }
    }
  }
  return found;
}

void quantize_values(const QuantizeJob& job, const Block& block, float* rows) {
  const QuantizeTensors& t = *job.tensors;
  const int block_k = job.plan->problem.forward.fp8.block_k;
  const int dim = job.v.dim;
  const std::int64_t index = block.head * job.v.blocks + block.index;
  const float descale = descale_of(job, t.descale_v, block, block.head);
  std::uint8_t* codes = static_cast<std::uint8_t*>(t.codes_v) + index * dim * kRows;
  std::uint32_t nonfinite[core::kMaxFp8Dim * (kRows / 32)] = {};
  load(job, job.v, block, rows);
  std::memset(codes, 0, static_cast<std::size_t>(dim) * kRows);
  bool found = false;
  float* scales = t.scale_kv + index * kRows / block_k * 2 + 1;
  for (int begin = 0; begin < block.rows; begin += block_k) {
    const int end = core::min_of(begin + block_k, block.rows);
    const float amax = amax_of(rows + begin * dim, (end - begin) * dim);
    const core::BlockScale scale = core::block_scale(amax, core::kE4m3Max);
    found |= write_values(job.v, rows, begin, end, scale, codes, nonfinite);
    scales[begin / block_k * 2] = core::stored_value_scale(scale, amax, descale);
  }
  if (found) {
    for (int begin = 0; begin < block.rows; begin += block_k) {
      scales[begin / block_k * 2] *= -1.0f;
    }
    std::memcpy(t.nonfinite_v + index * dim * (kRows / 32), nonfinite,
                static_cast<std::size_t>(dim) * (kRows / 32) * sizeof nonfinite[0]);
  }
}

// ---- passes -------------------------------------------------------------------------------------

float* rows_of(const QuantizeJob& job, int worker) {
  return job.rows + static_cast<std::int64_t>(worker) * kRows * core::kMaxFp8Dim;
}

void sum_item(int item, int worker, void* context) {
  const QuantizeJob& job = *static_cast<const QuantizeJob*>(context);
  const Block block = locate(job.k, item);
  if (block.rows > 0) {
    sum_block(job, block, rows_of(job, worker));
  }
}

void mean_item(int item, int /*worker*/, void* context) {
  const QuantizeJob& job = *static_cast<const QuantizeJob*>(context);
  mean_of_head(job, item / job.k.heads, item % job.k.heads);
}

// Items of Q, then of K, then of V.
void code_item(int item, int worker, void* context) {
  const QuantizeJob& job = *static_cast<const QuantizeJob*>(context);
  const std::int64_t batch = job.plan->problem.forward.batch;
  const auto queries = static_cast<int>(job.q.items(batch));
  const auto keys = static_cast<int>(job.k.items(batch));
  float* rows = rows_of(job, worker);
  const QuantizeSide& side = item < queries ? job.q : item < queries + keys ? job.k : job.v;
  const Block block = locate(side, item < queries          ? item
                                   : item < queries + keys ? item - queries
                                                           : item - queries - keys);
  if (block.rows == 0) {
    return;
  }
  if (job.plan->problem.dequantize) {
    dequantize_block(job, block, item < queries, item < queries + keys);
  } else if (item < queries) {
    quantize_queries(job, block, rows);
  } else if (item < queries + keys) {
    quantize_keys(job, block, rows);
  } else {
    quantize_values(job, block, rows);
  }
}

std::int64_t code_items(const QuantizeProblem& problem) {
  const ForwardProblem& p = problem.forward;
  const std::int64_t queries = p.heads_q * core::ceil_div<std::int64_t>(p.seqlen_q, kRows);
  const std::int64_t keys = p.heads_k * core::ceil_div<std::int64_t>(p.seqlen_k, kRows);
  return p.batch * (queries + 2 * keys);
}

int workers_for(const QuantizePlan& plan) {
  return core::clamp(plan.blocks, 1, core::max_of(plan.device.threads, 1));
}

// Places the arrays of the workspace; returns its size.
std::size_t place(const QuantizePlan& plan, void* base, QuantizeJob* job) {
  const ForwardProblem& p = plan.problem.forward;
  Carver carver(base);
  job->rows = carver.take<float>(std::int64_t{kRows} * core::kMaxFp8Dim * workers_for(plan));
  job->partial =
      carver.take<float>(p.fp8.smooth_k ? p.heads_k * quantized_sizes(p).blocks_k * p.head_dim : 0);
  return carver.end() - reinterpret_cast<std::uintptr_t>(base);
}

}  // namespace

Status accept_quantize(const KernelInfo&, const QuantizeProblem& problem,
                       const DeviceProps& device) {
  if (device.device.type != DeviceType::cpu) {
    return Status::error(StatusCode::unsupported, "it runs on the CPU; the tensors are on a GPU");
  }
  constexpr std::int64_t kMaxItems = (std::int64_t{1} << 31) - 1;
  if (code_items(problem) > kMaxItems) {
    return Status::error(StatusCode::unsupported,
                         "batch * heads * seqlen / %d, summed over Q, K and V, is %" PRId64
                         "; it must stay below 2^31",
                         kRows, code_items(problem));
  }
  return Status();
}

void configure_quantize(QuantizePlan* plan) {
  plan->tile_q = plan->tile_k = kRows;
  plan->blocks = static_cast<int>(code_items(plan->problem));
  QuantizeJob job;
  plan->workspace.bytes = place(*plan, nullptr, &job);
}

Status run_quantize(const QuantizePlan& plan, const QuantizeTensors& tensors, void* workspace,
                    void* /*stream*/) {
  QuantizeJob job = make_job(plan, tensors);
  place(plan, workspace, &job);
  const std::int64_t batch = plan.problem.forward.batch;
  const int workers = workers_for(plan);
  Status status;
  if (plan.problem.forward.fp8.smooth_k && !plan.problem.dequantize) {
    status = for_each_item(static_cast<int>(job.k.items(batch)), workers, sum_item, &job);
    if (status.ok()) {
      status = for_each_item(static_cast<int>(batch) * job.k.heads, workers, mean_item, &job);
    }
  }
  return status.ok() ? for_each_item(plan.blocks, workers, code_item, &job) : status;
}

}  // namespace pantile::cpu
