#include "cpu/reference.h"

#include <cmath>

#include "core/low_bits.h"
#include "cpu/convert.h"
#include "expression/evaluate.h"

namespace pantile::cpu {
namespace {

// One head of one sequence of a tensor.
struct Head {
  DType dtype;
  void* data;
  std::int64_t offset;  // elements to its first row
  std::int64_t stride;  // elements between rows
  // Paged keys: `offset` is that of the head in a page, and `operand` says where pages are.
  const PageTable* pages = nullptr;
  const Operand* operand = nullptr;
  int batch = 0;

  double at(int row, int column) const {
    const std::int64_t before =
        pages == nullptr ? row * stride : pages->offset(operand->side, batch, row);
    return read_element(dtype, data, offset + before + column);
  }
  void set(int row, int column, double value) const {
    write_element(dtype, data, offset + row * stride + column, value);
  }
  // The low bits of a 16-bit `value` that stands in `rounded`; this is a head of o_low.
  void set_low(int row, int column, double value, const Head& rounded) const {
    const auto exact = static_cast<float>(value);
    const auto near = static_cast<float>(rounded.at(row, column));
    static_cast<std::int8_t*>(data)[offset + row * stride + column] =
        rounded.dtype == DType::bf16 ? core::low_bits<core::kLowShiftBf16>(exact, near)
                                     : core::low_bits<core::kLowShiftF16>(exact, near);
  }
};

Head head_of(DType dtype, const Operand& operand, int batch, int head) {
  const core::Sequence sequence = locate(operand.side, batch);
  return Head{dtype, operand.data, sequence.offset + head * operand.head_stride,
              operand.side.seq_stride};
}

// Of K or V.
Head key_head_of(const Job& job, const Operand& operand, int batch, int head) {
  Head result = head_of(job.dtype, operand, batch, head);
  if (job.pages.table != nullptr) {
    result.offset = head * operand.head_stride;
    result.pages = &job.pages;
    result.operand = &operand;
    result.batch = batch;
  }
  return result;
}

// Rows that are there, used or not.
int room_of(const Side& side, int batch) {
  return extent_of(side, batch).room;
}

float* values_of(const RowValues& values, const core::SequenceSide& side, int batch, int head) {
  const std::int64_t row = side.cu_seqlens != nullptr ? side.cu_seqlens[batch] : 0;
  return values.data + batch * values.batch_stride + head * values.head_stride + row;
}

double dot(const Head& a, int row_a, const Head& b, int row_b, int dim) {
  double sum = 0.0;
  for (int d = 0; d < dim; ++d) {
    sum += a.at(row_a, d) * b.at(row_b, d);
  }
  return sum;
}

// The query that scores, weights and gradients belong to.
struct Query {
  int batch, head, row;
  core::ShiftedMask mask;
};

// How far key `key` is from the query, on the diagonal that ends at the bottom right.
double distance(const Query& at, int key) {
  return std::abs(static_cast<double>(at.row) + at.mask.shift() - key);
}

expression::Place place_of(const Query& at, int key, double score) {
  return expression::Place{score, at.batch, at.head, at.row, key};
}

// What a variant makes of a scaled score, but for a score of the user's own.
double inner_score(const VariantJob& variant, const Query& at, int key, double score) {
  if (variant.softcap > 0.0f) {
    const auto cap = static_cast<double>(variant.softcap);
    score = cap * std::tanh(score / cap);
  }
  if (variant.slopes != nullptr) {
    const std::int64_t slope = at.batch * variant.slope_batch_stride + at.head;
    score -= static_cast<double>(variant.slopes[slope]) * distance(at, key);
  }
  if (variant.bias != nullptr) {
    const std::int64_t offset = at.batch * variant.bias_batch + at.head * variant.bias_head +
                                at.row * variant.bias_query + key;
    score += read_element(variant.bias_dtype, variant.bias, offset);
  }
  return score;
}

double changed_score(const VariantJob& variant, const Query& at, int key, double score) {
  score = inner_score(variant, at, key, score);
  return variant.score.exists
             ? expression::evaluate(*variant.score_programs, variant.score.captured,
                                    place_of(at, key, score))
             : score;
}

const std::uint8_t* mask_row(const std::uint8_t* bytes, const MaskLayout& layout, const Query& at,
                             int row) {
  return bytes + at.batch * layout.batch + at.head * layout.head + row * layout.query;
}

// Whether a form of the mask beside the window shows the pair.
bool is_shown_by(std::uint32_t form, const MaskJob& mask, const Query& at, int key) {
  switch (form) {
    case kMaskBlocks:
      return mask_row(mask.blocks, mask.block_layout, at, at.row / mask.block)[key / mask.block] !=
             0;
    case kMaskElements: return mask_row(mask.elements, mask.element_layout, at, at.row)[key] != 0;
    case kMaskDocuments:
      return mask.query_ids[at.batch * mask.batch_queries + at.row] ==
             mask.key_ids[at.batch * mask.batch_keys + key];
    case kMaskPrefix:
      return key < mask.prefixes[at.batch * mask.batch_prefixes] || key <= at.row + at.mask.shift();
    default: return false;
  }
}

// Whether the mask shows it: all forms of some clause do.
bool is_shown(const VariantJob& variant, const Query& at, int key) {
  const MaskJob& mask = variant.mask;
  if (mask.has_expression) {
    return expression::evaluate(*variant.mask_programs, mask.captured, place_of(at, key, 0.0)) !=
           0.0;
  }
  bool shown = mask.clauses == 0;
  for (std::uint32_t rest = mask.clauses; rest != 0; rest >>= kMaskForms) {
    bool all = true;
    for (std::uint32_t form = kMaskBlocks; form <= kMaskPrefix; form <<= 1) {
      all = all && ((rest & form) == 0 || is_shown_by(form, mask, at, key));
    }
    shown = shown || all;
  }
  return shown;
}

// What dropout multiplies a weight with.
double kept_weight(const VariantJob& variant, const Query& at, int key) {
  if (variant.dropped == 0) {
    return 1.0;
  }
  const bool keeps = core::dropout_keeps(
      variant.key, variant.dropped, variant.batch_offset + static_cast<std::uint32_t>(at.batch),
      variant.head_offset + static_cast<std::uint32_t>(at.head),
      variant.query_offset + static_cast<std::uint32_t>(at.row),
      variant.key_offset + static_cast<std::uint32_t>(key));
  return keeps ? 256.0 / (256.0 - variant.dropped) : 0.0;
}

// exp(score - max) of each key of `keys` in weights[key - keys.begin]; returns the largest score,
// the maximum with the head's sink, and the sum with the sink's weight.
struct Softmax {
  double largest, max, sum;
  double sink;  // its weight, as the others
};

Softmax weigh_row(const Job& job, const Head& q, const Head& k, const Query& at, core::Span keys,
                  double* weights) {
  Softmax softmax{-HUGE_VAL, -HUGE_VAL, 0.0, 0.0};
  for (int key = keys.begin; key < keys.end; ++key) {
    if (!is_shown(job.variant, at, key)) {
      weights[key - keys.begin] = -HUGE_VAL;
      continue;
    }
    const double scaled = dot(q, at.row, k, key, job.dim) * static_cast<double>(job.scale);
    const double score = changed_score(job.variant, at, key, scaled);
    weights[key - keys.begin] = score;
    softmax.largest = score > softmax.largest ? score : softmax.largest;
  }
  const double sink =
      job.variant.sinks == nullptr ? -HUGE_VAL : static_cast<double>(job.variant.sinks[at.head]);
  softmax.max = sink > softmax.largest ? sink : softmax.largest;
  const double shift = softmax.max == -HUGE_VAL ? 0.0 : softmax.max;
  for (int i = 0; i < keys.size(); ++i) {
    weights[i] = std::exp(weights[i] - shift);
    softmax.sum += weights[i];
  }
  softmax.sink = std::exp(sink - shift);
  softmax.sum += softmax.sink;
  return softmax;
}

core::ShiftedMask sequence_mask(const Job& job, int batch) {
  return mask_of(job, batch, extent_of(job.q.side, batch).length,
                 extent_of(job.k.side, batch).length);
}

// What the gradients of one key/value head are summed in.
struct GradientSums {
  double* weights;      // [keys] of one row: P
  double* grad_scores;  // [keys] of one row: dP, then dS
  double* grad_keys;    // [keys][dim]
  double* grad_values;  // [keys][dim_v]
  VariantSums variant;
};

// Where the gradients of the variant's tensors take what (head, row, key) adds.
void add_to_variant(const BackwardJob& job, const VariantSums& sums, const Query& at, int key,
                    double ds) {
  if (sums.slopes != nullptr) {
    sums.slopes[at.batch * job.variant.slope_batch_stride + at.head] -= ds * distance(at, key);
  }
  if (sums.bias != nullptr) {
    const std::int64_t batch = job.bias_batches == 1 ? 0 : at.batch;
    const std::int64_t head = job.bias_heads == 1 ? 0 : at.head;
    const std::int64_t row = job.bias_rows == 1 ? 0 : at.row;
    sums.bias[((batch * job.bias_heads + head) * job.bias_rows + row) * job.bias_keys + key] += ds;
  }
}

// The derivative of the softcap at a scaled score.
double softcap_slope(const VariantJob& variant, double scaled) {
  if (variant.softcap == 0.0f) {
    return 1.0;
  }
  const double t = std::tanh(scaled / static_cast<double>(variant.softcap));
  return 1.0 - t * t;
}

// The derivative of a score of the user's own at a scaled score; 1 without one. `ds` times its
// other derivatives is added to the gradients of what it captures.
double score_slope(const BackwardJob& job, const VariantSums& sums, const Query& at, int key,
                   double scaled, double ds) {
  const VariantJob& variant = job.variant;
  if (!variant.score.exists) {
    return 1.0;
  }
  const expression::Place place = place_of(at, key, inner_score(variant, at, key, scaled));
  if (sums.captured != nullptr) {
    expression::add_gradients(*variant.score_programs, variant.score.captured, place, ds,
                              sums.captured);
  }
  return expression::evaluate_slope(*variant.score_programs, variant.score.captured, place);
}

// One query row: adds to dK and dV and writes dQ.
void backward_row(const BackwardJob& job, const Query& at, core::Span keys,
                  const GradientSums& sums) {
  const int batch = at.batch;
  const int head = at.head;
  const int row = at.row;
  const int key_head = job.heads.key_head(head);
  const Head q = head_of(job.dtype, job.q, batch, head);
  const Head k = head_of(job.dtype, job.k, batch, key_head);
  const Head v = head_of(job.dtype, job.v, batch, key_head);
  const Head grad_o = head_of(job.dtype, job.grad_o, batch, head);
  const Softmax softmax = weigh_row(job, q, k, at, keys, sums.weights);
  // rowsum(dO * O) = rowsum(P * dP): neither O nor its low bits are read.
  double delta = 0.0;
  for (int i = 0; i < keys.size(); ++i) {
    sums.weights[i] = softmax.sum == 0.0 ? 0.0 : sums.weights[i] / softmax.sum;
    if (!is_shown(job.variant, at, keys.begin + i)) {
      sums.weights[i] = sums.grad_scores[i] = 0.0;
      continue;
    }
    sums.grad_scores[i] = dot(grad_o, row, v, keys.begin + i, job.dim_v) *
                          kept_weight(job.variant, at, keys.begin + i);
    delta += sums.weights[i] * sums.grad_scores[i];
  }
  if (job.grad_lse.data != nullptr) {
    delta -= static_cast<double>(values_of(job.grad_lse, job.q.side, batch, head)[row]);
  }
  if (sums.variant.sinks != nullptr && softmax.sum != 0.0) {
    sums.variant.sinks[head] -= softmax.sink / softmax.sum * delta;
  }
  for (int i = 0; i < keys.size(); ++i) {
    const int key = keys.begin + i;
    if (!is_shown(job.variant, at, key)) {
      continue;
    }
    const double change = sums.weights[i] * (sums.grad_scores[i] - delta);
    const double p = sums.weights[i] * kept_weight(job.variant, at, key);
    const double scaled = dot(q, row, k, key, job.dim) * static_cast<double>(job.scale);
    const double inner = change * score_slope(job, sums.variant, at, key, scaled, change);
    add_to_variant(job, sums.variant, at, key, inner);
    const double ds = inner * softcap_slope(job.variant, scaled) * static_cast<double>(job.scale);
    sums.grad_scores[i] = ds;
    for (int d = 0; d < job.dim; ++d) {
      sums.grad_keys[static_cast<std::int64_t>(key) * job.dim + d] += ds * q.at(row, d);
    }
    for (int d = 0; d < job.dim_v; ++d) {
      sums.grad_values[static_cast<std::int64_t>(key) * job.dim_v + d] += p * grad_o.at(row, d);
    }
  }
  const Head grad_q = head_of(job.dtype, job.grad_q, batch, head);
  for (int d = 0; d < job.dim; ++d) {
    double sum = 0.0;
    for (int i = 0; i < keys.size(); ++i) {
      if (is_shown(job.variant, at, keys.begin + i)) {
        sum += sums.grad_scores[i] * k.at(keys.begin + i, d);
      }
    }
    grad_q.set(row, d, sum);
  }
}

}  // namespace

std::int64_t reference_forward_doubles(int max_keys) {
  return max_keys;
}

std::int64_t reference_backward_doubles(int max_keys, int dim, int dim_v) {
  return static_cast<std::int64_t>(max_keys) * (2 + dim + dim_v);
}

void reference_forward_rows(const ForwardJob& job, int batch, int head, core::Span rows,
                            double* scratch) {
  const core::ShiftedMask mask = sequence_mask(job, batch);
  const Head q = head_of(job.dtype, job.q, batch, head);
  const Head k = key_head_of(job, job.k, batch, job.heads.key_head(head));
  const Head v = key_head_of(job, job.v, batch, job.heads.key_head(head));
  const Head o = head_of(job.output_dtype, job.o, batch, head);
  const Head o_low = head_of(job.output_dtype, job.o_low, batch, head);
  float* lse = job.lse.data == nullptr ? nullptr : values_of(job.lse, job.q.side, batch, head);
  const int end = core::min_of(rows.end, room_of(job.q.side, batch));
  for (int row = rows.begin; row < end; ++row) {
    const core::Span keys = row < mask.rows ? core::visible_keys(mask, row) : core::Span{0, 0};
    const Query at{batch, head, row, mask};
    const Softmax softmax = row < mask.rows ? weigh_row(job, q, k, at, keys, scratch)
                                            : Softmax{-HUGE_VAL, -HUGE_VAL, 0.0, 0.0};
    for (int d = 0; d < job.dim_v; ++d) {
      double sum = 0.0;
      for (int i = 0; i < keys.size(); ++i) {
        if (!is_shown(job.variant, at, keys.begin + i)) {
          continue;
        }
        sum += scratch[i] * kept_weight(job.variant, at, keys.begin + i) * v.at(keys.begin + i, d);
      }
      const double output = softmax.sum == 0.0 ? 0.0 : sum / softmax.sum;
      o.set(row, d, output);
      if (job.o_low.data != nullptr) {
        o_low.set_low(row, d, output, o);
      }
    }
    if (lse != nullptr) {
      lse[row] =
          static_cast<float>(softmax.sum == 0.0 ? -HUGE_VAL : softmax.max + std::log(softmax.sum));
    }
    if (job.max_logit != nullptr) {
      raise_max_logit(job.max_logit + std::int64_t{batch} * job.heads.heads_q + head,
                      static_cast<float>(softmax.largest), static_cast<float>(softmax.sum));
    }
  }
}

void reference_backward_head(const BackwardJob& job, int batch, int key_head, double* scratch,
                             const VariantSums& variant) {
  const core::ShiftedMask mask = sequence_mask(job, batch);
  const std::int64_t keys = mask.keys;
  const GradientSums sums{scratch, scratch + keys, scratch + 2 * keys,
                          scratch + (2 + job.dim) * keys, variant};
  for (std::int64_t i = 0; i < keys * (job.dim + job.dim_v); ++i) {
    sums.grad_keys[i] = 0.0;  // and grad_values, which follow
  }
  const int first = job.heads.first_query_head(key_head);
  for (int head = first; head < first + job.heads.group(); ++head) {
    const Head grad_q = head_of(job.dtype, job.grad_q, batch, head);
    for (int row = 0; row < mask.rows; ++row) {
      backward_row(job, Query{batch, head, row, mask}, core::visible_keys(mask, row), sums);
    }
    for (int row = mask.rows; row < room_of(job.q.side, batch); ++row) {
      for (int d = 0; d < job.dim; ++d) {
        grad_q.set(row, d, 0.0);
      }
    }
  }
  if (job.shared_sums != nullptr) {
    const std::int64_t row = locate(job.k.side, batch).row;
    double* k_sums = job.shared_sums + (key_head * job.total_k + row) * job.dim;
    double* v_sums = job.shared_sums + job.heads.heads_k * job.total_k * job.dim +
                     (key_head * job.total_k + row) * job.dim_v;
    for (std::int64_t i = 0; i < keys * job.dim; ++i) {
      k_sums[i] += sums.grad_keys[i];
    }
    for (std::int64_t i = 0; i < keys * job.dim_v; ++i) {
      v_sums[i] += sums.grad_values[i];
    }
    return;
  }
  const Head grad_k = head_of(job.dtype, job.grad_k, batch, key_head);
  const Head grad_v = head_of(job.dtype, job.grad_v, batch, key_head);
  for (int key = 0; key < room_of(job.k.side, batch); ++key) {
    const bool used = key < mask.keys;
    for (int d = 0; d < job.dim; ++d) {
      grad_k.set(key, d, used ? sums.grad_keys[key * std::int64_t{job.dim} + d] : 0.0);
    }
    for (int d = 0; d < job.dim_v; ++d) {
      grad_v.set(key, d, used ? sums.grad_values[key * std::int64_t{job.dim_v} + d] : 0.0);
    }
  }
}

void reference_write_shared(const BackwardJob& job, int key_head) {
  const double* sums = job.shared_sums;
  for (const Operand* operand : {&job.grad_k, &job.grad_v}) {
    const int dim = operand == &job.grad_k ? job.dim : job.dim_v;
    const Head to{job.dtype, operand->data, key_head * operand->head_stride,
                  operand->side.seq_stride};
    const double* from = sums + key_head * job.total_k * dim;
    for (int row = 0; row < job.total_k; ++row) {
      for (int d = 0; d < dim; ++d) {
        to.set(row, d, from[row * std::int64_t{dim} + d]);
      }
    }
    sums += job.heads.heads_k * job.total_k * dim;
  }
}

}  // namespace pantile::cpu
