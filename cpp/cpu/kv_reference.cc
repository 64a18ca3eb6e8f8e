// Decode in double, one query at a time and in one sum over its keys: the oracle of the tests.
#include <cmath>

#include "core/scaling.h"
#include "cpu/backend.h"
#include "cpu/convert.h"
#include "cpu/items.h"
#include "cpu/kv_support.h"

namespace pantile::cpu {
namespace {

struct ReferenceDecode {
  const KvProblem* problem;
  KvTensors tensors;
  core::KvArrays arrays;
};

double element(const KvProblem& p, const void* data, std::int64_t index) {
  switch (p.format) {
    case CacheFormat::plain: return read_element(p.dtype, data, index);
    case CacheFormat::e4m3:
      return static_cast<double>(core::decode_e4m3(static_cast<const std::uint8_t*>(data)[index]));
    case CacheFormat::int8:
      return static_cast<double>(static_cast<const std::int8_t*>(data)[index]);
  }
  return 0.0;
}

double scale_of(const KvProblem& p, const float* scales, const ScaleLayout& layout, int batch,
                const Place& place, int head) {
  const bool of_token = p.scale_kind == CacheScale::token;
  const std::int64_t at =
      of_token ? place.block * layout.block + place.slot * layout.slot : batch * layout.block;
  return p.scale_kind == CacheScale::none ? 1.0
                                          : static_cast<double>(scales[at + head * layout.head]);
}

// One query of one head: sees whatever the mask shows.
struct Query {
  const ReferenceDecode* call;
  core::KvSequence sequence;
  int batch, head, row;
  std::int64_t q, o;  // elements to its row

  int key_head() const {
    const KvProblem& p = *call->problem;
    return head / static_cast<int>(p.heads_q / p.heads_k);
  }
  bool sees(int key) const {
    const KvProblem& p = *call->problem;
    const core::KeyRange range = core::visible_keys(sequence, row, p.window_left, p.window_right);
    if (key < range.begin || key >= range.end) {
      return false;
    }
    return !p.has_tree_mask ||
           !core::tree_hides(
               sequence,
               static_cast<std::uint64_t>(call->tensors.tree_mask[sequence.query_row + row]), key);
  }
  double score(int key) const {
    const KvProblem& p = *call->problem;
    const KvTensors& t = call->tensors;
    const Place place = place_of(p, t, sequence, key);
    const std::int64_t at = place.block * p.k.block + place.slot * p.k.slot + key_head() * p.k.head;
    double sum = 0.0;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      sum += read_element(p.dtype, t.q, q + c) * element(p, t.k, at + c);
    }
    sum *=
        static_cast<double>(p.scale) * scale_of(p, t.scale_k, p.scale_k, batch, place, key_head());
    const auto cap = static_cast<double>(p.softcap);
    return cap > 0.0 ? cap * std::tanh(sum / cap) : sum;
  }
  void add_value(int key, double weight, double* output) const {
    const KvProblem& p = *call->problem;
    const KvTensors& t = call->tensors;
    const Place place = place_of(p, t, sequence, key);
    const CacheLayout& layout = p.v_in_k ? p.k : p.v;
    const void* const data = p.v_in_k ? t.k : t.v;
    const std::int64_t at =
        place.block * layout.block + place.slot * layout.slot + key_head() * layout.head;
    const double scale = p.v_in_k ? scale_of(p, t.scale_k, p.scale_k, batch, place, key_head())
                                  : scale_of(p, t.scale_v, p.scale_v, batch, place, key_head());
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      output[c] += weight * (scale * element(p, data, at + c));
    }
  }
};

void write_query(const Query& query, double* output, double most, double sum) {
  const KvProblem& p = *query.call->problem;
  const KvTensors& t = query.call->tensors;
  for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
    write_element(output_dtype(p), t.o, query.o + c, sum == 0.0 ? 0.0 : output[c] / sum);
  }
  if (p.wants_lse) {
    const std::int64_t at = p.packed_q
                                ? query.head * p.total_q + query.sequence.query_row + query.row
                                : (query.batch * p.heads_q + query.head) * p.seqlen_q + query.row;
    t.lse[at] = static_cast<float>(sum == 0.0 ? -HUGE_VAL : most + std::log(sum));
  }
}

void attend(const Query& query, double* output) {
  const KvProblem& p = *query.call->problem;
  double most = -HUGE_VAL;
  for (int key = 0; key < query.sequence.keys; ++key) {
    if (query.sees(key)) {
      most = core::max_of(most, query.score(key));
    }
  }
  const double sink =
      p.has_sinks ? static_cast<double>(query.call->tensors.sinks[query.head]) : -HUGE_VAL;
  most = core::max_of(most, sink);
  const double shift = most == -HUGE_VAL ? 0.0 : most;
  double sum = std::exp(sink - shift);
  for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
    output[c] = 0.0;
  }
  for (int key = 0; key < query.sequence.keys; ++key) {
    if (query.sees(key)) {
      const double weight = std::exp(query.score(key) - shift);
      sum += weight;
      query.add_value(key, weight, output);
    }
  }
  write_query(query, output, most, sum);
}

// All queries of a head of a sequence.
void decode_head(const ReferenceDecode& call, int item, void* scratch) {
  const KvProblem& p = *call.problem;
  Query query{};
  query.call = &call;
  query.batch = item / static_cast<int>(p.heads_q);
  query.head = item % static_cast<int>(p.heads_q);
  query.sequence = core::locate_kv_sequence(call.arrays, query.batch);
  for (query.row = 0; query.row < query.sequence.queries; ++query.row) {
    const auto at = [&](const Layout& layout) {
      return (p.packed_q ? query.sequence.query_row * layout.seq : query.batch * layout.batch) +
             query.row * layout.seq + query.head * layout.head;
    };
    query.q = at(p.q);
    query.o = at(p.o);
    attend(query, static_cast<double*>(scratch));
  }
}

std::size_t scratch_bytes(const KvProblem& p) {
  return aligned(static_cast<std::size_t>(p.head_dim_v) * sizeof(double));
}

}  // namespace

void configure_reference_decode(DecodePlan* plan) {
  plan->tile_q = 1;
  plan->tile_k = 1;
  plan->blocks = static_cast<int>(plan->problem.batch * plan->problem.heads_q);
  const int workers = core::min_of(plan->blocks, plan->device.threads);
  plan->workspace.bytes = scratch_bytes(plan->problem) * static_cast<std::size_t>(workers);
}

Status reference_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace, void*) {
  const ReferenceDecode call{&plan.problem, tensors, kv_arrays(plan.problem, tensors)};
  return run_items(call, decode_head, plan.blocks, core::min_of(plan.blocks, plan.device.threads),
                   workspace, scratch_bytes(plan.problem));
}

Status schedule_nothing(const DecodePlan&, const KvTensors&, std::int32_t*, void*) {
  return Status();
}

}  // namespace pantile::cpu
