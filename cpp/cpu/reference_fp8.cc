// Attention on FP8 operands in double: codes times scales, then the textbook.
#include <cmath>

#include "core/blocked.h"
#include "cpu/convert.h"
#include "cpu/reference.h"

namespace pantile::cpu {
namespace {

constexpr int kRows = core::kBlockedRows;

// The numbers of all codes.
struct CodeTable {
  double number[256];
  CodeTable() {
    for (int code = 0; code < 256; ++code) {
      number[code] = static_cast<double>(core::decode_e4m3(static_cast<std::uint8_t>(code)));
    }
  }
};

double number(const Operand& operand, std::int64_t index) {
  static const CodeTable table;
  return table.number[static_cast<const std::uint8_t*>(operand.data)[index]];
}

// Operands of one head of one sequence. Rows count from the start of the sequence.
struct HeadOfCodes {
  const Fp8ForwardJob& job;
  std::int64_t first_q, first_k;  // rows before the sequence, of all heads

  double scale_q(int row) const {
    return static_cast<double>(job.tensors.scale_q[(first_q + row) / job.format.block_q]);
  }
  double scale_k(int key) const {
    return static_cast<double>(job.tensors.scale_kv[(first_k + key) / job.format.block_k * 2]);
  }
  double scale_v(int key) const {
    return std::fabs(
        static_cast<double>(job.tensors.scale_kv[(first_k + key) / job.format.block_k * 2 + 1]));
  }
  bool flagged(int key) const {
    return std::signbit(job.tensors.scale_kv[(first_k + key) / job.format.block_k * 2 + 1]);
  }
  double score(int row, int key) const {
    const std::int64_t width = core::round_up(job.dim, core::kCodeAlign);
    double sum = 0.0;
    for (int c = 0; c < job.dim; ++c) {
      sum +=
          number(job.q, (first_q + row) * width + c) * number(job.k, (first_k + key) * width + c);
    }
    return sum * scale_q(row) * scale_k(key) * static_cast<double>(job.scale);
  }
  double value(int key, int channel) const {
    const std::int64_t channel_of_block = (first_k + key) / kRows * job.dim_v + channel;
    const auto in_block = static_cast<int>((first_k + key) % kRows);
    if (flagged(key) && (job.tensors.nonfinite_v[channel_of_block * (kRows / 32) + in_block / 32] >>
                             (in_block % 32) &
                         1u) != 0) {
      return std::nan("");
    }
    return number(job.v, channel_of_block * kRows + core::value_column(in_block)) * scale_v(key);
  }
};

core::Sequence sequence_of(const core::SequenceSide& side, int batch) {
  return core::locate_sequence(side, batch);
}

// exp(score - max) in weights[]; returns max and sum.
struct Softmax {
  double max, sum;
};

Softmax weigh_row(const HeadOfCodes& codes, int row, core::Span keys, double* weights) {
  Softmax softmax{-HUGE_VAL, 0.0};
  for (int i = 0; i < keys.size(); ++i) {
    weights[i] = codes.score(row, keys.begin + i);
    softmax.max = weights[i] > softmax.max ? weights[i] : softmax.max;
  }
  const double shift = softmax.max == -HUGE_VAL ? 0.0 : softmax.max;
  for (int i = 0; i < keys.size(); ++i) {
    weights[i] = std::exp(weights[i] - shift);
    softmax.sum += weights[i];
  }
  return softmax;
}

}  // namespace

void reference_fp8_rows(const Fp8ForwardJob& job, int batch, int head, core::Span rows,
                        double* scratch) {
  core::SequenceSide whole = job.q.side;
  whole.seqused = nullptr;
  const int end = core::min_of(rows.end, sequence_of(whole, batch).length);
  const core::Mask mask =
      core::make_mask(sequence_of(job.q.side, batch).length, sequence_of(job.k.side, batch).length,
                      job.window_left, job.window_right);
  const HeadOfCodes codes{
      job, (head * job.blocks_q + core::first_block(job.q.side, batch)) * kRows,
      (job.heads.key_head(head) * job.blocks_k + core::first_block(job.k.side, batch)) * kRows};
  const std::int64_t first_o = sequence_of(job.o.side, batch).offset + head * job.o.head_stride;
  for (int row = rows.begin; row < end; ++row) {
    const core::Span keys = row < mask.rows ? core::visible_keys(mask, row) : core::Span{0, 0};
    const Softmax softmax = weigh_row(codes, row, keys, scratch);
    for (int d = 0; d < job.dim_v; ++d) {
      double sum = 0.0;
      for (int i = 0; i < keys.size(); ++i) {
        sum += scratch[i] * codes.value(keys.begin + i, d);
      }
      write_element(job.dtype, job.o.data, first_o + row * job.o.side.seq_stride + d,
                    softmax.sum == 0.0 ? 0.0 : sum / softmax.sum);
    }
    if (job.lse.data != nullptr) {
      const std::int64_t packed =
          job.q.side.cu_seqlens != nullptr ? job.q.side.cu_seqlens[batch] : 0;
      double lse = softmax.max + std::log(softmax.sum);
      if (job.format.smooth_k) {
        lse += static_cast<double>(job.scale) *
               static_cast<double>(job.tensors.q_dot_mean[codes.first_q + row]);
      }
      job.lse.data[batch * job.lse.batch_stride + head * job.lse.head_stride + packed + row] =
          static_cast<float>(softmax.sum == 0.0 ? -HUGE_VAL : lse);
    }
  }
}

}  // namespace pantile::cpu
