// Plans, runs and explanations of decode and append (kv.h): as attention.cc does for the others.
#include "pantile/kv.h"

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "build_info.h"
#include "host/features.h"
#include "host/kernel_table.h"
#include "host/shape.h"
#include "host/validate.h"

namespace pantile {
namespace {

using host::AppendRow;
using host::DecodeRow;
using host::RowList;

constexpr StatusCode kInvalid = StatusCode::invalid_argument;
constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr Backend kFamilies[] = {Backend::hopper, Backend::ampere, Backend::cpu,
                                 Backend::reference};

// What differs between the two passes.
struct Decode {
  using Row = DecodeRow;
  static RowList<Row> rows() { return host::decode_rows(); }
  static Status validate(const KvProblem& p) { return host::validate_decode(p); }
  static KvProblem canonical(const KvProblem& p) { return host::canonical_decode(p); }
  static bool writes_nothing(const KvProblem& p) {
    return host::kv_query_shape(p, p.head_dim_v).empty();
  }
};
struct Append {
  using Row = AppendRow;
  static RowList<Row> rows() { return host::append_rows(); }
  static Status validate(const KvProblem& p) { return host::validate_append(p); }
  static KvProblem canonical(const KvProblem& p) { return host::canonical_append(p); }
  static bool writes_nothing(const KvProblem& p) {
    return host::kv_new_shape(p, p.head_dim).empty() &&
           (!p.rotates_q || host::kv_query_shape(p, p.head_dim).empty());
  }
};

Status validate_all(Status of_problem, const DeviceProps& device, const PlanOptions& options) {
  if (of_problem.ok()) {
    of_problem = host::validate(device);
  }
  return of_problem.ok() ? host::validate(options) : of_problem;
}

Status row_rule(const KernelInfo& row, const KvProblem& p) {
  if (p.dtype != row.dtype) {
    return Status::error(kUnsupported, "serves %s, dtype is %s", dtype_name(row.dtype),
                         dtype_name(p.dtype));
  }
  if (p.head_dim > row.head_dim || p.head_dim_v > row.head_dim_v) {
    return Status::error(kUnsupported,
                         "serves head dims up to %d and %d, they are %" PRId64 " and %" PRId64,
                         row.head_dim, row.head_dim_v, p.head_dim, p.head_dim_v);
  }
  return host::feature_rule(row, host::required(p));
}

// Ok, or why this row does not serve the canonical problem.
template <class Row>
Status consider(const Row& row, const KvProblem& problem, const DeviceProps& device,
                const PlanOptions& options) {
  const Backend backend = row.info.backend;
  if (options.backend == Backend::automatic && backend == Backend::reference) {
    return Status::error(kUnsupported,
                         "the reference is only taken when options.backend asks for it");
  }
  if (options.backend != Backend::automatic && options.backend != backend) {
    return Status::error(kUnsupported, "options.backend asks for %s",
                         backend_name(options.backend));
  }
  const bool on_gpu = backend == Backend::hopper || backend == Backend::ampere;
  if (on_gpu && device.device.type != DeviceType::cuda) {
    return Status::error(kUnsupported, "needs a CUDA device");
  }
  Status status = row_rule(row.info, problem);
  if (status.ok()) {
    status = row.accept(row.info, problem, device);
  }
  if (status.ok() && !row.info.compiled) {
    return Status::error(StatusCode::unavailable, "it would serve, but this build has no CUDA: %s",
                         PANTILE_CUDA_REASON);
  }
  return status;
}

int likeness(const KernelInfo& row, const KvProblem& p) {
  const bool dims = row.head_dim >= p.head_dim && row.head_dim_v >= p.head_dim_v;
  return 2 * (row.dtype == p.dtype) + dims;
}

// Of a family's rows, the one most like the problem; null when it has none for this pass.
template <class Row>
const Row* closest_row(RowList<Row> list, Backend family, const KvProblem& problem) {
  const Row* closest = nullptr;
  for (int i = 0; i < list.count; ++i) {
    const Row& row = list.rows[i];
    if (row.info.backend == family &&
        (closest == nullptr || likeness(row.info, problem) > likeness(closest->info, problem))) {
      closest = &row;
    }
  }
  return closest;
}

template <class Row>
Status refusal(RowList<Row> list, const KvProblem& problem, const DeviceProps& device,
               const PlanOptions& options) {
  const char* pass = pass_name(list.rows[0].info.pass);
  char reasons[Status::kMessageCapacity] = {0};
  int length = 0;
  StatusCode code = kUnsupported;
  for (const Backend family : kFamilies) {
    const bool asked = options.backend == Backend::automatic ? family != Backend::reference
                                                             : family == options.backend;
    const Row* row = closest_row(list, family, problem);
    const int room = Status::kMessageCapacity - length;
    if (!asked || row == nullptr || room <= 1) {
      continue;
    }
    const Status reason = consider(*row, problem, device, options);
    if (reason.code() == StatusCode::unavailable) {
      code = StatusCode::unavailable;
    }
    length += std::snprintf(reasons + length, static_cast<std::size_t>(room), " %s: %s.",
                            backend_name(family), reason.message());
  }
  if (length == 0) {
    return Status::error(code, "%s has no %s kernels", backend_name(options.backend), pass);
  }
  return Status::error(code, "no %s kernel serves this problem.%s", pass, reasons);
}

template <class Way, class Plan>
Status make_plan(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
                 Plan* plan) {
  if (plan == nullptr) {
    return Status::error(kInvalid, "plan is null");
  }
  Status status = validate_all(Way::validate(problem), device, options);
  if (!status.ok()) {
    return status;
  }
  const KvProblem canonical = Way::canonical(problem);
  const auto list = Way::rows();
  for (int i = 0; i < list.count; ++i) {
    const auto& row = list.rows[i];
    if (consider(row, canonical, device, options).ok()) {
      *plan = Plan();
      plan->problem = canonical;
      plan->device = device;
      plan->kernel = &row.info;
      if (!Way::writes_nothing(canonical)) {
        row.configure(plan);
      }
      return Status();
    }
  }
  return refusal(list, canonical, device, options);
}

// The row that a plan was made for, in *row.
template <class Way>
Status find_row(const KernelInfo* kernel, const typename Way::Row** row) {
  const auto list = Way::rows();
  const char* pass = pass_name(list.rows[0].info.pass);
  for (int i = 0; i < list.count; ++i) {
    if (&list.rows[i].info == kernel) {
      *row = &list.rows[i];
      return list.rows[i].run != nullptr
                 ? Status()
                 : Status::error(StatusCode::unavailable, "%s: this build has no CUDA: %s",
                                 kernel->name, PANTILE_CUDA_REASON);
    }
  }
  return Status::error(kInvalid,
                       "plan.kernel is not a row of the %s kernels; make the plan with plan_%s",
                       pass, pass);
}

template <class Way>
int explain(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
            Verdict* verdicts, int capacity) {
  const Status status = validate_all(Way::validate(problem), device, options);
  const KvProblem canonical = status.ok() ? Way::canonical(problem) : problem;
  const auto list = Way::rows();
  bool taken = false;
  for (int i = 0; i < list.count && i < capacity; ++i) {
    Verdict& verdict = verdicts[i];
    verdict.kernel = &list.rows[i].info;
    verdict.reason = status.ok() ? consider(list.rows[i], canonical, device, options) : status;
    verdict.chosen = verdict.reason.ok() && !taken;
    taken = taken || verdict.chosen;
    verdict.closest = &list.rows[i] == closest_row(list, verdict.kernel->backend, canonical);
  }
  return list.count;
}

}  // namespace

Status plan_decode(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
                   DecodePlan* plan) {
  return make_plan<Decode>(problem, device, options, plan);
}

Status plan_append(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
                   AppendPlan* plan) {
  return make_plan<Append>(problem, device, options, plan);
}

Status run_schedule(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                    void* stream) {
  const DecodeRow* row = nullptr;
  Status status = find_row<Decode>(plan.kernel, &row);
  if (!status.ok() || plan.schedule_ints == 0) {
    return status;
  }
  if (schedule == nullptr || tensors.lengths == nullptr) {
    return Status::error(kInvalid, "%s is null; it must be set",
                         schedule == nullptr ? "schedule" : "lengths");
  }
  return row->schedule(plan, tensors, schedule, stream);
}

Status run_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace, void* stream) {
  const DecodeRow* row = nullptr;
  Status status = find_row<Decode>(plan.kernel, &row);
  if (status.ok()) {
    status = host::validate_decode_tensors(plan.problem, tensors);
  }
  if (status.ok()) {
    status = host::validate_workspace(plan.workspace, workspace);
  }
  if (!status.ok() || Decode::writes_nothing(plan.problem)) {
    return status;
  }
  return row->run(plan, tensors, workspace, stream);
}

