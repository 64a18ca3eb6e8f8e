// New keys and values into a cache: rotated, quantised, and never outside of a sequence's slots.
#include <cmath>
#include <cstring>

#include "core/scaling.h"
#include "cpu/backend.h"
#include "cpu/elements.h"
#include "cpu/items.h"
#include "cpu/kv_support.h"

namespace pantile::cpu {
namespace {

constexpr int kItemRows = 32;  // new keys, and queries, of a work item

struct AppendJob {
  const KvProblem* problem;
  KvTensors tensors;
  core::KvArrays arrays;
  int tiles;  // items of a sequence
};

// Row of cos and sin for a position.
std::int64_t table_row(const KvProblem& p, std::int64_t position) {
  return core::clamp<std::int64_t>(position, 0, p.rotary_positions - 1) * p.rotary_stride;
}

// Turns the rotary part of a row; with V inside of K it is the last channels.
void rotate(const KvProblem& p, const KvTensors& t, std::int64_t position, float* row) {
  const auto half = static_cast<int>(p.rotary_dim / 2);
  float cosines[kMaxKvHeadDim / 2];
  float sines[kMaxKvHeadDim / 2];
  const std::int64_t at = table_row(p, position);
  load_row(p.rotary_dtype, t.rotary_cos, at, half, cosines);
  load_row(p.rotary_dtype, t.rotary_sin, at, half, sines);
  float* const channels = row + (p.v_in_k ? p.head_dim - p.rotary_dim : 0);
  for (int i = 0; i < half; ++i) {
    float& first = channels[p.rotary_interleaved ? 2 * i : i];
    float& second = channels[p.rotary_interleaved ? 2 * i + 1 : i + half];
    const float x = first;
    const float y = second;
    first = x * cosines[i] - y * sines[i];
    second = x * sines[i] + y * cosines[i];
  }
}

std::uint8_t encode_int8(float x) {
  const float rounded = std::nearbyint(core::clamp(x, -127.0f, 127.0f));
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(rounded));
}

// The codes of a row of `dim` numbers, all with one scale. `scale` is read, or with scales of
// tokens written.
void quantise_row(const KvProblem& p, const float* row, int dim, float* scale,
                  std::uint8_t* codes) {
  const bool e4m3 = p.format == CacheFormat::e4m3;
  float divisor = scale != nullptr ? *scale : 1.0f;
  if (p.scale_kind == CacheScale::token) {
    float most = 0.0f;
    bool finite = true;
    for (int i = 0; i < dim; ++i) {
      finite = finite && std::isfinite(row[i]);
      most = core::max_of(most, std::fabs(row[i]));
    }
    divisor = finite ? most / (e4m3 ? core::kE4m3Max : 127.0f) : std::nanf("");
    *scale = divisor;
    if (!(divisor > 0.0f)) {
      std::memset(codes, 0, static_cast<std::size_t>(dim));
      return;
    }
  }
  for (int i = 0; i < dim; ++i) {
    const float x = row[i] / divisor;
    codes[i] = !e4m3                   ? encode_int8(x)
               : std::isfinite(row[i]) ? core::encode_e4m3(x)
                                       : std::uint8_t{0x7f};
  }
}

struct Target {
  void* data;
  const CacheLayout* layout;
  float* scales;
  const ScaleLayout* scale_layout;
};

void store_row(const AppendJob& job, const Target& to, const Place& place, int batch, int head,
               const float* row, int dim) {
  const KvProblem& p = *job.problem;
  const std::int64_t at =
      place.block * to.layout->block + place.slot * to.layout->slot + head * to.layout->head;
  if (p.format == CacheFormat::plain) {
    store_floats(p.dtype, to.data, at, dim, row);
    return;
  }
  float* scale = nullptr;
  if (p.scale_kind == CacheScale::head) {
    scale = to.scales + batch * to.scale_layout->block + head * to.scale_layout->head;
  } else if (p.scale_kind == CacheScale::token) {
    scale = to.scales + place.block * to.scale_layout->block + place.slot * to.scale_layout->slot +
            head * to.scale_layout->head;
  }
  quantise_row(p, row, dim, scale, static_cast<std::uint8_t*>(to.data) + at);
}

std::int64_t row_at(const Layout& layout, bool packed, int batch, std::int64_t first, int row,
                    int head) {
  return (packed ? first * layout.seq : batch * layout.batch) + row * layout.seq +
         head * layout.head;
}

// Whether new key `row` of a sequence has a slot; where, if so.
bool find_place(const AppendJob& job, const core::KvSequence& sequence, int row, Place* place) {
  const KvProblem& p = *job.problem;
  const std::int64_t key = std::int64_t{sequence.before} + row;
  const std::int64_t rows = p.page_size > 0 ? p.table_rows : p.blocks;
  if (key < 0 || key >= capacity(p) || sequence.cache_row < 0 || sequence.cache_row >= rows) {
    return false;
  }
  *place = place_of(p, job.tensors, sequence, key);
  return place->block >= 0 && place->block < p.blocks;
}

void append_row(const AppendJob& job, const core::KvSequence& sequence, int batch, int row) {
  const KvProblem& p = *job.problem;
  const KvTensors& t = job.tensors;
  Place place{};
  if (!find_place(job, sequence, row, &place)) {
    return;
  }
  const std::int64_t pad = t.leftpad != nullptr && p.has_leftpad ? t.leftpad[batch] : 0;
  const std::int64_t position = std::int64_t{sequence.before} + row - pad;
  const auto dim = static_cast<int>(p.head_dim);
  const auto dim_v = static_cast<int>(p.head_dim_v);
  float numbers[kMaxKvHeadDim];
  for (int head = 0; head < static_cast<int>(p.heads_k); ++head) {
    load_row(p.dtype, t.k_new, row_at(p.k_new, p.packed_new, batch, sequence.new_row, row, head),
             dim, numbers);
    if (p.rotary_dim > 0) {
      rotate(p, t, position, numbers);
    }
    store_row(job, Target{t.k, &p.k, t.scale_k, &p.scale_k}, place, batch, head, numbers, dim);
    if (!p.v_in_k) {
      load_row(p.dtype, t.v_new, row_at(p.v_new, p.packed_new, batch, sequence.new_row, row, head),
               dim_v, numbers);
      store_row(job, Target{t.v, &p.v, t.scale_v, &p.scale_v}, place, batch, head, numbers, dim_v);
    }
  }
}

void rotate_query(const AppendJob& job, const core::KvSequence& sequence, int batch, int row) {
  const KvProblem& p = *job.problem;
  const KvTensors& t = job.tensors;
  const std::int64_t pad = t.leftpad != nullptr && p.has_leftpad ? t.leftpad[batch] : 0;
  const std::int64_t position = std::int64_t{sequence.before} + row - pad;
  const auto dim = static_cast<int>(p.head_dim);
  float numbers[kMaxKvHeadDim];
  for (int head = 0; head < static_cast<int>(p.heads_q); ++head) {
    load_row(p.dtype, t.q, row_at(p.q, p.packed_q, batch, sequence.query_row, row, head), dim,
             numbers);
    rotate(p, t, position, numbers);
    store_floats(p.dtype, t.q_rotated,
                 row_at(p.q_rotated, p.packed_q, batch, sequence.query_row, row, head), dim,
                 numbers);
  }
}

void append_item(const AppendJob& job, int item, void*) {
  const int batch = item / job.tiles;
  const int first = item % job.tiles * kItemRows;
  const core::KvSequence sequence = core::locate_kv_sequence(job.arrays, batch);
  for (int row = first; row < core::min_of(first + kItemRows, sequence.added); ++row) {
    append_row(job, sequence, batch, row);
  }
  const int queries = job.problem->rotates_q ? sequence.queries : 0;
  for (int row = first; row < core::min_of(first + kItemRows, queries); ++row) {
    rotate_query(job, sequence, batch, row);
  }
}

int tiles_of(const KvProblem& p) {
  const std::int64_t rows = core::max_of(p.seqlen_new, p.rotates_q ? p.seqlen_q : 0);
  return static_cast<int>(core::ceil_div<std::int64_t>(rows, kItemRows));
}

}  // namespace

