// What a split call lends and launches; which problems the parts are is in split.cc.
#include <cstddef>
#include <cstdint>

#include "host/shape.h"
#include "host/softmax.h"
#include "host/split.h"

namespace pantile::host {
namespace {

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

}  // namespace

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
