#include "host/split.h"

#include <cinttypes>
#include <cstddef>
#include <cstdint>

#include "host/features.h"
#include "host/row_rules.h"
#include "host/rules.h"
#include "host/shape.h"
#include "host/softmax.h"

namespace pantile::host {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

// Dense keys become rows of one packed tensor.
Status key_rows_rule(const ForwardProblem& p) {
  if (p.packed_k || p.batch == 1) {
    return Status();
  }
  const Layout* const layouts[] = {&p.k, &p.v};
  for (int i = 0; i < 2; ++i) {
    const Layout& layout = *layouts[i];
    if (layout.seq <= 0 || layout.batch % layout.seq != 0 || rows_between(layout) < p.seqlen_k) {
      return Status::error(kUnsupported,
                           "num_splits is %d; it needs the keys of one sequence after the other, "
                           "and %s has stride %" PRId64 " along batch and %" PRId64 " along seq",
                           p.num_splits, i == 0 ? "k" : "v", layout.batch, layout.seq);
    }
  }
  if (rows_between(p.k) != rows_between(p.v)) {
    return Status::error(kUnsupported,
                         "num_splits is %d; it needs as many rows between the sequences of k as of "
                         "v, they are %" PRId64 " and %" PRId64,
                         p.num_splits, rows_between(p.k), rows_between(p.v));
  }
  return Status();
}

std::int64_t key_rows(const ForwardProblem& p) {
  return p.packed_k     ? p.total_k
         : p.batch == 1 ? p.seqlen_k
                        : (p.batch - 1) * rows_between(p.k) + p.seqlen_k;
}

// What a part has of the call: no outputs but O and LSE in fp32, keys at given rows.
ForwardProblem part_of(const ForwardProblem& p) {
  ForwardProblem part = p;
  part.num_splits = 1;
  part.total_k = key_rows(p);
  part.packed_k = true;
  part.has_seqused_k = true;
  part.wants_lse = true;
  part.output_f32 = true;
  part.wants_o_low = false;
  part.softmax.exact_lse = true;   // the weights of the merge
  part.variant.has_sinks = false;  // the merge adds them once
  return part;
}

Layout rows_of(std::int64_t heads, std::int64_t dim) {
  return Layout{0, heads * dim, dim, 256};
}

// The variant's fields that a part would read at other places than the whole.
const char* misplaced(const Variant& variant) {
  return variant.has_alibi                             ? "ALiBi"
         : variant.has_bias                            ? "a bias"
         : variant.dropout != 0                        ? "dropout"
         : variant.has_block_mask                      ? "a block mask"
         : variant.has_element_mask                    ? "a mask of elements"
         : variant.has_documents                       ? "a document mask"
         : variant.has_prefix                          ? "a prefix mask"
         : variant.score != Expression::none           ? "a score expression"
         : variant.mask_expression != Expression::none ? "a mask expression"
                                                       : nullptr;
}

// Clocks of the model: what a multiprocessor (a core) multiplies and moves in one. 0.65 of what the
// tensor cores reach; 13 bytes a clock of a multiprocessor are 3 TB/s of 132 at 1.75 GHz.
struct Rates {
  double flops, bytes, launch_clocks;
};

Rates rates_of(const ForwardPlan& plan) {
  const bool f32 = plan.problem.dtype == DType::f32;
  switch (plan.kernel->backend) {
    case Backend::hopper: return Rates{0.65 * 4096, 13.0, 5000.0};
    case Backend::ampere: return Rates{f32 ? 0.5 * 256 : 0.65 * 2048, 13.0, 5000.0};
    default: return Rates{32.0, 4.0, 20000.0};
  }
}

Status serves(const ForwardRow& row, const ForwardProblem& p, const DeviceProps& device) {
  Status status = row_rule(row.info, p, p.dtype, required(p));
  if (status.ok()) {
    status = row.accept(row.info, p, device);
  }
  return status.ok() ? softmax_rule(row.info, p) : status;
}

// The first row of the family that serves the prefix, or the reason of the last one that might.
Status find_prefix(const ForwardRow& tail, const ForwardProblem& p, const DeviceProps& device,
                   const ForwardRow** prefix) {
  Status status = Status::error(kUnsupported, "has no kernel without a mask");
  const RowList<ForwardRow> list = forward_rows();
  for (int i = 0; i < list.count; ++i) {
    const KernelInfo& row = list.rows[i].info;
    const bool mask = row.mask == MaskKind::any || row.mask == mask_kind(p);
    if (row.backend != tail.info.backend || row.dtype != p.dtype || !mask) {
      continue;
    }
    status = serves(list.rows[i], p, device);
    if (status.ok()) {
      *prefix = list.rows + i;
      break;
    }
  }
  return status;
}

}  // namespace

Status num_splits_rule(const ForwardProblem& p) {
  return between("num_splits", p.num_splits, kAutomaticSplits, kMaxSplits);
}

bool is_split(const ForwardProblem& p) {
  return p.num_splits > 1 && p.seqlen_k > 0 && !writes_nothing(p);
}

core::SplitForm split_form(const ForwardProblem& p) {
  const MaskKind mask = mask_kind(p);
  return p.has_mask_shift || mask == MaskKind::window ? core::SplitForm::shifted
         : mask == MaskKind::causal                   ? core::SplitForm::causal
                                                      : core::SplitForm::full;
}

