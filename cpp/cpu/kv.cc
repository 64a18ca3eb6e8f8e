// Decode over a cache: the CPU's rows of the kernel table. Append is in kv_append.cc, the textbook
// in kv_reference.cc.
#include <array>
#include <cinttypes>

#include "core/scaling.h"
#include "cpu/backend.h"
#include "cpu/items.h"
#include "cpu/kv_support.h"

namespace pantile::cpu {
namespace {

constexpr std::int64_t kMostStateBytes = std::int64_t{256} << 20;  // of parts that chunks store
constexpr std::int64_t kChunkKeys = 512;                           // at least, for split automatic

const float* decoded_e4m3() {
  static const std::array<float, 256> numbers = [] {
    std::array<float, 256> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      table[code] = core::decode_e4m3(static_cast<std::uint8_t>(code));
    }
    return table;
  }();
  return numbers.data();
}

// The parts of one sequence at most, when work is cut into `chunks`.
std::int64_t most_parts(const KvProblem& p, std::int64_t chunks) {
  const auto slots = static_cast<int>(capacity(p));
  switch (p.split) {
    case KvSplit::automatic: return chunks;
    case KvSplit::invariant: return core::most_invariant_parts(slots);
    case KvSplit::fixed: return core::part_count(slots, static_cast<int>(p.split_keys));
  }
  return chunks;
}

// One where (sequence, head, tile) triples are enough for the threads, or where the parts that
// chunks would store take too much memory.
std::int64_t chunk_count(const KvProblem& p, const DeviceProps& device, std::int64_t tiles,
                         std::int64_t state_floats) {
  const std::int64_t wanted = core::ceil_div<std::int64_t>(3 * device.threads, tiles);
  const std::int64_t useful = core::max_of<std::int64_t>(capacity(p) / kChunkKeys, 1);
  const std::int64_t chunks = device.threads == 1 ? 1 : core::min_of(wanted, useful);
  const std::int64_t parts = most_parts(p, chunks);
  const std::int64_t bytes = tiles * parts * kDecodeRows * state_floats * 4;
  return bytes > kMostStateBytes
             ? 1
             : core::clamp<std::int64_t>(chunks, 1, core::max_of<std::int64_t>(parts, 1));
}

std::int64_t row_tiles(const KvProblem& p) {
  return core::ceil_div<std::int64_t>(p.seqlen_q * (p.heads_q / p.heads_k), kDecodeRows);
}

DecodeJob decode_job(const DecodePlan& plan, const KvTensors& tensors) {
  const KvProblem& p = plan.problem;
  DecodeJob job;
  job.problem = &plan.problem;
  job.tensors = tensors;
  job.arrays = kv_arrays(p, tensors);
  job.decoded_e4m3 = decoded_e4m3();
  job.group = static_cast<int>(p.heads_q / p.heads_k);
  job.row_tiles = static_cast<int>(row_tiles(p));
  job.state_floats = kColumnPad + padded(static_cast<int>(p.head_dim_v));
  const std::int64_t tiles = p.batch * p.heads_k * job.row_tiles;
  job.chunks = static_cast<int>(chunk_count(p, plan.device, tiles, job.state_floats));
  job.most_parts = job.chunks > 1 ? most_parts(p, job.chunks) : 0;
  return job;
}

struct DecodeWorkspace {
  std::int32_t* schedule;
  float* states;
  void* scratch;
  std::size_t scratch_bytes;  // of one worker
  int workers;
  std::size_t bytes;
};

int worker_count(const DecodePlan& plan) {
  const KvProblem& p = plan.problem;
  const double work = static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seqlen_q) *
                      static_cast<double>(capacity(p)) *
                      static_cast<double>(p.head_dim + p.head_dim_v);
  const auto useful = static_cast<std::int64_t>(core::min_of(work / kWorkPerThread, 1e6));
  return static_cast<int>(core::clamp<std::int64_t>(core::min_of<std::int64_t>(useful, plan.blocks),
                                                    1, core::max_of(plan.device.threads, 1)));
}