Status accept_append(const KernelInfo&, const KvProblem& p, const DeviceProps& device) {
  if (device.device.type != DeviceType::cpu) {
    return Status::error(StatusCode::unsupported, "it runs on the CPU; the tensors are on a GPU");
  }
  if (p.batch * tiles_of(p) > (std::int64_t{1} << 31) - 1) {
    return Status::error(StatusCode::unsupported, "batch * seqlen_new / %d must stay below 2^31",
                         kItemRows);
  }
  return Status();
}

void configure_append(AppendPlan* plan) {
  plan->blocks = static_cast<int>(plan->problem.batch * tiles_of(plan->problem));
}

Status run_append(const AppendPlan& plan, const KvTensors& tensors, void*, void*) {
  constexpr double kNumbersPerThread = 1e5;  // a second thread pays for waking it
  const KvProblem& p = plan.problem;
  const AppendJob job{&p, tensors, kv_arrays(p, tensors), tiles_of(p)};
  const double numbers = static_cast<double>(p.total_new * p.heads_k * (p.head_dim + p.head_dim_v) +
                                             p.total_q * p.heads_q * p.head_dim);
  const int workers = static_cast<int>(
      core::clamp(numbers / kNumbersPerThread, 1.0, static_cast<double>(plan.device.threads)));
  return run_items(job, append_item, plan.blocks, workers, nullptr, 0);
}

}  // namespace pantile::cpu