Status run_append(const AppendPlan& plan, const KvTensors& tensors, void* stream) {
  const AppendRow* row = nullptr;
  Status status = find_row<Append>(plan.kernel, &row);
  if (status.ok()) {
    status = host::validate_append_tensors(plan.problem, tensors);
  }
  if (!status.ok() || Append::writes_nothing(plan.problem)) {
    return status;
  }
  return row->run(plan, tensors, nullptr, stream);
}

int explain_decode(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
                   Verdict* verdicts, int capacity) {
  return explain<Decode>(problem, device, options, verdicts, capacity);
}

int explain_append(const KvProblem& problem, const DeviceProps& device, const PlanOptions& options,
                   Verdict* verdicts, int capacity) {
  return explain<Append>(problem, device, options, verdicts, capacity);
}

// ---- contents of arrays that lie in host memory ----------------------------------------------

namespace {

Status check_offsets(const char* name, const std::int32_t* cu, bool packed, std::int64_t batch,
                     std::int64_t longest, std::int64_t total) {
  if (!packed || cu == nullptr) {
    return Status();
  }
  if (cu[0] != 0) {
    return Status::error(kInvalid, "%s[0] is %d; it must be 0", name, cu[0]);
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t rows = std::int64_t{cu[b + 1]} - cu[b];
    if (rows < 0 || rows > longest) {
      return Status::error(
          kInvalid, "%s makes sequence %" PRId64 " %" PRId64 " long; it must be from 0 to %" PRId64,
          name, b, rows, longest);
    }
  }
  if (cu[batch] > total) {
    return Status::error(kInvalid, "%s[%" PRId64 "] is %d; there are %" PRId64 " rows", name, batch,
                         cu[batch], total);
  }
  return Status();
}

Status check_pages(const KvProblem& p, const KvTensors& t, std::int64_t b, std::int64_t row,
                   std::int64_t first, std::int64_t keys) {
  const std::int64_t end = first < keys ? (keys - 1) / p.page_size + 1 : 0;
  for (std::int64_t page = first / p.page_size; page < end; ++page) {
    const std::int32_t number = t.block_table[row * p.table_stride + page];
    if (number < 0 || number >= p.blocks) {
      return Status::error(kInvalid,
                           "block_table[%" PRId64 ", %" PRId64 "] is %d; sequence %" PRId64
                           " uses that page, so it must be from 0 to %" PRId64,
                           row, page, number, b, p.blocks - 1);
    }
  }
  return Status();
}

Status check_sequence(const KvProblem& p, const KvTensors& t, std::int64_t b) {
  const std::int64_t before = t.lengths[b];
  const std::int64_t added =
      p.packed_new ? std::int64_t{t.cu_seqlens_new[b + 1]} - t.cu_seqlens_new[b] : p.seqlen_new;
  if (before < 0 || before + added > capacity(p)) {
    return Status::error(kInvalid,
                         "lengths[%" PRId64 "] is %" PRId64 " and %" PRId64
                         " keys are new; it must be 0 or more, and the sum at most %" PRId64
                         ", the slots of a sequence",
                         b, before, added, capacity(p));
  }
  const std::int64_t pad = p.has_leftpad ? t.leftpad[b] : 0;
  if (pad < 0 || pad > before + added) {
    return Status::error(kInvalid,
                         "leftpad[%" PRId64 "] is %" PRId64 "; it must be from 0 to %" PRId64, b,
                         pad, before + added);
  }
  const std::int64_t row = p.has_cache_index ? t.cache_index[b] : b;
  const std::int64_t rows = p.page_size > 0 ? p.table_rows : p.blocks;
  if (row < 0 || row >= rows) {
    return Status::error(kInvalid,
                         "cache_index[%" PRId64 "] is %" PRId64 "; it must be from 0 to %" PRId64,
                         b, row, rows - 1);
  }
  return p.page_size > 0 ? check_pages(p, t, b, row, pad, before + added) : Status();
}

}  // namespace