DecodeWorkspace decode_workspace(const DecodePlan& plan, const DecodeJob& job, void* base) {
  const KvProblem& p = plan.problem;
  Carver carver(base);
  DecodeWorkspace parts{};
  parts.schedule = carver.take<std::int32_t>(p.batch);
  parts.states = carver.take<float>(p.batch * p.heads_k * job.row_tiles * job.most_parts *
                                    kDecodeRows * job.state_floats);
  parts.workers = worker_count(plan);
  parts.scratch_bytes = aligned(decode_scratch(job, nullptr).bytes);
  parts.scratch = carver.take<char>(static_cast<std::int64_t>(parts.scratch_bytes) * parts.workers);
  parts.bytes = carver.end() - reinterpret_cast<std::uintptr_t>(base);
  return parts;
}

// Keys of a part of a sequence, a multiple of kDecodeKeys.
int part_keys(const DecodeJob& job, int keys) {
  const KvProblem& p = *job.problem;
  switch (p.split) {
    case KvSplit::invariant: return core::invariant_part_keys(keys);
    case KvSplit::fixed: return static_cast<int>(p.split_keys);
    case KvSplit::automatic: break;
  }
  return core::max_of(core::round_up(core::ceil_div(keys, job.chunks), kDecodeKeys), kDecodeKeys);
}

void fill_schedule(const DecodeJob& job, std::int32_t* schedule) {
  for (std::int64_t b = 0; b < job.problem->batch; ++b) {
    const auto sequence = core::locate_kv_sequence(job.arrays, static_cast<int>(b));
    schedule[b] = part_keys(job, sequence.keys);
  }
}

// A schedule that was made for other lengths may be too long for the workspace.
Status check_schedule(const DecodeJob& job) {
  for (std::int64_t b = 0; b < job.problem->batch; ++b) {
    const auto sequence = core::locate_kv_sequence(job.arrays, static_cast<int>(b));
    const std::int32_t want = part_keys(job, sequence.keys);
    if (job.schedule[b] != want) {
      return Status::error(StatusCode::invalid_argument,
                           "schedule[%" PRId64
                           "] is %d; for these lengths it is %d: make the "
                           "schedule again when lengths change",
                           b, job.schedule[b], want);
    }
  }
  return Status();
}

}  // namespace

Status accept_decode(const KernelInfo&, const KvProblem& p, const DeviceProps& device) {
  if (device.device.type != DeviceType::cpu) {
    return Status::error(StatusCode::unsupported, "it runs on the CPU; the tensors are on a GPU");
  }
  const double tiles = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) *
                       static_cast<double>(p.seqlen_q + 1) * 3.0 * device.threads;
  if (tiles > 2e9 * kDecodeRows) {
    return Status::error(StatusCode::unsupported,
                         "batch * heads_q * seqlen_q * threads must stay below 2^34");
  }
  return Status();
}

void configure_decode(DecodePlan* plan) {
  const KvProblem& p = plan->problem;
  plan->tile_q = kDecodeRows;
  plan->tile_k = kDecodeKeys;
  plan->schedule_ints = p.batch;
  const DecodeJob job = decode_job(*plan, KvTensors());
  plan->blocks = static_cast<int>(p.batch * p.heads_k * job.row_tiles * job.chunks);
  plan->workspace.bytes = decode_workspace(*plan, job, nullptr).bytes;
}

Status schedule_decode(const DecodePlan& plan, const KvTensors& tensors, std::int32_t* schedule,
                       void*) {
  fill_schedule(decode_job(plan, tensors), schedule);
  return Status();
}

Status run_decode(const DecodePlan& plan, const KvTensors& tensors, void* workspace, void*) {
  Status status = check_isa(plan.device);
  if (!status.ok()) {
    return status;
  }
  DecodeJob job = decode_job(plan, tensors);
  const DecodeWorkspace parts = decode_workspace(plan, job, workspace);
  job.states = parts.states;
  job.schedule = tensors.schedule;
  if (job.schedule == nullptr) {
    fill_schedule(job, parts.schedule);
    job.schedule = parts.schedule;
  } else {
    status = check_schedule(job);
  }
  const KernelTable& kernels = kernels_for(plan.device.isa);
  if (status.ok()) {
    status = run_items(job, kernels.decode, plan.blocks, parts.workers, parts.scratch,
                       parts.scratch_bytes);
  }
  if (status.ok() && job.chunks > 1) {
    status = run_items(job, kernels.merge_decode, plan.blocks / job.chunks, parts.workers,
                       parts.scratch, parts.scratch_bytes);
  }
  return status;
}

}  // namespace pantile::cpu
