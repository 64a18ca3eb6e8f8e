// Around the parts of a split forward on the CPU (core/forward_split.h): the arrays that describe
// them, copies of Q, and the merge of their results.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/forward_split.h"
#include "core/low_bits.h"
#include "cpu/backend.h"
#include "cpu/convert.h"
#include "cpu/elements.h"
#include "cpu/parallel.h"

namespace pantile::cpu {
namespace {

constexpr int kItemRows = 16;  // of all heads: rows that a thread takes at a time

float exp2_exactly(float x) {
  return std::exp2(x);
}
float log_exactly(float x) {
  return std::log2(x);
}

struct Task {
  const core::SplitJob* job;
  DType output;
};

// Calls row(task, sequence, rows, i) for the rows of Q of an item.
template <class RowFunction>
void for_rows(const Task& task, int item, RowFunction row) {
  const core::SplitJob& job = *task.job;
  const std::int64_t first = std::int64_t{item} * kItemRows;
  const std::int64_t last = core::min_of(first + kItemRows, job.total_q);
  for (std::int64_t at = first; at < last; ++at) {
    const int batch = core::sequence_of_row(job, at);
    if (batch < job.batch) {
      const core::SplitRows rows = core::split_rows(job, batch);
      row(batch, rows, static_cast<int>(at - rows.row));
    }
  }
}

void copy_rows(int item, int, void* context) {
  const Task& task = *static_cast<const Task*>(context);
  const core::SplitJob& job = *task.job;
  const auto* const from = static_cast<const char*>(job.q);
  auto* const to = static_cast<char*>(job.q_parts);
  const std::int64_t bytes = std::int64_t{job.head_dim} * job.element_bytes;
  for_rows(task, item, [&](int batch, const core::SplitRows& rows, int i) {
    const std::int64_t sequence =
        job.cu_seqlens_q != nullptr ? rows.row * job.q_seq : batch * job.q_batch;
    for (int head = 0; head < job.heads_q; ++head) {
      const std::int64_t at = sequence + i * job.q_seq + head * job.q_head;
      for (int part = 0; part < job.parts(); ++part) {
        const std::int64_t row = core::part_row(job, rows, part, i) * job.heads_q + head;
        std::memcpy(to + row * bytes, from + at * job.element_bytes,
                    static_cast<std::size_t>(bytes));
      }
    }
  });
}

void store_row(const Task& task, std::int64_t at, std::int64_t low_at, const float* row) {
  const core::SplitJob& job = *task.job;
  for (int d = 0; d < job.head_dim_v; ++d) {
    float rounded = row[d];
    if (task.output == DType::f32) {
      static_cast<float*>(job.o)[at + d] = row[d];
      continue;
    }
    const bool bf16 = task.output == DType::bf16;
    const std::uint16_t half = bf16 ? float_to_bf16(row[d]) : float_to_f16(row[d]);
    static_cast<std::uint16_t*>(job.o)[at + d] = half;
    if (job.o_low != nullptr) {
      rounded = bf16 ? bf16_to_float(half) : f16_to_float(half);
      job.o_low[low_at + d] = bf16 ? core::low_bits<core::kLowShiftBf16>(row[d], rounded)
                                   : core::low_bits<core::kLowShiftF16>(row[d], rounded);
    }
  }
}

// Returns the LSE of the row; `row`: head_dim_v numbers, O.
float merge_row(const core::SplitJob& job, const core::SplitRows& rows, int batch, int head, int i,
                float* row) {
  const int parts = job.parts() + (job.tail_begin != nullptr ? 1 : 0);
  const float sink = job.sinks == nullptr ? -core::kInfinity : job.sinks[head];
  core::PartSum all{sink, 0.0f};
  for (int part = 0; part < parts; ++part) {
    all.reference = core::larger(all.reference, core::part_lse(job, rows, batch, head, i, part));
  }
  std::fill_n(row, job.head_dim_v, 0.0f);
  for (int part = 0; part < parts; ++part) {
    const float lse = core::part_lse(job, rows, batch, head, i, part);
    if (lse == -core::kInfinity) {
      continue;  // it has no keys for this row
    }
    const float weight = core::part_weight(lse, all.reference, exp2_exactly);
    const float* const from = core::part_output(job, rows, head, i, part);
    all.sum += weight;
    for (int d = 0; d < job.head_dim_v; ++d) {
      row[d] += weight * from[d];
    }
  }
  if (job.sinks != nullptr) {
    all.sum += core::part_weight(sink, all.reference, exp2_exactly);
  }
  const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
  for (int d = 0; d < job.head_dim_v; ++d) {
    row[d] *= inverse;
  }
  return core::merged_lse(all, log_exactly);
}

void merge_rows(int item, int, void* context) {
  const Task& task = *static_cast<const Task*>(context);
  const core::SplitJob& job = *task.job;
  float row[kMaxHeadDim];
  for_rows(task, item, [&](int batch, const core::SplitRows& rows, int i) {
    const std::int64_t sequence =
        job.cu_seqlens_q != nullptr ? rows.row * job.o_seq : batch * job.o_batch;
    for (int head = 0; head < job.heads_q; ++head) {
      float lse = -core::kInfinity;
      if (i < rows.used) {
        lse = merge_row(job, rows, batch, head, i, row);
      } else {
        std::fill_n(row, job.head_dim_v, 0.0f);
      }
      store_row(task, sequence + i * job.o_seq + head * job.o_head,
                ((rows.row + i) * job.heads_q + head) * job.head_dim_v, row);
      if (job.lse != nullptr) {
        job.lse[core::lse_index(job, rows, batch, head, i)] = lse;
      }
    }
  });
}

// The tail has raised them already.
void raise_max_logits(const core::SplitJob& job) {
  for (std::int64_t at = 0; at < std::int64_t{job.batch} * job.heads_q; ++at) {
    const std::int64_t batch = at / job.heads_q;
    for (int part = 0; part < job.parts(); ++part) {
      const float logit =
          job.part_max_logit[(batch * job.parts() + part) * job.heads_q + at % job.heads_q];
      float& most = job.max_logit[at];
      most = std::isnan(logit) || logit > most ? logit : most;
    }
  }
}

}  // namespace

Status prepare_splits(const core::SplitJob& job, const DeviceProps& device, void*) {
  for (int batch = 0; batch < job.batch; ++batch) {
    core::place_parts(job, batch);
  }
  if (job.part_max_logit != nullptr) {
    std::fill_n(job.part_max_logit, std::int64_t{job.batch} * job.parts() * job.heads_q,
                -core::kInfinity);
  }
  Task task{&job, DType::f32};
  return for_each_item(static_cast<int>(core::ceil_div<std::int64_t>(job.total_q, kItemRows)),
                       device.threads, copy_rows, &task);
}

Status merge_splits(const core::SplitJob& job, DType output, const DeviceProps& device, void*) {
  Task task{&job, output};
  const Status status =
      for_each_item(static_cast<int>(core::ceil_div<std::int64_t>(job.total_q, kItemRows)),
                    device.threads, merge_rows, &task);
  if (status.ok() && job.max_logit != nullptr) {
    raise_max_logits(job);
  }
  return status;
}

}  // namespace pantile::cpu