Status check_cache(const KvProblem& p, const KvTensors& t) {
  if (p.batch > 0 && t.lengths == nullptr) {
    return Status::error(kInvalid, "lengths is null; it must hold batch lengths");
  }
  Status status =
      check_offsets("cu_seqlens_q", t.cu_seqlens_q, p.packed_q, p.batch, p.seqlen_q, p.total_q);
  if (status.ok()) {
    status = check_offsets("cu_seqlens_new", t.cu_seqlens_new, p.packed_new, p.batch, p.seqlen_new,
                           p.total_new > 0 ? p.total_new : p.batch * p.seqlen_new);
  }
  for (std::int64_t b = 0; b < p.batch && status.ok(); ++b) {
    status = check_sequence(p, t, b);
  }
  return status;
}

const char* cache_format_name(CacheFormat format) {
  switch (format) {
    case CacheFormat::plain: return "plain";
    case CacheFormat::e4m3: return "e4m3";
    case CacheFormat::int8: return "int8";
  }
  return "?";
}

const char* cache_scale_name(CacheScale scale) {
  switch (scale) {
    case CacheScale::none: return "none";
    case CacheScale::head: return "head";
    case CacheScale::token: return "token";
  }
  return "?";
}

const char* kv_split_name(KvSplit split) {
  switch (split) {
    case KvSplit::automatic: return "automatic";
    case KvSplit::invariant: return "invariant";
    case KvSplit::fixed: return "fixed";
  }
  return "?";
}

}  // namespace pantile