Status split_rule(const ForwardProblem& p) {
  if (p.dtype == DType::e4m3) {
    return Status::error(kUnsupported, "num_splits is %d; FP8 attention has no parts",
                         p.num_splits);
  }
  if (p.page_size > 0) {
    return Status::error(kUnsupported,
                         "num_splits is %d; keys in pages (block_table) are not cut into parts",
                         p.num_splits);
  }
  if (const char* name = misplaced(p.variant)) {
    return Status::error(kUnsupported, "num_splits is %d; it does not serve %s", p.num_splits,
                         name);
  }
  const std::int64_t parts = core::max_of(p.num_splits, 1);
  if (p.total_q * parts > kMaxCount || key_rows(p) > kMaxCount || p.batch * parts > kMaxCount) {
    return Status::error(kUnsupported,
                         "num_splits is %d; parts * rows of q and the rows of k must stay below "
                         "2^31",
                         p.num_splits);
  }
  return key_rows_rule(p);
}

ForwardProblem parts_problem(const ForwardProblem& p, int splits) {
  const core::SplitForm form = split_form(p);
  const int parts = core::prefix_parts(form, splits);
  ForwardProblem part = part_of(p);
  part.batch = p.batch * parts;
  part.packed_q = true;
  part.total_q = p.total_q * parts;
  part.seqlen_k = core::most_part_keys(p.seqlen_k, parts);
  part.has_mask_shift = form == core::SplitForm::shifted;
  if (!part.has_mask_shift) {
    part.window_left = part.window_right = kUnbounded;
  }
  part.q = rows_of(p.heads_q, p.head_dim);
  part.o = rows_of(p.heads_q, p.head_dim_v);
  return canonical(part);
}

ForwardProblem tail_problem(const ForwardProblem& p) {
  ForwardProblem part = part_of(p);
  part.seqlen_k = core::most_tail_keys(p.seqlen_k, p.seqlen_q);
  part.o = rows_of(p.heads_q, p.head_dim_v);
  part.o.batch = p.seqlen_q * part.o.seq;
  return canonical(part);
}

namespace {

// By core::SplitModel, of a plan of whole sequences.
int automatic_splits(const ForwardPlan& plan) {
  const ForwardProblem& p = plan.problem;
  if (p.seqlen_k == 0 || plan.tile_q == 0 || plan.tile_k == 0 || !split_rule(p).ok()) {
    return 1;
  }
  const bool on_cpu = plan.device.device.type == DeviceType::cpu;
  const Rates rates = rates_of(plan);
  const auto rows = static_cast<double>(p.total_q * p.heads_q);
  const auto dims = static_cast<double>(p.head_dim + p.head_dim_v);
  core::SplitModel model{};
  model.processors = on_cpu ? plan.device.threads : plan.device.multiprocessors;
  model.query_tiles = core::ceil_div<std::int64_t>(p.seqlen_q, plan.tile_q) * p.heads_q * p.batch;
  const std::int64_t seen = p.window_left == kUnbounded
                                ? p.seqlen_k
                                : core::min_of(p.seqlen_k, p.window_left + p.seqlen_q);
  model.key_tiles = core::ceil_div<std::int64_t>(seen, plan.tile_k);
  model.most_splits = kMaxSplits;
  model.tile_clocks = 2.0 * plan.tile_q * plan.tile_k * dims / rates.flops;
  model.block_clocks = 2.0 * model.tile_clocks;
  // A copy of Q is written and read, O of a part too, in fp32.
  const double part_bytes = rows * 2.0 *
                            (static_cast<double>(p.head_dim) * dtype_bytes(p.dtype) +
                             4.0 * static_cast<double>(p.head_dim_v));
  model.part_clocks = part_bytes / (rates.bytes * core::max_of(model.processors, 1));
  model.constant_clocks = rates.launch_clocks * (split_form(p) == core::SplitForm::causal ? 3 : 2);
  return core::best_splits(model);
}

}  // namespace

Status find_split(const ForwardRow& row, const ForwardProblem& p, const DeviceProps& device,
                  const ForwardRow** prefix) {
  *prefix = nullptr;
  Status status = split_rule(p);
  if (!status.ok()) {
    return status;
  }
  const bool has_tail = split_form(p) == core::SplitForm::causal;
  const ForwardProblem parts = parts_problem(p, p.num_splits);
  status = serves(row, has_tail ? tail_problem(p) : parts, device);
  if (status.ok() && has_tail) {
    status = find_prefix(row, parts, device, prefix);
  }
  return status.ok() ? status
                     : Status::error(status.code(), "num_splits is %d; for its parts it %s",
                                     p.num_splits, status.message());
}

void cut_keys(const ForwardRow& row, ForwardPlan* plan) {
  ForwardProblem problem = plan->problem;
  if (problem.num_splits == kAutomaticSplits) {
    problem.num_splits = automatic_splits(*plan);
  }
  const ForwardRow* prefix = nullptr;
  // Asked for by number, it was found before.
  if (is_split(problem) && find_split(row, problem, plan->device, &prefix).ok()) {
    plan->automatic_splits = plan->problem.num_splits == kAutomaticSplits;
    plan->problem = problem;
    configure_split(row, prefix, plan);
  } else {
    plan->problem.num_splits = 1;
  }
}

}  // namespace pantile::host
