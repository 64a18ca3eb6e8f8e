#include "host/split.h"

#include <cinttypes>
#include <cstddef>
#include <cstdint>

#include "host/rules.h"
#include "host/shape.h"
#include "host/softmax.h"

namespace pantile::host {
namespace {

constexpr StatusCode kUnsupported = StatusCode::unsupported;

// Of the keys of one sequence to the next one's, where they are dense.
std::int64_t rows_between(const Layout& layout) {
  return layout.seq > 0 ? layout.batch / layout.seq : 0;
}

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

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlign = 256;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// Takes pieces of a block, or, of null, says how long it must be.
class Carver {
 public:
  explicit Carver(void* base, std::size_t first)
      : base_(static_cast<char*>(base)), end_(aligned(first)) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = end_;
    end_ += aligned(static_cast<std::size_t>(count) * sizeof(T));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  std::size_t end() const { return end_; }

 private:
  char* base_;
  std::size_t end_;
};

// The plans of the launches. They follow each other on one stream and so share what they are lent,
// the begin of the call's workspace: all of it that must be zero is there, and is left zero.
struct Launches {
  ForwardPlan parts, tail;
  bool has_tail = false;
  Workspace lent;
};

ForwardPlan plan_of(const ForwardRow& row, const ForwardPlan& whole, const ForwardProblem& part) {
  ForwardPlan plan;
  plan.problem = part;
  plan.device = whole.device;
  plan.kernel = &row.info;
  plan.softmax = only_softmax(part);
  row.configure(&plan);
  return plan;
}

Launches launches_of(const ForwardRow& row, const ForwardRow* prefix, const ForwardPlan& plan) {
  Launches result;
  const ForwardProblem& p = plan.problem;
  result.parts = plan_of(prefix != nullptr ? *prefix : row, plan, parts_problem(p, p.num_splits));
  result.lent = result.parts.workspace;
  result.has_tail = split_form(p) == core::SplitForm::causal;
  if (result.has_tail) {
    result.tail = plan_of(row, plan, tail_problem(p));
    const Workspace& own = result.tail.workspace;
    result.lent.bytes = core::max_of(result.lent.bytes, own.bytes);
    result.lent.zeroed_bytes = core::max_of(result.lent.zeroed_bytes, own.zeroed_bytes);
  }
  return result;
}

// Sizes and shape of the call; without its tensors.
core::SplitJob shape_of(const ForwardPlan& plan, int tile) {
  const ForwardProblem& p = plan.problem;
  core::SplitJob job;
  job.form = split_form(p);
  job.splits = p.num_splits;
  job.tile = tile;
  job.batch = static_cast<int>(p.batch);
  job.heads_q = static_cast<int>(p.heads_q);
  job.seqlen_q = static_cast<int>(p.seqlen_q);
  job.seqlen_k = static_cast<int>(p.seqlen_k);
  job.head_dim = static_cast<int>(p.head_dim);
  job.head_dim_v = static_cast<int>(p.head_dim_v);
  const core::Mask window = core::make_mask(0, 0, p.window_left, p.window_right);
  job.window_left = window.left;
  job.window_right = window.right;
  job.total_q = p.total_q;
  job.key_rows = p.packed_k || p.batch == 1 ? 0 : rows_between(p.k);
  job.element_bytes = dtype_bytes(p.dtype);
  return job;
}

// Arrays and results in the workspace at `base`, behind what the launches are lent; null: only the
// bytes are wanted, which are returned.
std::size_t place(const ForwardProblem& p, const Launches& launches, void* base,
                  core::SplitJob* job) {
  const bool shifted = job->form == core::SplitForm::shifted;
  const std::int64_t parts = p.batch * job->parts();
  const std::int64_t rows = p.total_q * job->parts();
  const std::int64_t tail_rows = launches.has_tail ? p.total_q : 0;
  Carver carver(base, launches.lent.bytes);
  // Null where there are none.
  const auto array = [&](bool wanted, std::int64_t count) {
    return wanted ? carver.take<std::int32_t>(count) : nullptr;
  };
  job->q_begin = array(true, parts + 1);
  job->q_used = array(p.has_seqused_q, parts);
  job->part_begin = array(true, parts + 1);
  job->part_used = array(true, parts);
  job->part_shift = array(shifted, parts);
  job->tail_begin = array(launches.has_tail, p.batch + 1);
  job->tail_used = array(launches.has_tail, p.batch);
  job->part_max_logit = p.wants_max_logit ? carver.take<float>(parts * p.heads_q) : nullptr;
  job->q_parts = carver.take<char>(rows * p.heads_q * p.head_dim * job->element_bytes);
  job->part_o = carver.take<float>(rows * p.heads_q * p.head_dim_v);
  job->part_lse = carver.take<float>(rows * p.heads_q);
  job->tail_o = carver.take<float>(tail_rows * p.heads_q * p.head_dim_v);
  job->tail_lse = carver.take<float>(tail_rows * p.heads_q);
  return carver.end();
}

// Whether vectors of `elements` of a tensor's rows of `dim` elements are aligned to their size.
bool has_vectors(const Layout& layout, std::int64_t batch, std::int64_t dim, std::int64_t elements,
                 int element_bytes) {
  return layout.base_align_bytes >= elements * element_bytes && dim % elements == 0 &&
         batch % elements == 0 && layout.seq % elements == 0 && layout.head % elements == 0;
}

void add_tensors(const ForwardProblem& p, const ForwardTensors& t, core::SplitJob* job) {
  job->cu_seqlens_q = t.cu_seqlens_q;
  job->cu_seqlens_k = t.cu_seqlens_k;
  job->seqused_q = t.seqused_q;
  job->seqused_k = t.seqused_k;
  job->k_begin = t.k_begin;
  job->mask_shift = t.mask_shift;
  job->q = t.q;
  job->q_batch = p.packed_q ? 0 : p.q.batch;
  job->q_seq = p.q.seq;
  job->q_head = p.q.head;
  job->wide_q =
      has_vectors(p.q, job->q_batch, p.head_dim, 16 / job->element_bytes, job->element_bytes);
  job->sinks = p.variant.has_sinks ? t.variant.sinks : nullptr;
  job->o = t.o;
  job->o_batch = p.packed_q ? 0 : p.o.batch;
  job->o_seq = p.o.seq;
  job->o_head = p.o.head;
  job->wide_o = has_vectors(p.o, job->o_batch, p.head_dim_v, 4, dtype_bytes(output_dtype(p)));
  job->o_low = p.wants_o_low ? t.o_low : nullptr;
  job->lse = p.wants_lse ? t.lse : nullptr;
  job->max_logit = p.wants_max_logit ? t.max_logit : nullptr;
}

ForwardTensors parts_tensors(const ForwardTensors& call, const core::SplitJob& job) {
  ForwardTensors t = call;
  t.q = job.q_parts;
  t.o = const_cast<float*>(job.part_o);
  t.lse = const_cast<float*>(job.part_lse);
  t.o_low = nullptr;
  t.max_logit = job.part_max_logit;
  t.cu_seqlens_q = job.q_begin;
  t.seqused_q = job.q_used;
  t.cu_seqlens_k = job.k_begin == nullptr ? job.part_begin : nullptr;
  t.k_begin = job.k_begin == nullptr ? nullptr : job.part_begin;
  t.seqused_k = job.part_used;
  t.mask_shift = job.part_shift;
  t.variant.sinks = nullptr;
  return t;
}

ForwardTensors tail_tensors(const ForwardTensors& call, const core::SplitJob& job) {
  ForwardTensors t = call;
  t.o = const_cast<float*>(job.tail_o);
  t.lse = const_cast<float*>(job.tail_lse);
  t.o_low = nullptr;
  t.cu_seqlens_k = job.k_begin == nullptr ? job.tail_begin : nullptr;
  t.k_begin = job.k_begin == nullptr ? nullptr : job.tail_begin;
  t.seqused_k = job.tail_used;
  t.variant.sinks = nullptr;
  return t;
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

void configure_split(const ForwardRow& row, const ForwardRow* prefix, ForwardPlan* plan) {
  const Launches launches = launches_of(row, prefix, *plan);
  const ForwardPlan& own = launches.has_tail ? launches.tail : launches.parts;
  plan->tile_q = own.tile_q;
  plan->tile_k = own.tile_k;
  plan->blocks = own.blocks;
  plan->softmax = launches.parts.softmax;
  plan->softmax_source = launches.parts.softmax_source;
  plan->num_splits = plan->problem.num_splits;
  plan->split_tile = core::min_of(launches.parts.tile_k, core::kMostSplitTile);
  if (launches.has_tail) {
    plan->prefix_kernel = launches.parts.kernel;
    plan->prefix_blocks = launches.parts.blocks;
  }
  plan->workspace.zeroed_bytes = launches.lent.zeroed_bytes;
  core::SplitJob job = shape_of(*plan, plan->split_tile);
  plan->workspace.bytes = place(plan->problem, launches, nullptr, &job);
}

Status run_split(const ForwardRow& row, const ForwardRow* prefix, const ForwardPlan& plan,
                 const ForwardTensors& tensors, void* workspace, void* stream) {
  const Launches launches = launches_of(row, prefix, plan);
  core::SplitJob job = shape_of(plan, plan.split_tile);
  place(plan.problem, launches, workspace, &job);
  add_tensors(plan.problem, tensors, &job);
  Status status = row.prepare_splits(job, plan.device, stream);
  if (status.ok()) {
    status = (prefix != nullptr ? *prefix : row)
                 .run(launches.parts, parts_tensors(tensors, job), workspace, stream);
  }
  if (status.ok() && launches.has_tail) {
    status = row.run(launches.tail, tail_tensors(tensors, job), workspace, stream);
  }
  return status.ok() ? row.merge_splits(job, output_dtype(plan.problem), plan.device, stream)
                     : status;
}

int split_launches(const ForwardPlan& plan, ForwardPlan (&launches)[2]) {
  const RowList<ForwardRow> list = forward_rows();
  const ForwardRow* row = nullptr;
  const ForwardRow* prefix = nullptr;
  for (int i = 0; i < list.count; ++i) {
    row = &list.rows[i].info == plan.kernel ? list.rows + i : row;
    prefix = &list.rows[i].info == plan.prefix_kernel ? list.rows + i : prefix;
  }
  if (row == nullptr) {
    return 0;
  }
  const Launches all = launches_of(*row, prefix, plan);
  launches[0] = all.parts;
  launches[1] = all.tail;
  return all.has_tail ? 2 : 1;
}

}  // namespace pantile::host
